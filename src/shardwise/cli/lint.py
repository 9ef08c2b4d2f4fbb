"""Verb ``shardwise lint``: what will go wrong on many ranks, said before it starts."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import UserError
from shardwise.lint.fixes import apply_edits
from shardwise.lint.lint_output import rule_page, text_lines, to_json, to_sarif
from shardwise.lint.lint_paths import LintFinding, chosen_rules, lint_paths

Ids = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="IDS", help="Only these rules, such as SW1,SW302 (SW1: all that begin so)."),
]


def run_lint(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH...", help="Scripts, launch files, configs, folders.")
    ] = None,
    select: Ids = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="IDS", help="Rules to leave out, such as SW208.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair in place what can be repaired safely.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what --fix would change; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0, for code hosts and editors.")] = False,
    explain: Annotated[str | None, typer.Option("--explain", metavar="ID", help="Explain a rule.")] = None,
) -> None:
    """Run ``shardwise lint``; exits with 1 where there are findings.

    Raises:
        UserError: a path cannot be read, an id is unknown, or options contradict each other.
    """
    if explain is not None:
        if paths or fix or diff or as_json or as_sarif:
            raise UserError("--explain reads no files and prints text; leave out the paths and the other options")
        print("\n\n".join("\n".join(rule_page(one)) for one in chosen_rules([explain], option="--explain")))
        return
    if not paths:
        raise UserError("lint: PATH is missing; give scripts, launch files, configs or folders")
    if fix + diff + as_json + as_sarif > 1:
        raise UserError("--fix, --diff, --json and --sarif exclude each other; give one of them")
    rules = chosen_rules([*_split(select)], [*_split(ignore)])
    result = lint_paths(paths, rules)
    if fix or diff:
        changed = _repair(result.findings, write=fix)
        if fix:
            print(f"{changed} fix{'es' * (changed != 1)} applied")
            result = lint_paths(paths, rules)
        elif not changed:
            *_, count = text_lines(result)
            print(count + "; --fix repairs none of them" * bool(result.findings), file=sys.stderr)
    for problem in result.unread:
        print(f"shardwise: {problem}", file=sys.stderr)
    if as_json:
        print(json.dumps(to_json(result)))
    elif as_sarif:
        from importlib.metadata import version

        print(json.dumps(to_sarif(result, version("shardwise")), indent=2))
    elif not diff:
        print("\n".join(text_lines(result)))
    if result.findings:
        raise typer.Exit(1)


def _split(words: Sequence[str] | None) -> list[str]:
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def _repair(findings: Sequence[LintFinding], write: bool) -> int:
    """Write the repaired files, or show how they differ; return how many edits there are."""
    total = 0
    for path in dict.fromkeys(one.path for one in findings):
        edits = [edit for one in findings if one.path == path for edit in one.fault.edits]
        if not edits:
            continue
        before = path.read_bytes().decode()
        text = before.removeprefix("\ufeff")
        after, made = apply_edits(text, edits)
        after = before[: len(before) - len(text)] + after
        total += made
        if write:
            _write(path, after)
        else:
            lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
            sys.stdout.writelines(difflib.unified_diff(*lines, str(path), f"{path} (fixed)"))
    return total


def _write(path: Path, text: str) -> None:
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        raise UserError(f"--fix: '{path}' cannot be written: {error.strerror}; change its permissions") from None
