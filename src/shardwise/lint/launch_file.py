"""A launch file: commands, variables and ``#SBATCH`` options of a shell script, as far as they are written out."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardwise.lint.rule import Fault

_SHORT = {
    "-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-a": "array", "-J": "job-name", "-G": "gpus",
}  # fmt: skip
_BEFORE = {
    "do",
    "then",
    "else",
    "elif",
    "if",
    "while",
    "until",
    "!",
    "{",
    "(",
    "exec",
    "nohup",
    "time",
    "env",
    "export",
}
"""What stands before a command and is none of its own."""
_SEPARATE = {";", ";;", "&&", "||", "&"}


@dataclass(frozen=True)
class Command:
    """One command of a launch file: its words, and where it begins; ``background`` with an ``&`` behind it."""

    line: int
    words: tuple[str, ...]
    background: bool

    def runs(self, *names: str) -> bool:
        """Whether one of the words is a program of this name."""
        return any(word.rpartition("/")[2] in names for word in self.words)

    def option(self, *names: str) -> str | None:
        """The value of ``--name=value`` or ``--name value``, dashes and underscores alike; ``None`` if not given."""
        wanted = {name.replace("_", "-") for name in names}
        for place, word in enumerate(self.words):
            key, equal, value = word.partition("=")
            if key.startswith("-") and key.lstrip("-").replace("_", "-") in wanted:
                return value if equal else "".join(self.words[place + 1 : place + 2])
            if word[:1] == "-" and word[1:2] in wanted and re.fullmatch(r"[\d$].*", word[2:]):  # -n2
                return word[2:]
        return None

    @property
    def bare(self) -> tuple[str, ...]:
        """The words from the program on: without variables and keywords of the shell before it."""
        for place, word in enumerate(self.words):
            key, equal, _ = word.partition("=")
            if word not in _BEFORE and not (equal and key.isidentifier()):
                return self.words[place:]
        return ()

    @property
    def program(self) -> str:
        """The name of what it runs; empty where it sets variables alone."""
        return self.bare[0].rpartition("/")[2] if self.bare else ""

    @property
    def sets(self) -> dict[str, str]:
        """Variables that it sets, for itself or, where it runs nothing, for what follows."""
        before = self.words[: len(self.words) - len(self.bare)]
        pairs = (word.partition("=") for word in before)
        return {key: value for key, equal, value in pairs if equal and key.isidentifier()}

    @property
    def branches(self) -> bool:
        """Whether it begins or ends a branch, a loop or a function: what was set or started before may not count."""
        return self.words[0] in ("if", "elif", "else", "fi", "case", "esac", ";;", "do", "done", "}")

    @property
    def is_torchrun(self) -> bool:
        """Whether it starts ranks with torchrun, by any of its names."""
        return (
            self.runs("torchrun") or "torch.distributed.run" in self.words or "torch.distributed.launch" in self.words
        )


class LaunchFile:
    """A shell script that starts ranks."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text

    @cached_property
    def sbatch(self) -> dict[str, tuple[str, int]]:
        """``#SBATCH`` options by their long name: value and line."""
        found = {}
        for number, line in enumerate(self.text.split("\n"), 1):
            if line.startswith("#SBATCH "):
                for key, value in re.findall(r"(--?[\w-]+)(?:[= ]+([^\s-]\S*))?", line[8:].partition(" #")[0]):
                    found[_SHORT.get(key, key.lstrip("-"))] = (value, number)
        return found

    def job(self, name: str) -> int | None:
        """An ``#SBATCH`` option that is a number."""
        value = self.sbatch.get(name, ("", 0))[0].rpartition(":")[2]
        return int(value) if value.isdecimal() else None

    @cached_property
    def _logical(self) -> list[tuple[int, str]]:
        """Lines with those that follow a backslash; each with the number of its first."""
        found: list[tuple[int, str]] = []
        going = False
        for number, line in enumerate(self.text.split("\n"), 1):
            if going:
                found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip().removesuffix(chr(92))}")
            elif not line.lstrip().startswith("#"):
                found.append((number, line.strip().removesuffix("\\")))
            going = line.rstrip().endswith("\\") and (going or not line.lstrip().startswith("#"))
        return found

    @cached_property
    def commands(self) -> list[Command]:
        """Commands that can be split into words."""
        found = []
        for number, line in self._logical:
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a quote that ends elsewhere
                continue
            found += _commands(number, words)
        return found

    @cached_property
    def variables(self) -> dict[str, tuple[str, int]]:
        """Variables that are set: value and line, quotes left out; the last of those that share a name."""
        return {key: (value, one.line) for one in self.commands for key, value in one.sets.items()}

    def value_at(self, command: Command, name: str) -> str:
        """What a variable is for ``command``; empty where that is not set, or depends on a branch."""
        value = ""
        for one in self.commands:
            if one is command:
                break
            value = "" if one.branches or (one.program == "unset" and name in one.words) else value
            value = one.sets.get(name, value) if not one.program else value
        return command.sets.get(name, value)

    def fault(self, line: int, text: str = "") -> Fault:
        """A fault in that line."""
        return Fault(line, 1, text)


def _commands(line: int, words: list[str]) -> list[Command]:
    """Commands of a line: those between ``;``, ``&&`` and the like."""
    found: list[Command] = []
    own: list[str] = []
    first = 0  # of those that the next & puts into the background
    for word in [*words, ";"]:
        mark = word if word in _SEPARATE else word[-1:] if word.endswith((";", "&")) else ""
        if mark != word:
            own.append(word.rstrip(mark) if mark else word)
        if mark and own:
            found.append(Command(line, tuple(own), False))
            own = []
        if mark == ";;":
            found.append(Command(line, (word,), False))
        if mark == "&":
            found[first:] = [Command(one.line, one.words, True) for one in found[first:]]
        if mark in (";", ";;", "&"):
            first = len(found)
    return found
