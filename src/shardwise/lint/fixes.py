"""Fixes of scripts: what a rule asks for, and LibCST, which writes it and keeps the formatting of all the rest.

Places are those of `ast`: lines from 1, columns in bytes of UTF-8.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.lint.rule import Edit

if TYPE_CHECKING:
    import libcst

Place = tuple[int, int]


def place_of(node: ast.AST) -> Place:
    """Where ``node`` begins."""
    return node.lineno, node.col_offset  # type: ignore[attr-defined]  # a statement or an expression


@dataclass(frozen=True)
class SetKeyword:
    """Give the call at ``place`` the argument ``name=value``."""

    place: Place
    name: str
    value: str


@dataclass(frozen=True)
class RemoveKeyword:
    """Take the argument ``name`` from the call at ``place``."""

    place: Place
    name: str


@dataclass(frozen=True)
class Replace:
    """Write ``code`` in the place of the expression or, where ``code`` is empty, of the statement."""

    place: Place
    end: Place
    code: str


@dataclass(frozen=True)
class Insert:
    """Put the statement ``code`` before the one at ``place``, or after it."""

    place: Place
    code: str
    after: bool = False


def replace(node: ast.expr, code: str) -> Replace:
    """The edit that writes ``code`` for ``node``."""
    return Replace(place_of(node), (node.end_lineno or 0, node.end_col_offset or 0), code)


def apply_edits(text: str, edits: Sequence[Edit]) -> tuple[str, int]:
    """Return the script with its edits, and how many were made; one that finds no such place is left out."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider

    lines = text.split("\n")

    def column(line: int, characters: int) -> Place:
        return line, len(lines[line - 1][:characters].encode())

    wrapper = MetadataWrapper(libcst.parse_module(text))
    positions = wrapper.resolve(PositionProvider)
    made = 0
    by_place: dict[Place, list[Edit]] = {}
    for edit in dict.fromkeys(edits):
        by_place.setdefault(edit.place, []).append(edit)

    class Editor(libcst.CSTTransformer):
        def on_leave(self, original_node: Any, updated_node: Any) -> Any:
            nonlocal made
            where = positions.get(original_node)
            if where is None:
                return updated_node
            start = column(where.start.line, where.start.column)
            for edit in by_place.get(start, ()):
                end = column(where.end.line, where.end.column)
                changed = _changed(original_node, updated_node, edit, end)
                if changed is not None:
                    made += 1
                    by_place[start] = [one for one in by_place[start] if one is not edit]
                    updated_node = changed
            return updated_node

    return wrapper.module.visit(Editor()).code, made


def _changed(original: libcst.CSTNode, node: Any, edit: Edit, end: Place) -> Any:
    """The node as ``edit`` wants it; ``None`` where the edit is about another node that begins there."""
    import libcst

    if isinstance(edit, SetKeyword | RemoveKeyword) and isinstance(node, libcst.Call):
        return _with_argument(node, edit.name, edit.value if isinstance(edit, SetKeyword) else None)
    if isinstance(edit, Replace) and isinstance(node, libcst.BaseExpression) and edit.end == end:
        return libcst.parse_expression(edit.code)
    statement = isinstance(original, libcst.SimpleStatementLine | libcst.BaseCompoundStatement)
    if isinstance(edit, Insert) and statement:
        added = libcst.parse_statement(edit.code)
        if edit.after:
            return libcst.FlattenSentinel([node, added])
        return libcst.FlattenSentinel([added.with_changes(leading_lines=node.leading_lines[:0]), node])
    return None


def _with_argument(call: libcst.Call, name: str, value: str | None) -> Any:
    """The call with the argument, as it lays its arguments out; or without it where ``value`` is ``None``."""
    import libcst

    given = [one for one in call.args if one.keyword is not None and one.keyword.value == name]
    if value is None:
        kept = [one for one in call.args if one not in given]
        last = call.args[-1]
        if kept and kept[-1] is not last:
            kept[-1] = kept[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        return call.with_changes(args=kept) if given else None
    if given:
        new = given[0].with_changes(value=libcst.parse_expression(value))
        return call.with_changes(args=[new if one is given[0] else one for one in call.args])
    equal = libcst.AssignEqual(libcst.SimpleWhitespace(""), libcst.SimpleWhitespace(""))
    new = libcst.Arg(libcst.parse_expression(value), libcst.Name(name), equal=equal)
    if not call.args:
        return call.with_changes(args=[new])
    last = call.args[-1]
    between = next((one.comma for one in call.args if isinstance(one.comma, libcst.Comma)), libcst.Comma())
    if len(call.args) == 1 or not isinstance(between.whitespace_after, libcst.ParenthesizedWhitespace):
        between = libcst.Comma(whitespace_after=libcst.SimpleWhitespace(" "))
    if isinstance(last.comma, libcst.Comma):
        new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    else:
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        last = last.with_changes(whitespace_after_arg=libcst.SimpleWhitespace(""))
    return call.with_changes(args=[*call.args[:-1], last.with_changes(comma=between), new])
