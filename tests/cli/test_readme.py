"""The sessions of README and of the first run: each ``$`` command of a console block must print what stands under it.

Numbers that depend on the machine (rates, times, memory, the size of this Python's library) are masked on both sides;
words, the batch equation and the receipts are compared as they are. What stands for ``...`` is not compared. Examples
that train adapters are run with fewer steps, on a smaller base than the one that `make train` makes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli import configs
from tests.commands import shardwise

README, FIRST_RUN = ((configs.ROOT / name).read_text() for name in ("README.md", "docs/first-run.md"))
SESSIONS = [*dict.fromkeys(re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", FIRST_RUN + README))]
MOST_WORDS = 900
MACHINE = re.compile(r"^(data|plan|step|held|done|\s+the simplest)|peak|activations|held-out bits")


def masked(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        words = re.sub(r"[┏┳┓┡╇┩└┴┘━─]+", "", line)
        if MACHINE.search(words):
            words = re.sub(r"\d+(\.\d+)?( (h|min|ms|s|k|M|GiB|MiB))*", "#", words)
            words = re.sub(r"\b(under|over)\b", "vs", words)
        words = " ".join(words.split())
        if words:
            lines.append(words)
    return lines


def fits(found: Sequence[str], expected: Sequence[str]) -> str:
    """Why ``found`` is not ``expected``, in which ``...`` stands for any lines; empty where it is."""
    rest, free = list(found), False
    for line in expected:
        if line == "...":
            free = True
            continue
        if line not in rest or (rest[0] != line and not free):
            return f"expected {line!r}, found {(rest or ['the end'])[:3]}"
        rest = rest[rest.index(line) + 1 :]
        free = False
    return "" if free or not rest else f"more was found: {rest[:3]}"


ADAPTED = ("examples/lora.toml", "examples/qlora.toml")


def shortened(words: Sequence[str], base: Path, output: Path) -> list[str]:
    """The words of a command; of one that trains adapters with fewer steps, on ``base``."""
    if not set(ADAPTED) & set(words):
        return list(words)
    short = ["train.steps=4", "train.eval_every=2", "train.eval_samples=8", f"train.output={output}"]
    return [*words, f"model.weights={base}", *short]


@pytest.mark.turns(6)
@pytest.mark.parametrize(("command", "expected"), SESSIONS, ids=[command[:60] for command, _ in SESSIONS])
def test_session(command: str, expected: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    words = [word.replace("runs/readme", str(tmp_path / "run")) for word in shlex.split(command)]
    # half a minute to make: only for who trains on it
    base = request.getfixturevalue("small_base") if set(ADAPTED) & set(words) else tmp_path
    words = shortened(words, base, tmp_path / "run")
    assert words[0] == "shardwise"
    done = shardwise(*words[1:], exit_code=None)
    found = (done.stdout + done.stderr).replace(str(tmp_path / "run"), "runs/readme")
    wrong = fits(masked(found), masked(expected))
    assert not wrong, f"{wrong}\n{found}"


def test_readme_has_the_two_commands_and_a_session() -> None:
    assert "make train" in README
    assert "make test" in README
    assert len(SESSIONS) >= 2
    assert len(README.split()) <= MOST_WORDS


def test_every_link_leads_somewhere() -> None:
    for page in (configs.ROOT / "README.md", *(configs.ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
