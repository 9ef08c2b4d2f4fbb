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
        return None

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
        return int(value) if value.isdigit() else None

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
            if words:
                found.append(Command(number, tuple(word for word in words if word != "&"), words[-1] == "&"))
        return found

    @cached_property
    def variables(self) -> dict[str, tuple[str, int]]:
        """Variables that are set: value and line, quotes left out; the last of those that share a name."""
        found = {}
        for command in self.commands:
            for word in command.words:
                key, equal, value = word.partition("=")
                if equal and key.isidentifier():
                    found[key] = (value, command.line)
                elif word not in ("export", "env", "srun") and not (equal and key.isidentifier()):
                    break
        return found

    def fault(self, line: int, text: str = "") -> Fault:
        """A fault in that line."""
        return Fault(line, 1, text)
