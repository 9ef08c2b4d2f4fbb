"""Whole scripts in the styles of public ones: each finding is where a comment names it, and there is no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.lint.lint_paths import lint_paths, lint_text
from shardwise.lint.rule import all_rules

ROOT = Path(__file__).parents[2]
STYLES = sorted((Path(__file__).parent / "styles").glob("*.py"))


@pytest.mark.parametrize("path", STYLES, ids=[path.stem for path in STYLES])
def test_a_script_has_the_findings_that_it_names(path: Path) -> None:
    text = path.read_text()
    named = [
        (number, found[1])
        for number, line in enumerate(text.split("\n"), 1)
        if (found := re.search(r"# (SW\d+): \S+", line))
    ]
    assert named and [(one.fault.line, one.rule.id) for one in lint_text(path, text, all_rules())] == named


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks", "docs"])
def test_this_repository_has_none(folder: str) -> None:
    result = lint_paths([ROOT / folder], all_rules())
    assert not result.findings and not result.unread
    assert result.files or folder == "docs"
