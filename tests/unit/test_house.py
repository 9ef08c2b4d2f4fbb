"""The rules of the house, read off the source: sizes, layers, and what may be written where."""

from __future__ import annotations

import ast
import builtins
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent
LAYERS = (
    "errors",
    "units",
    "environment",
    "document",
    "import_object",
    "collector",
    "hardware",
    "model",
    "plan",
    "cost",
    "search",
    "distributed",
    "parallel",
    "optim",
    "checkpoint",
    "train",
    "dryrun",
    "measure",
    "receipts",
    "gradcheck",
    "diagnosis",
    "watch",
    "launch",
    "interop",
    "lint",
    "report",
    "observation",
    "run",
    "integrations",
    "doctor",
    "bench",
    "web",
    "cli",
)
DISTRIBUTED = {
    "distributed", "optim", "parallel", "checkpoint", "train", "dryrun", "measure", "receipts", "gradcheck",
    "diagnosis", "watch", "observation", "doctor", "bench",
}  # fmt: skip
PLANNING = ("hardware.", "plan.", "cost.", "search.")
# `plan/plan.py` holds the Plan, `cli/plan.py` the verb; `integrations/` has the tools' own names
SAME_STEM = {"plan", "accelerate"}
FILE_LINES, FUNCTION_LINES, PUBLIC_NAMES = 400, 60, 25
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
OBJECTS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file of the package; ``name`` is dotted and relative to it, empty for the package itself."""

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def layer(self) -> str:
        return self.name.split(".")[0]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def code_lines(self) -> set[int]:
        """Numbers of the lines that hold code: no blank ones, no comments, no docstrings. Slow: all tokens are read."""
        skipped = (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        )
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in skipped:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
                lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        return lines


def read_package() -> list[Source]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append(Source(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return found


PACKAGE = read_package()
NAMES = {source.name for source in PACKAGE}


def imported(node: ast.AST, source: Source) -> list[str]:
    """Dotted names that an import statement may load: the module, and what is taken from it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = ["shardwise", *filter(None, source.name.split("."))]
            kept = here[: len(here) - node.level + source.is_package]
            base = ".".join([*kept, *filter(None, [node.module])])
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return []


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from at_import(node.orelse)
        elif not isinstance(node, Function):
            for field in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from at_import(handler.body)


def needs(source: Source) -> set[str]:
    """Modules of the package that ``source`` imports, also inside functions and for types alone."""
    names = {name for node in source.nodes for name in imported(node, source)}
    inner = {name.removeprefix("shardwise.") for name in names if name.startswith("shardwise.")}
    return (inner & NAMES) - {source.name}


def loads(source: Source) -> set[str]:
    """Those that are imported as soon as ``source`` is."""
    names = {name for node in at_import(source.tree.body) for name in imported(node, source)}
    return {name.removeprefix("shardwise.") for name in names} & NAMES - {source.name}


def dotted(node: ast.AST) -> str:
    """``os.path.join`` for that expression; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := dotted(node.value)):
        return f"{inner}.{node.attr}"
    return ""


def too_long_file(source: Source) -> Iterator[str]:
    if len(source.text.splitlines()) > FILE_LINES and len(source.code_lines) > FILE_LINES:
        yield f"{len(source.code_lines)} lines of code, {FILE_LINES} are allowed"


def too_long_function(source: Source) -> Iterator[str]:
    for node in source.functions:
        span = range(node.lineno, (node.end_lineno or 0) + 1)
        lines = len(source.code_lines.intersection(span)) if len(span) > FUNCTION_LINES else 0
        if lines > FUNCTION_LINES:
            yield f"{node.lineno}: {node.name} has {lines} lines of code, {FUNCTION_LINES} are allowed"


def outside_the_layers(source: Source) -> Iterator[str]:
    if source.layer not in (*LAYERS, "", "__main__"):
        yield f"'{source.layer}' is no layer"


def up_the_layers(source: Source) -> Iterator[str]:
    if source.layer not in LAYERS:
        return
    for name in needs(source):
        if name.split(".")[0] not in LAYERS[: LAYERS.index(source.layer) + 1]:
            yield f"imports {name}, which is above it"
    for node in source.nodes:
        plain = isinstance(node, ast.Import) and any(alias.name == "shardwise" for alias in node.names)
        taken = imported(node, source) if isinstance(node, ast.ImportFrom) and node.module == "shardwise" else []
        if plain or any(name.removeprefix("shardwise.") not in NAMES for name in taken[1:]):
            yield f"imports the package itself in line {node.lineno}, which is above all layers"


def environment_elsewhere(source: Source) -> Iterator[str]:
    if source.name == "environment":
        return
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "os" and words & {alias.name for alias in node.names}:
            yield f"{node.lineno}: takes {', '.join(sorted(words & {alias.name for alias in node.names}))} from os"
        if isinstance(node, ast.Attribute) and dotted(node) in {f"os.{word}" for word in words}:
            yield f"{node.lineno}: {dotted(node)}"


def global_statement(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"


def is_distributed(name: str) -> bool:
    return f"{name}.".startswith(("torch.distributed.", "torch._C._distributed"))


def distributed_elsewhere(source: Source) -> Iterator[str]:
    if source.layer in DISTRIBUTED:
        return
    for node in source.nodes:
        for name in [*imported(node, source), dotted(node)]:
            if is_distributed(name):
                yield f"{getattr(node, 'lineno', 0)}: {name}"


def pickle_and_the_like(source: Source) -> Iterator[str]:
    for node in source.nodes:
        for name in imported(node, source):
            parts = name.split(".")
            if parts[0] in PICKLES or parts[-1] in OBJECTS or name in ("torch.load", "torch.save"):
                yield f"{getattr(node, 'lineno', 0)}: imports {name}"
        if isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node)
            if name in ("torch.load", "torch.save") or name.split(".")[-1] in OBJECTS:
                yield f"{node.lineno}: {name}"
            if isinstance(node, ast.Attribute) and node.attr in OBJECTS and not name:
                yield f"{node.lineno}: {node.attr}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not _is_false(node.value):
            yield f"{node.value.lineno}: allow_pickle={ast.unparse(node.value)}"


def code_from_text(source: Source) -> Iterator[str]:
    """Shells, eval, exec, and code that comes with a model."""
    for node in source.nodes:
        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if is_read and node.id in ("eval", "exec", "compile", "__import__"):
            yield f"{node.lineno}: {node.id}"
        if isinstance(node, ast.Attribute) and dotted(node) in SHELLS | {"builtins.eval", "builtins.exec"}:
            yield f"{node.lineno}: {dotted(node)}"
        if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code") and not _is_false(node.value):
            yield f"{node.value.lineno}: {node.arg}={ast.unparse(node.value)}"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def without_docstring(source: Source) -> Iterator[str]:
    if ast.get_docstring(source.tree) is None and source.text.strip():
        yield "1: the module"
    for node in source.tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []
        for item in [node, *inner]:
            public = isinstance(item, Function | ast.ClassDef) and not item.name.startswith("_")
            if public and ast.get_docstring(item) is None:
                yield f"{item.lineno}: {item.name}"


def without_annotation(source: Source) -> Iterator[str]:
    methods = {id(item) for node in source.nodes if isinstance(node, ast.ClassDef) for item in node.body}
    for node in source.functions:
        spec = node.args
        static = any(dotted(decorator) == "staticmethod" for decorator in node.decorator_list)
        positional = [*spec.posonlyargs, *spec.args][1 if id(node) in methods and not static else 0 :]
        all_of = [*positional, *spec.kwonlyargs, *filter(None, [spec.vararg, spec.kwarg])]
        missing = [argument.arg for argument in all_of if argument.annotation is None]
        if node.returns is None:
            missing.append("the result")
        if missing:
            yield f"{node.lineno}: {node.name} does not annotate {', '.join(missing)}"


Rule = Callable[[Source], Iterator[str]]
LONG = "x = 1\n" * 401
# each rule with code that breaks it and code that does not
RULES: list[tuple[Rule, list[str], list[str]]] = [
    (too_long_file, [LONG], ["x = 1\n" * 400 + "\n# a comment\n", '"""' + "\n" * 500 + '"""']),
    (
        too_long_function,
        ["def f():\n" + "    x = 1\n" * 60, "class A:\n    async def f(self):\n" + "        x = 1\n" * 60],
        ["def f():\n" + "    x = 1\n" * 59, 'def f():\n    """\n' + "    more\n" * 99 + '    """\n    return 1'],
    ),
    (
        up_the_layers,
        [
            "import shardwise.train.loss",
            "from shardwise.cli import main",
            "from ..train import loss",
            "if TYPE_CHECKING:\n    from shardwise.train.loss import count_labels",
            "try:\n    from shardwise.train import loss\nexcept ImportError:\n    pass",
            "class A:\n    import shardwise.train.loss",
            "def f():\n    import shardwise.train.loss",
        ],
        ["from shardwise.plan.plan import Plan", "from . import choose"],
    ),
    (
        environment_elsewhere,
        ["import os\nos.environ['A'] = 'b'", "from os import getenv", "import os\ndef f(): os.getenv('A')"],
        ["import os\nos.getpid()", "x.environment"],
    ),
    (global_statement, ["def f():\n    global x"], ["def f():\n    x = 1\n    def g():\n        nonlocal x"]),
    (
        distributed_elsewhere,
        [
            "import torch.distributed as dist",
            "from torch import distributed",
            "def f():\n    from torch.distributed.fsdp import fully_shard",
            "import torch\ntorch.distributed.barrier()",
            "from torch._C._distributed_c10d import HashStore",
        ],
        ["import torch", "from torch import distributions"],
    ),
    (
        pickle_and_the_like,
        [
            "import pickle",
            "from pickle import loads",
            "torch.load('x')",
            "save = torch.save",
            "from torch import load",
            "dist.all_gather_object(a, b)",
            "from torch.distributed import broadcast_object_list",
            "f().gather_object(a)",
            "np.load(a, allow_pickle=True)",
        ],
        ["load_object(x)", "np.load(a, allow_pickle=False)", "safetensors.torch.load(x)"],
    ),
    (
        code_from_text,
        [
            "subprocess.run(a, shell=True)",
            "eval('1')",
            "exec(x)",
            "f(trust_remote_code=True)",
            "f(trust_remote_code=value)",
            "os.system('ls')",
        ],
        [
            "model.eval()",
            "re.compile('x')",
            "class A:\n    compile: bool = False",
            "f(trust_remote_code=False, shell=False)",
            "os.execv(a, b)",
        ],
    ),
    (
        without_docstring,
        [
            "x = 1",
            '"""M."""\ndef f(): pass',
            '"""M."""\nclass A: pass',
            '"""M."""\nclass A:\n  "a"\n  def f(self): pass',
        ],
        [
            "",
            '"""M."""\ndef _f(): pass\nclass _A:\n  def f(self): pass',
            '"""M."""\nclass A:\n  "a"\n  def _f(self): pass',
        ],
    ),
    (
        without_annotation,
        [
            "def f(): pass",
            "def f(a) -> None: pass",
            "def f(*a) -> None: pass",
            "def f(*, a) -> None: pass",
            "class A:\n  def f(self, a) -> None: pass",
            "class A:\n  @staticmethod\n  def f(a) -> None: pass",
            "def f() -> None:\n  def g(a) -> None: pass",
        ],
        ["def f(a: int, *b: int, c: int, **d: int) -> None: pass", "class A:\n  def f(self) -> None: pass"],
    ),
]


@pytest.mark.parametrize("rule", [outside_the_layers, *(rule for rule, _, _ in RULES)])
def test_the_source_keeps(rule):
    wrong = [f"{source.name or '__init__'}: {problem}" for source in PACKAGE for problem in rule(source)]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(("rule", "bad", "good"), RULES, ids=[rule.__name__ for rule, _, _ in RULES])
def test_a_rule_bites(rule, bad, good):
    for text in bad:
        assert list(rule(Source("search.made_up", text))), text
    for text in good:
        assert not list(rule(Source("search.made_up", text))), text


def test_the_whole_package_is_looked_at():
    assert {"", "__main__", "errors", "cli.main", "environment", "plan"} <= NAMES
    assert list(outside_the_layers(Source("utils.text", "")))
    assert not list(environment_elsewhere(Source("environment", "import os\nos.environ")))
    assert not list(distributed_elsewhere(Source("train.loop", "import torch.distributed")))


def test_a_file_name_says_which_file():
    stems = Counter(source.name.rpartition(".")[2] for source in PACKAGE if not source.is_package)
    assert {stem for stem, number in stems.items() if number > 1} <= SAME_STEM


def test_a_class_name_says_which_class():
    names = Counter(
        node.name
        for source in PACKAGE
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, number in names.items() if number > 1}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, in order; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_no_import_cycle():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    graph = {source.name: needs(source) for source in PACKAGE}
    assert graph["search.choose"] >= {"cost.memory.estimate_memory", "plan.dims", "model.facts"}, (
        "imports are seen at all"
    )
    assert not cycle(graph)


def test_planning_needs_no_torch_distributed():
    """Nor does anything that planning modules import."""
    by_name = {source.name: source for source in PACKAGE}
    reached, todo = set(), [name for name in NAMES if f"{name}.".startswith(PLANNING)]
    assert {"search.choose", "cost.memory.estimate_memory", "plan.plan", "hardware.cluster"} <= set(todo)
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += loads(by_name[name])
    wrong = [
        f"{name} imports {other}"
        for name in sorted(reached)
        for node in at_import(by_name[name].tree.body)
        for other in imported(node, by_name[name])
        if is_distributed(other)
    ]
    assert not wrong


def test_public_names():
    assert shardwise.__all__ == sorted(set(shardwise.__all__))
    assert 0 < len(shardwise.__all__) <= PUBLIC_NAMES
    for name in shardwise.__all__:
        assert name.isidentifier() and not hasattr(builtins, name)
        assert getattr(shardwise, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        shardwise.Sesion  # noqa: B018


LOADED = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
RUN = "from shardwise.cli.main import main\nimport sys\ntry:\n    main()\nfinally:\n    print()\n    "


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], "import shardwise; ", "shardwise"),
        (["--help"], RUN, "train"),
        (["train", "--help"], RUN, "--strategy"),
        (["plan", "--help"], RUN, "--cluster"),
        (["explain", "--help"], RUN, "--why-not"),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(arguments, code, says):
    command = [sys.executable, "-c", code + LOADED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "shardwise" in loaded
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "tokenizers", "safetensors"}
    assert arguments != ["--help"] or not loaded & {"pydantic", "email", "rich"}
