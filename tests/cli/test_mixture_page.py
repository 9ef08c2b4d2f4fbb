"""The sessions of docs/mixture-of-experts.md are run as they stand there, one after the other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli import configs
from tests.cli.test_readme import fits, masked
from tests.commands import shardwise

PAGE = (configs.ROOT / "docs" / "mixture-of-experts.md").read_text()
BLOCKS = re.findall(r"```console\n((?:.*\n)*?)```", PAGE)
SESSIONS = [one for block in BLOCKS for one in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)]


def test_the_sessions_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert len(SESSIONS) == 5
    for command, expected in SESSIONS:
        done = shardwise(*shlex.split(command)[1:], cwd=tmp_path, exit_code=None)
        wrong = fits(masked(done.stdout + done.stderr), masked(expected))
        assert not wrong, f"{command}: {wrong}\n{done.stdout}{done.stderr}"
