"""The sessions of a page in docs are run as they stand there, one after the other; ``...`` is any number of lines."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli import configs
from tests.cli.test_readme import fits, masked, shortened
from tests.commands import shardwise

PAGE = (configs.ROOT / "docs" / "from-ddp-to-fsdp.md").read_text()
SESSIONS = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE)
SNIPPETS = re.findall(r"```python\n((?:.*\n)*?)```", PAGE)
CONVERT = re.findall(r"^(shardwise checkpoint convert .+?) +#", PAGE, flags=re.MULTILINE)

OLD_LOOP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.models import byte_decoder

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(byte_decoder(0.0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for number in range(3):
    ids = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(number))
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NEW_LOOP = """
import torch
from tests.models import byte_decoder

model = byte_decoder(0.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
"""
SAY = """
import json
inner = getattr(model, "module", model)
norm = {name: sum(float((p.full_tensor() if hasattr(p, "full_tensor") else p).double().norm()) for p in values)
        for name, values in {"weights": list(inner.parameters()),
                             "moments": [optimizer.state[p]["exp_avg_sq"] for p in inner.parameters()]}.items()}
norm["lr"] = optimizer.param_groups[0]["lr"]
if torch.distributed.get_rank() == 0:
    print("FOUND", json.dumps(norm))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
import os, sys
sys.stdout.flush()
os._exit(0)  # the interpreter's own end races with gloo's threads, in a loop of plain PyTorch too
"""


@pytest.mark.turns(3)
def test_the_sessions_of_the_page(tmp_path: Path) -> None:
    assert [command.split()[:2] for command, _ in SESSIONS] == [
        ["shardwise", "train"],
        ["shardwise", "train"],
        ["shardwise", "checkpoint"],
    ]
    for command, expected in SESSIONS:
        words = shlex.split(command.replace("runs/migration", str(tmp_path / "run")))
        found = said(words).replace(str(tmp_path / "run"), "runs/migration")
        wrong = fits(masked(found), masked(expected))
        assert not wrong, f"{command}: {wrong}\n{found}"


@pytest.mark.turns(6)
def test_the_sessions_on_adapters(tmp_path: Path, small_base: Path) -> None:
    """With fewer steps on a smaller base than the page's."""
    sessions = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", (configs.ROOT / "docs" / "lora.md").read_text())
    assert [command.split()[1] for command, _ in sessions] == ["train", "checkpoint"]
    for command, expected in sessions:
        words = shortened(
            shlex.split(command.replace("runs/qlora", str(tmp_path / "run"))), small_base, tmp_path / "run"
        )
        found = said(words).replace(str(tmp_path / "run"), "runs/qlora")
        wrong = fits(masked(found), masked(expected))
        assert not wrong, f"{command}: {wrong}\n{found}"


@pytest.mark.turns(6)
def test_a_loop_of_ones_own_as_the_page_says(tmp_path: Path) -> None:
    save, load = SNIPPETS
    before = in_two_ranks(tmp_path, OLD_LOOP + save + SAY)
    words = CONVERT[0].replace("mymodel:build", "tests.models:byte_decoder").split()
    places = {name: str(tmp_path / name) for name in ("last-of-ddp", "runs/mine")}
    told = said([places.get(word, word) for word in words])
    assert "verified by a forward pass" in told
    after = in_two_ranks(tmp_path, NEW_LOOP + load + SAY)
    assert after == before


def in_two_ranks(folder: Path, script: str) -> str:
    """Run a script under torchrun in ``folder``; what it found."""
    (folder / "loop.py").write_text(script)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "loop.py"]
    found = run([sys.executable, *launcher], cwd=folder)
    return found[found.index("FOUND") :].splitlines()[0]


def said(words: Sequence[str]) -> str:
    """All that a command line of ours prints; it must end well."""
    assert words[0] == "shardwise"
    done = shardwise(*words[1:])
    return done.stdout + done.stderr


def run(command: Sequence[str], cwd: Path = configs.ROOT) -> str:
    """All that a command prints; it must end well."""
    environment = configs.environment() | {"PYTHONPATH": str(configs.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_lines_that_are_left_out() -> None:
    assert not fits(["a", "b", "c"], ["a", "...", "c"])
    assert not fits(["a", "b", "c"], ["...", "c"])
    assert not fits(["a", "b", "c"], ["a", "..."])
    assert fits(["a", "b", "c"], ["a", "c"])
    assert fits(["a", "b", "c"], ["a", "b"])
    assert fits(["a", "b"], ["...", "b", "a"])
