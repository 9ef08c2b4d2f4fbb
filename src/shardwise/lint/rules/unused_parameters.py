"""The rule about models that have no unused parameter, though DDP is told to look for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.lint.fixes import RemoveKeyword, place_of
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Function, Script, called_name, is_constant, keyword, owner


@rule(
    "SW505",
    "unused-parameters-searched-in-vain",
    severity="warning",
    message="find_unused_parameters=True searches the graph in every step, and this model has no unused parameter.",
    why="""Every submodule that the class creates is used in its forward(), which has no branch: in each step DDP walks
    the whole autograd graph, and all-reduces a map of what was used, for nothing.""",
    fix="leave find_unused_parameters out",
)
def unused_parameters_searched(script: Script) -> Iterator[Fault]:
    """DDP(Model(), find_unused_parameters=True) for a class whose forward uses all it has, without a branch."""
    for call in script.torch_calls("DistributedDataParallel"):
        made = script.origin(call.args[0]) if call.args else None
        if not is_constant(keyword(call, "find_unused_parameters"), True) or not isinstance(made, ast.Call):
            continue
        for node in script.nodes:
            if isinstance(node, ast.ClassDef) and node.name == called_name(made) and _uses_everything(script, node):
                yield script.fault(call, "", RemoveKeyword(place_of(call), "find_unused_parameters"))


_UNSURE = (
    ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.With, ast.BoolOp, ast.Match, ast.comprehension, ast.Lambda,
)  # fmt: skip
"""What may leave a module of a forward() without a gradient."""


def _uses_everything(script: Script, node: ast.ClassDef) -> bool:
    methods = {one.name: one for one in node.body if isinstance(one, Function)}
    if set(methods) != {"__init__", "forward"} or {script.name(base) for base in node.bases} != {"torch.nn.Module"}:
        return False
    created = {
        target.attr: one.value
        for one in ast.walk(methods["__init__"])
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Attribute)
    }
    simple = all(
        isinstance(one, ast.Call)
        and script.name(one.func).startswith("torch.nn.")
        and called_name(one) not in ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
        for one in created.values()
    )
    registers = any(ast.unparse(owner(call) or call) == "self" for call in script.calls_in(methods["__init__"]))
    forward = methods["forward"]
    used = {one.attr for one in ast.walk(forward) if isinstance(one, ast.Attribute)}
    cut = any(isinstance(one, _UNSURE) for one in ast.walk(forward)) or used & {"detach", "data", "item"}
    returns = [one for one in ast.walk(forward) if isinstance(one, ast.Return)]
    single = len(returns) == 1 and not isinstance(returns[0].value, ast.Tuple | ast.Dict | ast.List)
    sure = bool(created) and simple and not registers and not cut and not forward.decorator_list
    return sure and single and set(created) <= used and _reads_all(forward)


def _reads_all(forward: Function) -> bool:
    """Whether every name that is assigned is read, and nothing is computed and dropped."""
    read = {one.id for one in ast.walk(forward) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    for one in forward.body:
        match one:
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                names = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
                if not names & read:
                    return False
            case ast.Expr(value=ast.Constant()) | ast.Return() | ast.Assert():
                pass
            case _:
                return False
    return True
