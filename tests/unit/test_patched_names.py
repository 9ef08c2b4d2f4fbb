"""What tests replace in a module stands there: else a sabotage does nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"


@cache
def tree_of(module: str) -> ast.Module | None:
    """The source of a module of the package; ``None`` for any other name."""
    path = SOURCE / module.replace(".", "/")
    files = [one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()]
    return ast.parse(files[0].read_text()) if files else None


@cache
def names_in(module: str) -> frozenset[str]:
    """Names that a module defines or imports."""
    found: set[str] = set()
    for node in ast.walk(tree_of(module) or ast.Module([], [])):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {one.asname or one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def patched(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules of the package and the names in them that a test assigns or passes to ``setattr``."""
    known = {
        one.asname or one.name: f"{node.module}.{one.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for one in node.names
        if tree_of(f"{node.module}.{one.name}") is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            if node.value.id in known:
                yield known[node.value.id], node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            match node.args:
                case [ast.Name(id=name), ast.Constant(value=str(attribute)), *_] if name in known:
                    yield known[name], attribute


def test_what_is_patched_is_there() -> None:
    found = {(p.stem, *one) for p in TESTS.glob("**/*.py") for one in patched(ast.parse(p.read_text()))}
    assert len(found) > 40
    assert not sorted(f"{test}: {module}.{name}" for test, module, name in found if name not in names_in(module))


def test_it_would_be_seen() -> None:
    text = "from shardwise.search import advice\nadvice._told = 1\nadvice._best = 1\nm.setattr(advice, '_x', 1)"
    found = [name for module, name in patched(ast.parse(text)) if name not in names_in(module)]
    assert sorted(found) == ["_told", "_x"]
