"""Each rule speaks about its bad fixture, at the lines marked ``# fault``, and is silent about its good one.

All rules look at every fixture: one that speaks about another rule's is a false alarm.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.lint.fixes import apply_edits
from shardwise.lint.lint_paths import KINDS, LintFinding, lint_text
from shardwise.lint.rule import all_rules

HERE = Path(__file__).parent
RULES = {one.id: one for one in all_rules()}
FIXABLE = {"SW101", "SW107", "SW214", "SW407", "SW505", "SW601", "SW607", "SW701"}


def fixture(id: str, kind: str) -> Path:
    """The fixture of a rule; one whose bad one needs its name has a folder of that name."""
    return next(path for path in sorted((HERE / id).iterdir()) if path.stem == kind)


def found(path: Path, text: str | None = None) -> list[LintFinding]:
    return lint_text(path, path.read_text() if text is None else text, all_rules())


def said(findings: list[LintFinding]) -> list[str]:
    return [f"{one.path.parent.name}/{one.path.name}:{one.fault.line}: {one.rule.id} {one.message}" for one in findings]


def test_every_rule_has_fixtures_and_says_what_to_do() -> None:
    assert {path.name for path in HERE.iterdir() if path.name.startswith("SW")} == set(RULES)
    assert len({one.name for one in RULES.values()}) == len(RULES)
    for one in RULES.values():
        assert one.message.endswith(".") and one.why and one.fix and not one.fix.endswith("."), one.id
        assert fixture(one.id, "bad").suffix in KINDS and fixture(one.id, "good").exists()


@pytest.mark.parametrize("id", sorted(RULES))
def test_a_rule_speaks_about_its_fault_only(id: str) -> None:
    bad = fixture(id, "bad")
    findings = found(bad)
    assert {one.rule.id for one in findings} == {id}, said(findings)
    marked = [number for number, line in enumerate(bad.read_text().split("\n"), 1) if line.endswith("# fault")]
    if marked:
        assert [one.fault.line for one in findings] == marked
    assert not (wrong := found(fixture(id, "good"))), said(wrong)


@pytest.mark.parametrize("id", sorted(RULES))
def test_a_fix_ends_the_finding_and_keeps_the_rest(id: str) -> None:
    bad = fixture(id, "bad")
    text = bad.read_text()
    edits = [edit for one in found(bad) for edit in one.fault.edits]
    assert bool(edits) == (id in FIXABLE)
    if edits:
        fixed, made = apply_edits(text, edits)
        assert made == len(edits) and not found(bad, fixed)
        before, after = text.split("\n"), fixed.split("\n")
        assert len(set(before) ^ set(after)) <= 2 * len(edits), "only the lines of the fault change"
