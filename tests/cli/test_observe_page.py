"""The pages on receipts for other tools: their scripts run as they stand there, and print what stands under them."""

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
from tests.commands import shardwise as run_command

SCRIPTS = {
    "observe.md": ("loop.py", "timed.py", "gradients.py"),
    "trainer.md": ("trainer.py",),
    "trl.md": ("sft.py",),
    "accelerate.md": ("accelerated.py",),
    "lightning.md": ("fit.py", "lightning_loop.py"),
    "fabric.md": ("fabric_loop.py",),
    "deepspeed-engine.md": ("engine.py",),
}
CASES = [(page, number) for page, names in SCRIPTS.items() for number in range(len(names))]


def scripts(page: str) -> list[str]:
    text = (configs.ROOT / "docs" / page).read_text()
    return [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "import torch" in block]


def runs(page: str) -> list[list[tuple[list[str], str]]]:
    """The session of each script, and those that follow it in its folder."""
    found: list[list[tuple[list[str], str]]] = []
    for words, text in sessions(page):
        if words[0] == "torchrun":
            found.append([])
        found[-1].append((words, text))
    return found


@pytest.mark.parametrize("page", SCRIPTS)
def test_each_script_has_its_session(page: str) -> None:
    assert tuple(words[-1] for (words, _), *_ in runs(page)) == SCRIPTS[page]
    assert len(scripts(page)) == len(SCRIPTS[page])


@pytest.mark.turns(3)
@pytest.mark.parametrize(("page", "number"), CASES, ids=[SCRIPTS[page][number][:-3] for page, number in CASES])
def test_a_session_of_the_page(page: str, number: int, tmp_path: Path) -> None:
    (words, expected), *after = runs(page)[number]
    script = scripts(page)[number]
    if "deepspeed" in script:  # else it compiles an operator first
        script = "from shardwise.parallel.engines import deepspeed_available as a; a.import_deepspeed()\n" + script
    (tmp_path / words[-1]).write_text(script)
    source = str(Path(shardwise.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout
    check(done.stdout, expected)
    for words, expected in after:
        assert words[0] == "shardwise"
        check(run_command(*words[1:], cwd=tmp_path).stdout, expected)
