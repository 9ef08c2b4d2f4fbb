"""Branches of a syntax tree: the tests that decide about a node, and nodes of which only one can run."""

from __future__ import annotations

import ast
from collections.abc import Mapping

Parents = Mapping[ast.AST, ast.AST]
Tests = list[tuple[ast.expr, bool]]


def tests_above(parent: Parents, node: ast.AST) -> Tests:
    """Tests that decide about ``node`` within its function, innermost first, each with the answer that it takes.

    An ``if`` before it that returns or raises takes part too.
    """
    found: Tests = []
    child = node
    while child in parent:
        one = parent[child]
        if isinstance(one, ast.If | ast.While | ast.IfExp):
            body = one.body if isinstance(one.body, list) else [one.body]
            orelse = one.orelse if isinstance(one.orelse, list) else [one.orelse]
            if child in body:
                found.append((one.test, True))
            elif child in orelse:
                found.append((one.test, False))
        for field in ("body", "orelse", "finalbody"):
            block = getattr(one, field, None)
            if isinstance(block, list) and child in block:
                for before in block[: block.index(child)]:
                    if isinstance(before, ast.If) and not before.orelse and _leaves(before.body):
                        found.append((before.test, False))
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
        child = one
    return found


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def exclude(some: Tests, others: Tests) -> bool:
    """Whether tests contradict each other: one of both with two answers, or a name equal to two constants."""
    known = {ast.unparse(test): answer for test, answer in some}
    equal = {left: value for test, answer in some if answer for left, value in _equal(test)}
    return any(
        known.get(ast.unparse(test), answer) is not answer
        or (answer and any(equal.get(left, value) != value for left, value in _equal(test)))
        for test, answer in others
    )


def _equal(test: ast.expr) -> list[tuple[str, object]]:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=value)]):
            return [(ast.unparse(left), value)]
    return []
