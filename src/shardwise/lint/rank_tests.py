"""Which ranks reach a statement: ``if rank == 0``, ``if accelerator.is_main_process``, early returns, callers."""

from __future__ import annotations

import ast
import re
from typing import Literal

from shardwise.lint import branches
from shardwise.lint.script import Function, Script, called_name

Ranks = Literal["first", "others", ""]
"""Ranks for which a test is true: the first one, all but the first, or unknown."""
_FIRST = {
    "is_main_process", "is_local_main_process", "is_world_process_zero", "is_local_process_zero", "is_global_zero",
    "is_rank_zero", "is_rank_0", "is_rank0", "is_master",
}  # fmt: skip
_LOOSE = re.compile(
    r"rank|main|master|primary|chief|leader|zero|coordinator|proc|local|is_first|writer|saver|gpu|device|node|host|worker"
    r"|^[^%]*(_id|index|idx|number)\b.* == 0|^not [^%]*(_id|index|idx)\b",
    re.I,
)
_SEVERAL = re.compile("dist|ddp|fsdp|parallel|multi|world", re.I)
_OPPOSITE: dict[Ranks, Ranks] = {"first": "others", "others": "first", "": ""}


def rank_kind(script: Script, node: ast.expr | None, depth: int = 0) -> str:
    """``rank`` or ``local_rank`` where ``node`` is that number; else empty."""
    if node is None or depth > 5:
        return ""
    match node:
        case ast.Call(func=ast.Name(id="int"), args=[inner, *_]) | ast.NamedExpr(value=inner):
            return rank_kind(script, inner, depth + 1)
        case ast.Call():
            name = script.name(node.func)
            if name == "torch.distributed.get_rank":
                return "rank"
            if name == "torch.distributed.get_node_local_rank":
                return "local_rank"
            return _variable(node.args[0]) if name in ("os.environ.get", "os.getenv") and node.args else ""
        case ast.Subscript(slice=key) if script.name(node.value) == "os.environ":
            return _variable(key)
        case ast.IfExp(body=body, orelse=other):
            return rank_kind(script, body, depth + 1) or rank_kind(script, other, depth + 1)
        case ast.Name() | ast.Attribute():
            held = script.value(node)
            if held is not None:
                kinds = {rank_kind(script, one, depth + 1) for one in _held(script, node, held)}
                return kinds.pop() if len(kinds) == 1 else ""
            last = ast.unparse(node).rpartition(".")[2]
            if last in ("local_rank", "local_process_index"):
                return "local_rank"
            return "rank" if last in ("rank", "global_rank", "process_index", "ddp_rank", "node_rank") else ""
    return ""


def _held(script: Script, name: ast.Name | ast.Attribute, held: tuple[ast.expr, int | None, ast.AST]) -> list[ast.expr]:
    """What a name holds; where that is a constant, for a process that runs alone say, what other branches give it."""
    if held[1] is not None:
        return []
    if not isinstance(held[0], ast.Constant) or not isinstance(name, ast.Name):
        return [held[0]]
    return [one for one in script.values(name) if not isinstance(one, ast.Constant)]


def _variable(key: ast.expr) -> str:
    return {"RANK": "rank", "LOCAL_RANK": "local_rank"}.get(str(getattr(key, "value", "")), "")


def is_world_size(script: Script, node: ast.expr | None, depth: int = 0) -> bool:
    """Whether ``node`` is the number of ranks."""
    if node is None or depth > 5:
        return False
    match node:
        case ast.Call(func=ast.Name(id="int" | "float"), args=[inner, *_]):
            return is_world_size(script, inner, depth + 1)
        case ast.Call() if script.name(node.func) in ("os.environ.get", "os.getenv") and node.args:
            return getattr(node.args[0], "value", "") == "WORLD_SIZE"
        case ast.Call():
            return script.name(node.func) == "torch.distributed.get_world_size"
        case ast.Subscript(slice=ast.Constant(value=name)) if script.name(node.value) == "os.environ":
            return name == "WORLD_SIZE"
        case ast.Name() | ast.Attribute():
            held = script.value(node)
            if held is not None:
                return held[1] is None and is_world_size(script, held[0], depth + 1)
            last = ast.unparse(node).rpartition(".")[2]
            return last in ("world_size", "ddp_world_size") or (last == "num_processes" and script.is_accelerator(node))
    return False


def ranks_of(script: Script, test: ast.expr, depth: int = 0) -> Ranks:
    """Ranks for which ``test`` can be true, in a world of several."""
    if depth > 5:
        return ""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            if rank_kind(script, inner):
                return "first"
            conjunction = isinstance(inner, ast.BoolOp)
            return "" if conjunction else _OPPOSITE[ranks_of(script, inner, depth + 1)]
        case ast.BoolOp(op=ast.And(), values=values):
            return next((found for one in values if (found := ranks_of(script, one, depth + 1))), "")
        case ast.BoolOp(op=ast.Or(), values=values):
            answers = {ranks_of(script, one, depth + 1) for one in values if not _of_one_process(one)}
            return answers.pop() if len(answers) == 1 else ""
        case ast.Compare(left=left, ops=[op], comparators=[right]) if rank_kind(script, left):
            return _compared(op, right)
        case ast.Call():
            name = called_name(test)
            function = script.functions.get(name)
            return _answer(script, function, depth) if function else "first" if name in _FIRST else ""
        case ast.Name() | ast.Attribute():
            held = script.value(test)
            if held is not None:
                answers = {ranks_of(script, one, depth + 1) for one in _held(script, test, held)}
                return answers.pop() if len(answers) == 1 else ""
            last = ast.unparse(test).rpartition(".")[2]
            if isinstance(test, ast.Attribute) and _is_property(script.functions.get(last)):
                return _answer(script, script.functions[last], depth)
            return "first" if last in _FIRST else ""
    return ""


def _is_property(function: Function | None) -> bool:
    return function is not None and "property" in {getattr(one, "id", "") for one in function.decorator_list}


def _compared(op: ast.cmpop, right: ast.expr) -> Ranks:
    """Ranks for which ``rank <op> right`` is true, where it tells the first from all others."""
    if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple | ast.List):
        zero = {ast.unparse(one) for one in right.elts} <= {"0", "-1"}
        return ("first" if isinstance(op, ast.In) else "others") if zero else ""
    signs: dict[tuple[type[ast.cmpop], object], Ranks] = {
        **dict.fromkeys([(ast.Eq, 0), (ast.LtE, 0), (ast.Lt, 1)], "first"),
        **dict.fromkeys([(ast.NotEq, 0), (ast.Gt, 0), (ast.GtE, 1)], "others"),
    }
    return signs.get((type(op), getattr(right, "value", None)), "")


def _of_one_process(test: ast.expr) -> bool:
    """Whether a test says that the process runs alone: ``not ddp``, ``rank == -1``, ``world_size == 1``."""
    text = ast.unparse(test)
    return bool(
        re.search(r"^not .*(dist|ddp|init|avail|parallel|multi)|== -1$|world_size == 1$|world_size <= 1$", text)
    )


def _answer(script: Script, function: Function, depth: int) -> Ranks:
    """Ranks for which a function is true, by its last return."""
    returned = [one for one in ast.walk(function) if isinstance(one, ast.Return) and one.value is not None]
    last = max(returned, key=lambda one: one.lineno).value if returned else None
    return ranks_of(script, last, depth + 1) if last is not None else ""


def tests_above(script: Script, node: ast.AST) -> branches.Tests:
    """Tests that decide about ``node`` within its function, each with the answer that it takes."""
    return branches.tests_above(script.parent, node)


def guard(script: Script, node: ast.AST) -> tuple[Ranks, ast.expr | None]:
    """Ranks that reach ``node`` within its function, and the test that says so."""
    for test, answer in tests_above(script, node):
        found = ranks_of(script, test)
        if found and not answer and isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            continue  # the other branch of `a and rank == 0` is taken by all ranks when a is false
        if found:
            return (found if answer else _OPPOSITE[found]), test
    return "", None


def reached_by(script: Script, node: ast.AST, depth: int = 0) -> Ranks:
    """Ranks that reach ``node``, callers in the script included."""
    here, _ = guard(script, node)
    if here or depth > 3:
        return here
    scope = script.scope(node)
    callers = script.callers(scope)
    found = {reached_by(script, call, depth + 1) for call in callers}
    return found.pop() if len(found) == 1 else ""


def perhaps_guarded(script: Script, node: ast.AST, depth: int = 0) -> bool:
    """Whether anything suggests that only some ranks reach ``node``; also where its callers are not in the script."""
    tests = [ast.unparse(test) for test, _ in tests_above(script, node)]
    if any(_LOOSE.search(one) or _SEVERAL.search(one) for one in tests if not one.startswith("__name__ ==")):
        return True
    scope = script.scope(node)
    if not isinstance(scope, Function):
        return depth > 3
    if scope.decorator_list or _LOOSE.search(scope.name.replace("main", "")):
        return True
    callers = script.callers(scope)
    if not callers:
        return scope.name not in ("main", "train") and not _is_spawned(script, scope.name)
    return depth > 3 or any(perhaps_guarded(script, call, depth + 1) for call in callers)


def _is_spawned(script: Script, name: str) -> bool:
    """Whether a function is what ``torch.multiprocessing.spawn`` starts the ranks with."""
    return any(
        isinstance(one, ast.Name) and one.id == name
        for call in script.torch_calls("spawn", "start_processes")
        for one in call.args
    )
