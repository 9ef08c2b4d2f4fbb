"""Facts about one training script, read off its syntax tree: imports, values, wrappers, ranks, guards and loops.

A fact is only stated where the script shows it: what comes from elsewhere is unknown, and a rule is silent about it.

Scripts are read by `ast`, and only fixes are written by LibCST, whose metadata take sixty times as long for the same
files (0.07 s against 4.2 s for 3,719 lines).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from shardwise.lint.branches import exclude, tests_above
from shardwise.lint.rule import Edit, Fault

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.Lambda | ast.ClassDef | ast.Module
Loop = ast.For | ast.While
MOVES = {"to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "double", "requires_grad_"}
"""Methods of a module that return it."""
WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp1",
    "compile": "compile",
}


class Script:
    """A parsed script; every question about it is a method."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.tree = ast.parse(text)
        self.parent: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        todo: list[ast.AST] = [self.tree]
        while todo:  # in the order of the source
            node = todo.pop()
            self.nodes.append(node)
            children = list(ast.iter_child_nodes(node))
            self.parent.update((child, node) for child in children)
            todo += reversed(children)

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in the order of the source."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions and methods by their name; of those that share one, the last."""
        return {node.name: node for node in self.nodes if isinstance(node, Function)}

    @cached_property
    def _aliases(self) -> dict[str, str]:
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found

    def imports(self, *packages: str) -> bool:
        """Whether one of ``packages``, or a part of it, is imported."""
        roots = {name.partition(".")[0] for name in self._aliases.values()}
        return bool(roots & set(packages))

    def name(self, node: ast.AST | None) -> str:
        """Dotted name with imports resolved: ``torch.distributed.barrier`` for ``dist.barrier``; else empty."""
        match node:
            case ast.Name(id=id):
                return self._aliases.get(id, id)
            case ast.Attribute(value=value, attr=attr):
                return f"{inner}.{attr}" if (inner := self.name(value)) else ""
            case ast.Call(func=func):
                return f"{inner}()" if (inner := self.name(func)) else ""
        return ""

    @cached_property
    def _torch_calls(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            name = self.name(call.func)
            if name.startswith("torch."):
                found.setdefault(name.rpartition(".")[2], []).append(call)
        return found

    def torch_calls(self, *names: str) -> list[ast.Call]:
        """Calls of torch's functions and classes with one of these last names."""
        return [call for name in names for call in self._torch_calls.get(name, ())]

    def is_torch(self, node: ast.AST | None, *names: str) -> bool:
        """Whether ``node`` calls one of torch's functions or classes with one of these last names."""
        name = self.name(node.func) if isinstance(node, ast.Call) else ""
        return name.startswith("torch.") and name.rpartition(".")[2] in names

    def collective(self, call: ast.Call) -> str:
        """Name of the collective of torch.distributed that ``call`` is; else empty."""
        module, _, name = self.name(call.func).rpartition(".")
        return name if module.startswith("torch.distributed") and name in COLLECTIVES else ""

    def method_calls(self, *names: str) -> list[ast.Call]:
        """Calls ``something.name(...)`` with one of these names."""
        return [call for call in self.calls if isinstance(call.func, ast.Attribute) and call.func.attr in names]

    def mentions(self, *words: str) -> bool:
        """Whether a name, an attribute, a keyword or an import has one of these words as its own."""
        return bool(self._words & set(words))

    @cached_property
    def _words(self) -> set[str]:
        words: set[str] = {part for name in self._aliases.values() for part in name.split(".")}
        for node in self.nodes:
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=str(word)) | ast.arg(arg=word):
                    words.add(word)
        return words

    # where a node is

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What encloses ``node``, innermost first."""
        while node in self.parent:
            node = self.parent[node]
            yield node

    def scope(self, node: ast.AST) -> Scope:
        """The function, lambda or module that ``node`` is in."""
        return next((one for one in self.above(node) if isinstance(one, Function | ast.Lambda)), self.tree)

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that ``node`` is part of."""
        return next(one for one in (node, *self.above(node)) if isinstance(one, ast.stmt))

    def loops(self, node: ast.AST) -> list[Loop]:
        """Loops around ``node`` within its function, innermost first."""
        found: list[Loop] = []
        for one in self.above(node):
            if isinstance(one, Function | ast.Lambda):
                break
            if isinstance(one, Loop):
                found.append(one)
        return found

    def inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Whether ``node`` is ``outer`` or part of it."""
        return node is outer or outer in self.above(node)

    def apart(self, node: ast.AST, other: ast.AST) -> bool:
        """Whether only one of two nodes of a function can run: they are in different branches."""
        return exclude(tests_above(self.parent, node), tests_above(self.parent, other))

    def calls_in(self, outer: ast.AST) -> list[ast.Call]:
        """Calls within ``outer``."""
        return [node for node in ast.walk(outer) if isinstance(node, ast.Call)]

    def callers(self, function: Scope) -> list[ast.Call]:
        """Calls of a function of this script."""
        if not isinstance(function, Function) or self.functions[function.name] is not function:
            return []
        named = [call for call in self.calls if called_name(call) == function.name]
        return [call for call in named if self.name(call.func) in (function.name, f"self.{function.name}")]

    # what a name holds

    @cached_property
    def _assigned(self) -> dict[tuple[ast.AST, str], list[tuple[ast.expr, int | None, ast.stmt]]]:
        """Values of each name in each scope: the expression, the place in it (of a tuple), the statement."""
        found: dict[tuple[ast.AST, str], list[tuple[ast.expr, int | None, ast.stmt]]] = {}
        for node in self.nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    pairs: list[tuple[ast.expr, ast.expr]] = [(target, value) for target in targets]
                case ast.AnnAssign(value=ast.expr() as value):
                    pairs = [(node.target, value)]
                case ast.With(items=items):
                    pairs = [(item.optional_vars, item.context_expr) for item in items if item.optional_vars]
                case _:
                    continue
            for target, value in pairs:
                several: list[tuple[int | None, ast.expr]] = []
                if isinstance(target, ast.Tuple):
                    several += enumerate(target.elts)
                for place, one in several or [(None, target)]:
                    if isinstance(one, ast.Name | ast.Attribute):
                        paired = _paired(target, value, place)
                        entry = (paired, None, node) if paired is not None else (value, place, node)
                        found.setdefault((self._home(one), ast.unparse(one)), []).append(entry)
        return found

    def _home(self, target: ast.expr) -> ast.AST:
        """Where a name lives: its function, or the class for ``self.x``."""
        if ast.unparse(target).startswith("self."):
            return next((one for one in self.above(target) if isinstance(one, ast.ClassDef)), self.tree)
        return self.scope(target)

    def value(self, node: ast.expr, at: ast.AST | None = None) -> tuple[ast.expr, int | None, ast.AST] | None:
        """What ``node``, a name, holds ``at`` that place: the expression, its place in a tuple, where it was assigned.

        ``None``: the script does not show it. A parameter holds what the script's one or more calls agree on.
        """
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        at = at or node
        home, text = self._home(node) if isinstance(node, ast.Attribute) else self.scope(at), ast.unparse(node)
        while True:
            entries = self._assigned.get((home, text), [])
            if home is self.scope(at):
                entries = [one for one in entries if not self.apart(one[2], at)]
            before = [one for one in entries if _line(one[2]) < _line(at)] if home is self.scope(at) else entries
            if before or entries:
                return (before or entries)[-1]
            if isinstance(home, Function) and (given := self._given(home, text)):
                return given
            if home is self.tree:
                return None
            home = self.scope(home)

    def values(self, name: ast.Name) -> list[ast.expr]:
        """Everything that a name is assigned anywhere in the script, in any branch."""
        return [one[0] for (_, text), entries in self._assigned.items() if text == name.id for one in entries]

    def _given(self, function: Function, parameter: str) -> tuple[ast.expr, int | None, ast.AST] | None:
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        if parameter not in names:
            return None
        for call in self.callers(function):
            place = names.index(parameter) - (names[0] == "self")
            spread = any(isinstance(one, ast.Starred) for one in call.args)
            given = call.args[place] if 0 <= place < len(call.args) and not spread else keyword(call, parameter)
            if given is not None and not (isinstance(given, ast.Name) and self.scope(call) is function):
                return given, None, call
        return None

    def origin(self, node: ast.expr | None, at: ast.AST | None = None, depth: int = 0) -> ast.expr | None:
        """The expression that made ``node``: assignments and parameters followed, ``.to()`` and the like left out."""
        if node is None or depth > 8:
            return node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
            return self.origin(node.func.value, at, depth + 1)
        held = self.value(node, at)
        if held is None or held[1] is not None:
            return node if held is None else held[0]
        return self.origin(held[0], held[2], depth + 1)

    def made_by(self, node: ast.expr | None, at: ast.AST | None = None) -> str:
        """Resolved name of the call that made ``node``, such as ``torch.utils.data.DataLoader``; else empty."""
        made = self.origin(node, at)
        return self.name(made.func) if isinstance(made, ast.Call) else ""

    def wrapped(self, node: ast.expr | None, at: ast.AST | None = None, depth: int = 0) -> set[str]:
        """How the model ``node`` is wrapped there: ddp, fsdp1, fsdp2, compile, accelerate, fabric, deepspeed."""
        if node is None or depth > 8:
            return set()
        at = at or node
        found = {"fsdp2"} if self._sharded_in_place(node, at) else set()
        match node:
            case ast.Attribute(value=inner, attr="module") if self.value(node, at) is None:
                return self.wrapped(inner, at, depth + 1) - {"ddp"}
            case ast.Name() | ast.Attribute():
                held = self.value(node, at)
                if held is not None:
                    expression, place, where = held
                    found |= self._from_call(expression, place, where, depth)
            case ast.Call():
                found |= self._from_call(node, None, at, depth)
        return found - self._excluded(node, at) if found else found

    def _excluded(self, node: ast.expr, at: ast.AST) -> set[str]:
        """Wrappers that an ``isinstance(node, ...)`` around ``at`` leaves out."""
        kinds: set[str] = set()
        for test, answer in tests_above(self.parent, at):
            match test:
                case ast.Call(func=ast.Name(id="isinstance"), args=[held, classes]):
                    if ast.unparse(held) == ast.unparse(node):
                        named = classes.elts if isinstance(classes, ast.Tuple) else [classes]
                        those = {WRAPPERS.get(self.name(one).rpartition(".")[2], "") for one in named}
                        kinds |= set(WRAPPERS.values()) - those if answer else those
        return kinds

    def _from_call(self, node: ast.expr, place: int | None, at: ast.AST, depth: int) -> set[str]:
        if not isinstance(node, ast.Call):
            return self.wrapped(node, at, depth + 1)
        name = self.name(node.func)
        last = name.rpartition(".")[2]
        arguments = [*node.args, *(one.value for one in node.keywords if one.arg in ("module", "model"))]
        inner = arguments[place or 0] if len(arguments) > (place or 0) else None
        if name.startswith("torch.") and last in WRAPPERS:
            return {WRAPPERS[last]} | self.wrapped(inner, at, depth + 1)
        if last in ("prepare", "prepare_model") and self.is_accelerator(node.func):
            return {"accelerate"} | self.wrapped(inner, at, depth + 1)
        if last in ("setup", "setup_module") and self.is_fabric(node.func):
            return {"fabric"}
        if name == "deepspeed.initialize":
            return {"deepspeed"} if not place else set()
        if isinstance(node.func, ast.Attribute) and last in MOVES:
            return self.wrapped(node.func.value, at, depth + 1)
        return set()

    def _sharded_in_place(self, node: ast.expr, at: ast.AST) -> bool:
        text, home = ast.unparse(node), self._home(node) if isinstance(node, ast.Attribute) else self.scope(at)
        return any(
            call.args
            and ast.unparse(call.args[0]) == text
            and (self._home(call.args[0]) if isinstance(home, ast.ClassDef) else self.scope(call)) is home
            and _line(call) < _line(at)
            and not self.apart(call, at)
            for call in self._shardings
        )

    @cached_property
    def _shardings(self) -> list[ast.Call]:
        return self.torch_calls("fully_shard")

    def is_accelerator(self, method: ast.AST) -> bool:
        """Whether ``method`` is one of an Accelerator."""
        owner = method.value if isinstance(method, ast.Attribute) else None
        return owner is not None and self.made_by(owner).startswith("accelerate.")

    def shards_by_accelerate(self, method: ast.AST) -> bool:
        """Whether ``method`` is one of an Accelerator that the script itself gives FSDP or DeepSpeed.

        With plain DDP its saves are no collectives; what `accelerate launch` chooses is not in the script.
        """
        made = self.origin(method.value) if isinstance(method, ast.Attribute) else None
        plugins = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins")
        given = [keyword(made, name) for name in plugins] if isinstance(made, ast.Call) else []
        return self.is_accelerator(method) and any(one is not None and not is_constant(one, None) for one in given)

    def is_fabric(self, method: ast.AST) -> bool:
        """Whether ``method`` is one of a Fabric."""
        owner = method.value if isinstance(method, ast.Attribute) else None
        return owner is not None and self.made_by(owner).endswith("Fabric")

    def parameters_of(self, node: ast.expr | None) -> ast.expr | None:
        """The model of ``model.parameters()`` or ``model.named_parameters()``."""
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="parameters" | "named_parameters")):
                return owner
            case ast.Call(args=[inner, *_]) if self.name(node.func) in ("list", "filter"):
                return self.parameters_of(node.args[-1] if self.name(node.func) == "filter" else inner)
            case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
                return self.parameters_of(first.iter)
        held = self.value(node) if isinstance(node, ast.Name) else None
        return self.parameters_of(held[0]) if held and isinstance(held[0], ast.Call | ast.ListComp) else None

    @cached_property
    def uses_ddp(self) -> bool:
        """Whether the script wraps a model in DistributedDataParallel."""
        return bool(self.torch_calls("DistributedDataParallel"))

    @cached_property
    def wraps(self) -> bool:
        """Whether the script wraps or shards a model in any way that `wrapped` knows."""
        return bool(self.torch_calls("fully_shard", *WRAPPERS)) or self.is_distributed

    @cached_property
    def backend(self) -> str:
        """The backend of init_process_group where it is written there: nccl, gloo; else empty."""
        for call in self.torch_calls("init_process_group"):
            given = keyword(call, "backend") or (call.args[0] if call.args else None)
            held = self.origin(given)
            if isinstance(held, ast.Constant) and isinstance(held.value, str):
                return held.value
        return ""

    @cached_property
    def is_distributed(self) -> bool:
        """Whether the script itself shows that it runs on several ranks."""
        names = {self.name(call.func) for call in self.calls}
        shown = {"torch.distributed.init_process_group", "accelerate.Accelerator", "deepspeed.initialize"}
        return self.uses_ddp or bool(names & shown) or any(name.endswith(".Fabric") for name in names)

    @cached_property
    def trains(self) -> list[ast.Call]:
        """Calls that start a backward pass."""
        return [
            call
            for call in self.method_calls("backward")
            if isinstance(call.func, ast.Attribute)
            and (not call.args or self.is_accelerator(call.func) or self.is_fabric(call.func))
        ]

    def fault(self, node: ast.AST, text: str = "", *edits: Edit) -> Fault:
        """A fault at ``node``."""
        column = len(self._lines[_line(node) - 1].encode()[: getattr(node, "col_offset", 0)].decode()) + 1
        return Fault(_line(node), column, text, edits)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")


COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
}  # fmt: skip


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((one.value for one in call.keywords if one.arg == name), None)


def argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """The value of an argument that may be given by place or by name."""
    return call.args[place] if place < len(call.args) else keyword(call, name)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether ``node`` is this very constant."""
    return isinstance(node, ast.Constant) and node.value is value


def called_name(call: ast.Call) -> str:
    """The last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def owner(call: ast.Call) -> ast.expr | None:
    """What a method is called on."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def has_word(text: str, *words: str) -> bool:
    """Whether ``text`` has one of ``words`` as a part of a name between underscores, dots and the like."""
    return bool(set(re.split(r"[^a-zA-Z0-9]+|_", text.lower())) & set(words))


def _paired(target: ast.expr, value: ast.expr, place: int | None) -> ast.expr | None:
    """The value of one name of ``a, b = c, d``."""
    if place is None or not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return None
    return value.elts[place] if len(target.elts) == len(value.elts) else None


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)
