"""The pages of the paths that people take: each ``$`` command, run as it stands there, prints what stands under it.

``...`` is any lines, or any part of one; numbers of what is run are compared as numbers, those of the planner as they
are.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cost.price import read_prices
from shardwise.hardware.gpus import gpu_names
from tests.cli import configs
from tests.cli.test_own_loop import numberless
from tests.commands import shardwise

DOCS = configs.ROOT / "docs"


def sessions(page: str) -> list[tuple[list[str], str]]:
    """Commands of a page as words, each with what it prints."""
    blocks = "".join(re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL))
    return [(shlex.split(command), text) for command, text in re.findall(r"^\$ (.+)\n((?:[^$].*\n)*)", blocks, re.M)]


def snippet(page: str, kind: str) -> str:
    found = re.search(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert found is not None
    return found[1]


def check(found: str, expected: str, *, exact: bool = False) -> None:
    """Compare what a command printed with its page."""
    lines, wanted = (text.splitlines() if exact else numberless(text) for text in (found, expected))
    parts = [
        r"(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()).replace(r"\.\.\.", ".*") + "\n" for line in wanted
    ]
    assert re.fullmatch("".join(parts), "".join(line.rstrip() + "\n" for line in lines)), found


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A folder with the model and the config of the first page."""
    (tmp_path / "my_model.py").write_text(snippet("first-model.md", "python"))
    (tmp_path / "first.toml").write_text(snippet("first-model.md", "toml"))
    return tmp_path


@pytest.mark.turns(6)
def test_a_first_model(first: Path) -> None:
    found = sessions("first-model.md")
    assert [words[1] for words, _ in found] == ["plan", "train", "report", "checkpoint", "train"]
    for words, expected in found:
        done = shardwise(*words[1:], cwd=first)
        check(done.stdout + done.stderr, expected)


@pytest.mark.turns(6)
def test_many_ranks_under_torchrun(first: Path) -> None:
    (launched, printed), (alone, resumed) = sessions("many-ranks.md")
    assert launched[0] == "torchrun" and alone[0] == "shardwise"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launched[1:]],
        cwd=first,
        env=configs.environment(),
        text=True,
        capture_output=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, printed)
    done = shardwise(*alone[1:], cwd=first)
    check(done.stdout + done.stderr, resumed)


@pytest.mark.parametrize("number", range(4))
def test_what_to_rent(number: int) -> None:
    words, expected = sessions("what-to-rent.md")[number]
    check(shardwise(*words[1:]).stdout, expected, exact=True)


def test_prices_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(snippet("what-to-rent.md", "toml"))
    assert read_prices(tmp_path / "prices.toml", gpu_names()).hour["A100-80GB"] == 1.1


@pytest.mark.turns(6)
def test_a_run_that_dies_and_goes_on(first: Path) -> None:
    (words, died), (again, resumed) = sessions("slow-or-dead-runs.md")
    assert words == again and words[:3] == ["shardwise", "train", "first.toml"]
    (first / "run").symlink_to("runs/first")  # where the tests look for a run's steps
    config, *rest = words[2:]
    out, err = configs.train_and(lambda ranks: ranks[-1].kill(), first, 50, Path(config), *rest, exit_code=3, cwd=first)
    check(out + err, died)
    stop = configs.train_and(
        lambda ranks: [rank.send_signal(signal.SIGINT) for rank in ranks] and None,
        first,
        300,
        Path(config),
        *rest,
        exit_code=130,
        cwd=first,
    )
    check("".join(stop), resumed)
    assert re.search(r"shardwise: stopped after step \d+ of 4000, saved as '", stop[1])
