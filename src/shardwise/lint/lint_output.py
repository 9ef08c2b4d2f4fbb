"""Findings as text, as JSON and as SARIF 2.1.0; a rule's own page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any
from urllib.parse import quote

from shardwise.lint.lint_paths import LintFinding, LintResult
from shardwise.lint.rule import LintRule, all_rules


def text_lines(result: LintResult) -> Iterator[str]:
    """Findings by file, each with its fix, and the count."""
    for path, findings in groupby(result.findings, key=lambda one: one.path):
        for one in findings:
            yield f"{path}:{one.fault.line}:{one.fault.column}: {one.rule.id} {one.message}"
            yield f"    fix: {one.rule.fix}" + (" (--fix does it)" if one.fault.edits else "")
        yield ""
    files = f"{result.files:,} file{'s' * (result.files != 1)}"
    if not result.findings:
        yield f"no findings in {files}"
        return
    fixable = sum(1 for one in result.findings if one.fault.edits)
    number = len(result.findings)
    yield f"{number} finding{'s' * (number != 1)} in {files}" + (f"; --fix repairs {fixable}" if fixable else "")


def rule_page(rule: LintRule) -> Iterator[str]:
    """What ``--explain`` prints."""
    yield f"{rule.id} {rule.name} ({rule.severity}, {', '.join(rule.kinds)})"
    yield ""
    yield f"what goes wrong: {rule.message}"
    yield f"why: {rule.why}"
    yield f"fix: {rule.fix}"
    yield f"ignore: # shardwise: ignore[{rule.id}] in the line"


def to_json(result: LintResult) -> dict[str, Any]:
    """The findings as one document, schema 1."""
    return {
        "schema": 1,
        "files": result.files,
        "unread": result.unread,
        "findings": [
            {
                "path": str(one.path),
                "line": one.fault.line,
                "column": one.fault.column,
                "rule": one.rule.id,
                "name": one.rule.name,
                "severity": one.rule.severity,
                "message": one.message,
                "fix": one.rule.fix,
                "fixable": bool(one.fault.edits),
            }
            for one in result.findings
        ],
    }


def to_sarif(result: LintResult, version: str) -> dict[str, Any]:
    """The findings in SARIF 2.1.0, which code hosts and editors read."""
    used = sorted({one.rule.id for one in result.findings})
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "shardwise lint",
                        "version": version,
                        "rules": [_sarif_rule(one) for one in all_rules() if one.id in used],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_sarif_result(one, used.index(one.rule.id)) for one in result.findings],
            }
        ],
    }


def _sarif_rule(rule: LintRule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.message},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.fix},
        "defaultConfiguration": {"level": rule.severity},
    }


def _sarif_result(one: LintFinding, index: int) -> dict[str, Any]:
    region = {"startLine": one.fault.line, "startColumn": one.fault.column}
    place = {"artifactLocation": {"uri": quote(one.path.as_posix())}, "region": region}
    return {
        "ruleId": one.rule.id,
        "ruleIndex": index,
        "level": one.rule.severity,
        "message": {"text": f"{one.message} Fix: {one.rule.fix}"},
        "locations": [{"physicalLocation": place}],
    }
