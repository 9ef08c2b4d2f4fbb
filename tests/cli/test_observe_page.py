"""The page on receipts for any loop: its scripts run as they stand there, and print what stands under them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from tests.cli import configs
from tests.cli.test_role_pages import check, sessions

PAGE = (configs.ROOT / "docs" / "observe.md").read_text()
SCRIPTS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "import torch" in block]
SESSIONS = sessions("observe.md")


def test_each_script_has_its_session() -> None:
    assert [words[-1] for words, _ in SESSIONS] == ["loop.py", "trainer.py"]
    assert len(SCRIPTS) == 2


@pytest.mark.turns(3)
@pytest.mark.parametrize("number", range(len(SESSIONS)), ids=["loop", "trainer"])
def test_a_session_of_the_page(number: int, tmp_path: Path) -> None:
    words, expected = SESSIONS[number]
    (tmp_path / words[-1]).write_text(SCRIPTS[number])
    source = str(Path(shardwise.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout
    check(done.stdout, expected)
