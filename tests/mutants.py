"""How many small faults the tests find: ``python -m tests.mutants --number 150 --seed 15``.

Each mutant is one changed operator, constant or condition in ``parallel/``, ``train/`` or ``checkpoint/``, drawn by the
seed from all that there are. The tests of its kind run against a copy of the package that has it, those first that name
its module; a test that fails has found it. ``benchmarks/tests/mutants.json`` keeps each one and what became of it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.ledger import FOLDER

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwise"
KINDS = {
    "parallel": [
        "tests/world/test_gradients.py",
        "tests/world/test_missing_gradients.py",
        "tests/world/test_prepare_hazards.py",
        "tests/faults/test_effects.py",
        "tests/world/test_tensor_parallel.py",
        "tests/world/test_pipeline_parallel.py",
        "tests/world/test_context_parallel.py",
        "tests/world/test_adapters.py",
        "tests/world/test_lean_optimizers.py",
        "tests/world/test_deepspeed_engine.py",
    ],
    "train": [
        "tests/world/test_gradients.py",
        "tests/world/test_loader_hazards.py",
        "tests/world/test_own_loop_resume.py",
        "tests/unit/test_config.py",
        "tests/unit/test_corpus.py",
        "tests/unit/test_windows.py",
        "tests/cli/test_train.py",
    ],
    "checkpoint": [
        "tests/unit/test_checkpoint_format.py",
        "tests/world/test_checkpoint.py",
        "tests/world/test_checkpoint_plans.py",
        "tests/faults/test_checkpoint_damage.py",
        "tests/faults/test_checkpoint_crashes.py",
        "tests/unit/test_convert.py",
        "tests/cli/test_convert_command.py",
    ],
}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
LIMIT_S = 600


@dataclass(frozen=True)
class Mutant:
    """The ``number``-th place in ``file`` that can be changed, on ``line``."""

    file: str
    number: int
    line: int
    what: str


class _Places(ast.NodeTransformer):
    """Visits what can be changed in a fixed order, and changes the ``wanted``-th."""

    def __init__(self, wanted: int = -1) -> None:
        self.found: list[tuple[int, str]] = []
        self.wanted = wanted

    def _chosen(self, node: ast.AST, what: str) -> bool:
        self.found.append((getattr(node, "lineno", 0), what))
        return len(self.found) - 1 == self.wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        other = SWAPS.get(type(node.ops[0]))
        if other is not None and self._chosen(node, f"{type(node.ops[0]).__name__} to {other.__name__}"):
            node.ops[0] = other()  # type: ignore[call-overload]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._chosen(node, "and, or"):
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = SWAPS.get(type(node.op))
        if other is not None and self._chosen(node, f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()  # type: ignore[assignment]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if isinstance(node.op, ast.Not) and self._chosen(node, "not taken out") else node

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node
        self.generic_visit(node)
        if self._chosen(node, "if turned round"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool) and self._chosen(node, f"{node.value} turned round"):
            return ast.Constant(not node.value)
        whole = isinstance(node.value, int) and not isinstance(node.value, bool)
        if whole and self._chosen(node, f"{node.value} and one more"):
            return ast.Constant(node.value + 1)  # type: ignore[operator]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node  # its annotation

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # a message

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node


def places() -> Iterator[Mutant]:
    """All that can be changed."""
    for kind in KINDS:
        for file in sorted((PACKAGE / kind).rglob("*.py")):
            visitor = _Places()
            visitor.visit(ast.parse(file.read_text()))
            name = str(file.relative_to(PACKAGE))
            yield from (Mutant(name, number, *found) for number, found in enumerate(visitor.found))


def tests_of(mutant: Mutant) -> list[str]:
    """Files of tests: those that name the module, then those of its kind."""
    module = "shardwise." + mutant.file.removesuffix(".py").replace("/", ".")
    named = [
        str(file.relative_to(ROOT))
        for folder in ("unit", "world")
        for file in sorted((ROOT / "tests" / folder).glob("test_*.py"))
        if module in file.read_text()
    ]
    return list(dict.fromkeys([*named, *KINDS[mutant.file.split("/")[0]]]))


def found_by(mutant: Mutant) -> str:
    """The first test that fails with the mutant, or what else became of it; empty where all pass."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        here = Path(folder)
        shutil.copytree(PACKAGE, here / "shardwise", ignore=shutil.ignore_patterns("__pycache__"))
        tree = copy.deepcopy(ast.parse((PACKAGE / mutant.file).read_text()))
        changed = ast.fix_missing_locations(_Places(mutant.number).visit(tree))
        (here / "shardwise" / mutant.file).write_text(ast.unparse(changed))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", *tests_of(mutant)]
        env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "time"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[0][:160]


def main() -> int:
    """Draw, try, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, default=150)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--output", type=Path, default=FOLDER / "mutants.json")
    given = parser.parse_args()
    everything = list(places())
    drawn = random.Random(given.seed).sample(everything, given.number)
    rows = []
    with ThreadPoolExecutor(given.at_once) as pool:
        for mutant, found in zip(drawn, pool.map(found_by, drawn), strict=True):
            rows.append({"file": mutant.file, "line": mutant.line, "what": mutant.what, "found_by": found})
            print(len(rows), rows[-1], flush=True)
    killed = sum(bool(row["found_by"]) for row in rows)
    document = {"schema": 1, "seed": given.seed, "of": len(everything), "killed": killed, "mutants": rows}
    given.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{killed} of {len(rows)} found")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
