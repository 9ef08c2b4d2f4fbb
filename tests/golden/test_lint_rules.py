"""``docs/lint-rules.md`` is what the rules of ``shardwise lint`` and their fixtures say.

``python -m tests.golden.test_lint_rules --write`` writes the page anew.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwise.lint.rule import LintRule, all_rules
from tests.lint.shown import KEYS, header
from tests.lint.test_rules import FIXABLE, fixture

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lint-rules.md"
SHOWN = ROOT / "benchmarks" / "lint" / "shown.json"
HEAD = """# Rules of `shardwise lint`

Generated from the rules and their fixtures (`tests/lint`) by `python -m tests.golden.test_lint_rules --write`. How to
use them: [lint.md](lint.md). An *error* is a wrong result, a hang or a crash; a *warning* is lost time, or a run that
is hard to stop or to resume. *Shown* says what happened when the rule's example was run, without a GPU: on two gloo
ranks, or by the launcher or the program that it is for ([benchmarks/lint](../benchmarks/lint/README.md)).
"""
THEMES = {
    "1": "Data and samplers",
    "2": "Loss and gradients",
    "3": "Collectives and what only some ranks do",
    "4": "Saving and loading",
    "5": "Order of setup",
    "6": "Optimizer, clipping, scaling",
    "7": "Launchers and their environment",
    "8": "Configs of other tools, and Shardwise's own",
}


def page() -> str:
    """The page: a table of all rules, then each with its why, its fix and the difference between its fixtures."""
    shown = json.loads(SHOWN.read_text())["rules"] if SHOWN.exists() else {}
    lines = [HEAD]
    themes = dict.fromkeys(one.id[2] for one in all_rules())
    for theme in themes:
        lines += [f"**{THEMES[theme]}**", "", "| rule | what goes wrong | | |", "|---|---|---|---|"]
        for one in all_rules():
            if one.id[2] == theme:
                fixes = "`--fix`" if one.id in FIXABLE else ""
                name = f"[{one.id} {one.name}](#{one.id.lower()}-{one.name})"
                lines.append(f"| {name} | {one.message} | {one.severity} | {fixes} |".replace("  |", " |"))
        lines.append("")
    for one in all_rules():
        lines += section(one, shown.get(one.id, {}))
    return "\n".join(lines)


def section(one: LintRule, shown: dict[str, str]) -> Iterator[str]:
    """What the page has about one rule."""
    yield f"## {one.id} {one.name}\n"
    yield f"{one.message} {one.why}\n"
    yield f"Fix: {one.fix}.{' `--fix` does it.' if one.id in FIXABLE else ''}\n"
    needs = header(fixture(one.id, "bad")).get("needs")
    if shown or needs:
        yield f"Shown: {shown['says']}.\n" if shown else f"Not shown here: it needs {needs}.\n"
    texts = [example(fixture(one.id, kind).read_text()) for kind in ("bad", "good")]
    changed = [line for line in difflib.unified_diff(*texts, lineterm="", n=2) if not line.startswith(("---", "+++"))]
    yield "```diff"
    for line in changed:
        yield "..." if line.startswith("@@") else line.rstrip()
    yield "```\n"


def example(text: str) -> list[str]:
    """A fixture without the comments for tests."""
    lines = [line.removesuffix("  # fault").removesuffix(" # fault") for line in text.strip("\n").split("\n")]
    return [line for line in lines if not line.startswith(KEYS)]


def test_the_page_is_of_these_rules() -> None:
    assert PAGE.read_text() == page(), "docs/lint-rules.md is stale: python -m tests.golden.test_lint_rules --write"


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(page())
