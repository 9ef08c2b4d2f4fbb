"""Which files are read, and what the rules say about them."""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import UserError, did_you_mean
from shardwise.lint.config_document import ConfigDocument
from shardwise.lint.launch_file import LaunchFile
from shardwise.lint.rule import Fault, Kind, LintRule, all_rules
from shardwise.lint.script import Script

KINDS: dict[str, Kind] = {
    ".py": "script",
    ".sh": "launch file", ".bash": "launch file", ".sbatch": "launch file", ".slurm": "launch file",
    ".json": "config", ".yaml": "config", ".yml": "config", ".toml": "config",
}  # fmt: skip
READERS = {"script": Script, "launch file": LaunchFile, "config": ConfigDocument}
_SKIPPED = {"node_modules", "__pycache__", "build", "dist", "site-packages"}
_IGNORE = re.compile(r"#\s*shardwise:\s*(ignore(?:-file)?)(?![\w-])(?:\s*\[([\w\s,]*)\]|(?!\s*\[))")
_CONCERNS = re.compile(r"torch|accelerate|deepspeed|lightning|transformers")


@dataclass(frozen=True)
class LintFinding:
    """What one rule says about one place."""

    path: Path
    fault: Fault
    rule: LintRule

    @property
    def message(self) -> str:
        """What goes wrong."""
        return self.fault.text or self.rule.message


@dataclass
class LintResult:
    """Everything that was found, and what could not be read in a folder."""

    findings: list[LintFinding] = field(default_factory=list)
    files: int = 0
    unread: list[str] = field(default_factory=list)


def chosen_rules(select: Sequence[str], ignore: Sequence[str] = (), option: str = "--select") -> tuple[LintRule, ...]:
    """Return the rules whose id, or the beginning of it, is selected (by ``option``) and not ignored.

    Raises:
        UserError: an id that no rule has.
    """
    rules = all_rules()
    problems = [
        f"{name} {word}: no rule has this id or begins with it"
        f"{did_you_mean(word, [one.id for one in rules])}; docs/lint-rules.md lists them"
        for name, words in ((option, select), ("--ignore", ignore))
        for word in words
        if not any(one.id.startswith(word) for one in rules)
    ]
    chosen = tuple(
        one for one in rules if one.id.startswith(tuple(select) or "SW") and not one.id.startswith(tuple(ignore) or "-")
    )
    if not problems and not chosen:
        problems.append(f"--ignore {','.join(ignore)} leaves none of the chosen rules; leave one of them out")
    if problems:
        raise UserError(*problems)
    return chosen


def lint_paths(paths: Sequence[Path], rules: Sequence[LintRule]) -> LintResult:
    """Apply ``rules`` to files, and to the files in folders.

    Raises:
        UserError: a path is missing, or a file that was named cannot be read; all of them at once.
    """
    result, problems = LintResult(), []
    for path in paths:
        if not os.path.exists(path):  # Path.exists raises where a folder may not be looked into
            problems.append(f"path '{path}' does not exist; give a script, a launch file, a config or a folder")
            continue
        if not path.is_dir() and (path.suffix not in KINDS or not path.is_file()):
            problems.append(
                f"path '{path}': only files that end in {', '.join(KINDS)} are read; rename it or leave it out"
            )
            continue
        for file in [path] if path.is_file() else _files(path, result.unread):
            try:
                result.findings += lint_text(file, file.read_text(encoding="utf-8-sig"), rules)
                result.files += 1
            except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
                problem = f"file '{file}' cannot be read: {_reason(error)}"
                (problems if path.is_file() else result.unread).append(problem)
    if problems:
        raise UserError(*problems)
    return result


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno or 1}: {error.msg}; repair it there"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8; save it as that"
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deep; leave it out"
    return f"{getattr(error, 'strerror', None) or error}; repair it, or leave it out"


def _files(folder: Path, unread: list[str]) -> Iterator[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        unread.append(f"folder '{folder}' cannot be read: {_reason(error)}")
        return
    for path in inside:
        if path.name.startswith(".") or path.name in _SKIPPED or path.is_symlink():
            continue
        if path.is_dir() and not (path / "pyvenv.cfg").exists():
            yield from _files(path, unread)
        elif path.is_file() and path.suffix in KINDS:
            yield path


def lint_text(path: Path, text: str, rules: Sequence[LintRule]) -> list[LintFinding]:
    """Apply the rules for its kind of file to ``text``, and leave out what a comment ignores.

    Raises:
        ValueError: the text is no script or config.
        SyntaxError: the script is no Python.
    """
    kind = KINDS[path.suffix]
    asked = [one for one in rules if kind in one.kinds]
    if not asked or (kind == "script" and not _CONCERNS.search(text)):
        return []
    read = READERS[kind](path, text)
    found = [LintFinding(path, fault, one) for one in asked for fault in one.check(read)]
    everywhere, lines = _ignored(kind, text)
    kept = [
        one
        for one in dict.fromkeys(found)
        if not _names(everywhere, one.rule.id) and not _names(lines.get(one.fault.line, ()), one.rule.id)
    ]
    return sorted(kept, key=lambda one: (one.fault.line, one.fault.column, one.rule.id))


def _names(ignored: Sequence[str], id: str) -> bool:
    return any(id.startswith(word) for word in ignored)


def _ignored(kind: Kind, text: str) -> tuple[list[str], dict[int, list[str]]]:
    """Rules that comments ignore: in the whole file, and in each line; ``SW`` is all of them."""
    everywhere: list[str] = []
    lines: dict[int, list[str]] = {}
    if "shardwise:" not in text:
        return everywhere, lines
    if kind == "script":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [(one.start[0], one.string) for one in tokens if one.type == tokenize.COMMENT]
    else:
        comments = [(number, line) for number, line in enumerate(text.split("\n"), 1) if "#" in line]
    for number, comment in comments:
        for scope, ids in _IGNORE.findall(comment):
            words = [word for word in re.split(r"[\s,]+", ids) if word] or ["SW"]
            if scope == "ignore-file":
                everywhere += words
            else:
                lines.setdefault(number, []).extend(words)
    return everywhere, lines
