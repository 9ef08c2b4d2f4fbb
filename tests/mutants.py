"""How many small faults the tests find.

    SHARDWISE_TESTS_TURN=all python -m tests.mutants reach --folder F -n 3 --dist loadfile --no-loadscope-reorder tests
                                            # one run of all tests: which of them reach each place
    python -m tests.mutants try --folder F  # each mutant against the tests that reach it, the quickest first
    python -m tests.mutants try --folder F --turn 5   # the same with the tests and cases of one turn (`tests/turns.py`)

A mutant is one changed operator, constant or condition inside a function of ``distributed/``, ``optim/``,
``parallel/``, ``train/`` or ``checkpoint/``, drawn by a seed from all that there are. All of them stand in one copy of
the package, and a file says which one is on; so what imports seconds is imported once, and a mutant costs what its
tests cost. A test that fails, or a world that does not end, has found it. ``benchmarks/tests/mutants.json`` keeps each
one and what became of it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import turns
from tests.ledger import FOLDER

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwise"
KINDS = ("distributed", "optim", "parallel", "train", "checkpoint")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
WATCH = '''"""Which mutant is on in this process, and which tests come by one."""

import os
from pathlib import Path

_HERE = Path(os.environ["SHARDWISE_MUTANTS"]) / (
    os.environ.get("SHARDWISE_MUTANTS_PART") or os.environ.get("PYTEST_XDIST_WORKER", "main")
)
_on, _test, _seen = -1, "", None


def is_on(number):
    if _seen is not None and number not in _seen:
        _seen.add(number)
        with (_HERE / f"reached-{os.getpid()}").open("a") as file:
            file.write(f"{number} {_test}\\n")
    return number == _on


def begin():
    global _on, _test, _seen
    _on, _test = int(_read("on", "-1")), _read("test", "")
    _seen = set() if _on == -2 else None


def _read(name, default):
    try:
        return (_HERE / name).read_text()
    except OSError:
        return default


begin()
os.register_at_fork(after_in_child=begin)
'''
PLUGIN = """import json, os, sys, time
from pathlib import Path
import pytest
from tests.turns import DURATIONS

HERE = Path(os.environ["SHARDWISE_MUTANTS"]) / os.environ.get("PYTEST_XDIST_WORKER", "main")
HERE.mkdir(exist_ok=True)
(HERE / "on").write_text("-2")


def pytest_collection_modifyitems(config, items):
    recorded, left = json.loads(DURATIONS.read_text()), []
    for item in items:
        file, _, test = item.nodeid.partition("::")
        if recorded.get(file, {}).get(test, 0.0) > float(os.environ["SHARDWISE_MUTANTS_LONGEST"]):
            left.append(item)
    items[:] = [item for item in items if item not in set(left)]
    config.hook.pytest_deselected(items=left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    (HERE / "test").write_text(item.nodeid)
    if "shardwise._mutants" in sys.modules:  # this process has read it already
        sys.modules["shardwise._mutants"].begin()
    begin = time.monotonic()
    found = yield
    with (HERE / "seconds").open("a") as file:
        file.write(f"{time.monotonic() - begin:.2f} {item.nodeid}\\n")
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        with (HERE / "failed").open("a") as file:
            file.write(item.nodeid + "\\n")
    return report
"""


@dataclass(frozen=True)
class Mutant:
    """The ``place``-th place that can be changed inside ``function`` of ``file``."""

    file: str
    function: str
    place: int
    line: int
    what: str


class _Places(ast.NodeTransformer):
    """Visits what can be changed in a fixed order; what ``wanted`` names is put beside its mutant."""

    def __init__(self, file: str, wanted: dict[tuple[str, int], int]) -> None:
        self.file, self.wanted = file, wanted
        self.found: list[Mutant] = []
        self._path: list[str] = []
        self._inside: list[int] = []  # the number of places so far, for each function around this one

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._path.append(node.name)
        self._inside.append(0)
        node.body = [self.visit(statement) for statement in node.body]  # no decorators, defaults or annotations
        self._inside.pop()
        self._path.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._path.append(node.name)
        node.body = [self.visit(one) if isinstance(one, ast.FunctionDef | ast.ClassDef) else one for one in node.body]
        self._path.pop()
        return node

    def _or(self, plain: Any, changed: Any, what: str) -> Any:
        if not self._inside:
            return plain
        key = (".".join(self._path), self._inside[-1])
        self._inside[-1] += 1
        self.found.append(Mutant(self.file, *key, getattr(plain, "lineno", 0), what))
        if key not in self.wanted:
            return plain
        on = ast.Call(ast.Name("__is_on__", ast.Load()), [ast.Constant(self.wanted[key])], [])
        return ast.IfExp(on, changed, plain)

    def _other(self, node: Any, attribute: str, operator: ast.AST | None, what: str) -> Any:
        if operator is None:
            return node
        changed = copy.deepcopy(node)
        setattr(changed, attribute, [operator, *node.ops[1:]] if attribute == "ops" else operator)
        return self._or(node, changed, what)

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        old, new = type(node.ops[0]), SWAPS.get(type(node.ops[0]))
        return self._other(node, "ops", new and new(), f"{old.__name__} to {new.__name__ if new else ''}")

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        return self._other(node, "op", SWAPS[type(node.op)](), "and, or")

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        old, new = type(node.op), SWAPS.get(type(node.op))
        return self._other(node, "op", new and new(), f"{old.__name__} to {new.__name__ if new else ''}")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        return self._or(node, copy.deepcopy(node.operand), "not taken out") if isinstance(node.op, ast.Not) else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        node.test = self._or(node.test, ast.UnaryOp(ast.Not(), copy.deepcopy(node.test)), "if turned round")
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool):
            return self._or(node, ast.Constant(not node.value), f"{node.value} turned round")
        if isinstance(node.value, int):
            return self._or(node, ast.Constant(node.value + 1), f"{node.value} and one more")
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def _left(self, node: Any) -> Any:
        return node

    visit_JoinedStr = visit_Raise = visit_Match = visit_Global = _left  # messages, and what no expression may stand in


def places() -> Iterator[Mutant]:
    """All that can be changed."""
    for kind in KINDS:
        for file in sorted((PACKAGE / kind).rglob("*.py")):
            visitor = _Places(str(file.relative_to(PACKAGE)), {})
            visitor.visit(ast.parse(file.read_text()))
            yield from visitor.found


def write_package(folder: Path, mutants: Sequence[Mutant]) -> None:
    """A copy of the package in ``folder`` with all of ``mutants`` in it, and none of them on."""
    shutil.rmtree(folder / "shardwise", ignore_errors=True)
    shutil.copytree(PACKAGE, folder / "shardwise", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "shardwise" / "_mutants.py").write_text(WATCH)
    (folder / "mutants_plugin.py").write_text(PLUGIN)
    wanted: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
    for number, mutant in enumerate(mutants):
        wanted[mutant.file][mutant.function, mutant.place] = number
    for file, numbers in wanted.items():
        tree = _Places(file, numbers).visit(ast.parse((PACKAGE / file).read_text()))
        at = next(
            i for i, one in enumerate(tree.body) if isinstance(one, ast.ImportFrom) and one.module == "__future__"
        )
        tree.body[at + 1 : at + 1] = ast.parse("from shardwise._mutants import is_on as __is_on__").body
        (folder / "shardwise" / file).write_text(ast.unparse(ast.fix_missing_locations(tree)))


def environment(folder: Path) -> dict[str, str]:
    """For tests that run against the copy in ``folder``."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": path, "SHARDWISE_MUTANTS": str(folder)}


def reach(folder: Path, mutants: Sequence[Mutant], longest_s: float, words: Sequence[str]) -> None:
    """Run the tests (``words``: arguments of pytest) on the copy, and note which come by each mutant.

    Tests with more recorded seconds than ``longest_s`` are left out.
    """
    for before in folder.glob("*/reached-*"):  # of an earlier draw
        shutil.rmtree(before.parent, ignore_errors=True)
    write_package(folder, mutants)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutants_plugin", *words]
    variables = environment(folder) | {"SHARDWISE_MUTANTS_LONGEST": str(longest_s)}
    subprocess.run(command, cwd=ROOT, env=variables, check=False)
    failed: set[str] = set()
    seconds: dict[str, float] = {}
    found: dict[int, set[str]] = defaultdict(set)
    for file in folder.glob("*/failed"):
        failed |= set(file.read_text().splitlines())
    for file in folder.glob("*/seconds"):
        for line in file.read_text().splitlines():
            spent, _, test = line.partition(" ")
            seconds[test] = float(spent)
    for file in folder.glob("*/reached-*"):
        for line in file.read_text().splitlines():
            number, _, test = line.partition(" ")
            found[int(number)].add(test)
    rows = [
        {**asdict(mutant), "tests": sorted(found[number] & seconds.keys() - failed, key=lambda t: seconds[t])}
        for number, mutant in enumerate(mutants)
    ]
    document = {"failed": sorted(failed), "seconds": seconds, "mutants": rows}
    (folder / "reach.json").write_text(json.dumps(document, indent=1))
    print(
        f"{sum(not row['tests'] for row in rows)} of {len(rows)} mutants are reached by no test; {len(failed)} failed"
    )


def quickest(tests: Sequence[str], seconds: dict[str, float], limit_s: float) -> list[str]:
    """The quickest of ``tests`` that take ``limit_s`` together, and at least one; sorted as pytest likes them."""
    chosen, total = [], 0.0
    for test in tests:
        total += seconds[test]
        if chosen and total > limit_s:
            break
        chosen.append(test)
    return sorted(chosen)


class Tries:
    """Forks a process for each mutant from one that has imported everything, and whose ranks come from one server."""

    def __init__(self, folder: Path) -> None:
        from multiprocessing.forkserver import _forkserver

        worlds: Any = importlib.import_module("tests.worlds")
        importlib.import_module("tests.preload")
        self.here = folder / os.environ["SHARDWISE_MUTANTS_PART"]
        self.here.mkdir(exist_ok=True)
        with (self.here / "ranks").open("w") as out:  # what ranks print is no news here
            kept = os.dup(1)
            os.dup2(out.fileno(), 1)
            worlds.run_world(_nothing, 1)
            os.dup2(kept, 1)
        self._server: Any = _forkserver
        self._sound: dict[str, bool] = {}

    def soundly_found_by(self, number: int, tests: Sequence[str], limit_s: float) -> str:
        """`found_by`, without tests that fail here with no mutant, too."""
        while tests := [test for test in tests if self._sound.get(test, True)]:
            found = self.found_by(number, tests, limit_s)
            failed = [test for test in tests if found.partition(" ")[2].startswith(test)]
            if not failed:  # a hang, or an end without a word of a test
                return "" if found and self.found_by(-1, tests, limit_s) else found
            test = failed[-1]
            if test not in self._sound:
                self._sound[test] = not self.found_by(-1, [test], limit_s)
            if self._sound[test]:
                return found
        return ""

    def found_by(self, number: int, tests: Sequence[str], limit_s: float) -> str:
        """The first test that fails, ``time`` where they do not end; empty where all pass."""
        (self.here / "on").write_text(str(number))
        report = self.here / "report"
        report.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            self._server.ensure_running = lambda: None  # it is another process's child
            os.environ[turns.SELECTED] = turns.ALL  # these tests, whatever place they have among others
            out = os.open(report, os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            import pytest

            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "", "--assert=plain", "--tb=line", *tests])
            sys.stdout.flush()
            os._exit(int(code))
        end, code = time.monotonic() + limit_s, None
        while code is None and time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0.02)
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for child in psutil.Process(self._server._forkserver_pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        if code == 0:
            return ""
        lines = report.read_text(errors="replace").splitlines() if report.exists() else []
        return next(
            (one for one in lines if one.startswith(("FAILED", "ERROR"))), f"exit code {code}" if code else "time"
        )


def _nothing() -> None: ...


def of_turn() -> set[str]:
    """The tests of the turn that the environment says."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "", "-p", "no:cacheprovider", "tests"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in found.splitlines() if "::" in line}


def try_all(folder: Path, limit_s: float, part: int, parts: int, output: Path, drawn: Sequence[int]) -> None:
    """Each ``drawn`` mutant of this part that nothing has found yet, against the quickest tests that come by it."""
    document = json.loads((folder / "reach.json").read_text())
    seconds, chosen = document["seconds"], of_turn()
    rows = json.loads(output.read_text()) if output.exists() else {}
    tries = Tries(folder)
    for place, number in enumerate(drawn):
        row = document["mutants"][number]
        if place % parts != part or rows.get(str(number), {}).get("found_by"):
            continue
        reached = [test for test in row["tests"] if test in chosen]
        tests = quickest(reached, seconds, limit_s)
        begin = time.monotonic()
        found = tries.soundly_found_by(number, tests, 60 + 3 * limit_s)
        told = {key: value for key, value in row.items() if key != "tests"}
        rows[str(number)] = {**told, "reached_by": len(reached), "tried": len(tests), "found_by": found[:160]}
        output.write_text(json.dumps(rows, indent=1))
        print(number, told, len(tests), f"{time.monotonic() - begin:.0f} s", found[:160] or "NOT FOUND", flush=True)


def main() -> None:
    """Draw, and do one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("reach", "try"))
    parser.add_argument("--folder", type=Path, required=True, help="where the copy of the package is put")
    parser.add_argument("--number", type=int, default=150, help="how many are drawn; 0: all places")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=20.0, help="of the tests of one mutant, when they pass")
    parser.add_argument("--longest-s", type=float, default=10.0, help="reach: leave out tests that take longer")
    parser.add_argument("--turn", default=turns.ALL, help="try: a number, for the tests and cases of that turn")
    parser.add_argument("--part", default="0/1", help="which part of the mutants: 0/2 and 1/2 at the same time")
    parser.add_argument("--output", type=Path, default=FOLDER / "mutants.json", help="a part adds its number")
    given, words = parser.parse_known_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.verb == "reach":
        found = list(places())
        mutants = random.Random(given.seed).sample(found, given.number or len(found))
        reach(given.folder, mutants, given.longest_s, words)
    elif "SHARDWISE_MUTANTS" not in os.environ:  # the copy has to come first on the path
        part = "part-" + given.part.partition("/")[0]
        variables = environment(given.folder) | {turns.VARIABLE: given.turn, "SHARDWISE_MUTANTS_PART": part}
        os.execve(sys.executable, [sys.executable, "-m", "tests.mutants", *sys.argv[1:]], variables)
    else:
        part, _, parts = given.part.partition("/")
        there = range(len(json.loads((given.folder / "reach.json").read_text())["mutants"]))
        drawn = random.Random(given.seed).sample(there, min(given.number or len(there), len(there)))
        output = given.output if parts == "1" else given.output.with_stem(f"{given.output.stem}-{part}")
        try_all(given.folder, given.limit_s, int(part), int(parts), output, drawn)


if __name__ == "__main__":
    main()
