"""What rules ask about a script: which ranks reach a line, how a model is wrapped, what a name holds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shardwise.lint.launch_file import LaunchFile
from shardwise.lint.lint_paths import lint_text
from shardwise.lint.rank_tests import perhaps_guarded, reached_by
from shardwise.lint.rule import all_rules
from shardwise.lint.script import Script

HEAD = """
import os
import torch
import torch.distributed as dist
from torch.distributed import get_rank
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from accelerate import Accelerator
from lightning.fabric import Fabric
"""


def read(text: str) -> tuple[Script, ast.Call]:
    """The script, and its call of ``here(...)``."""
    script = Script(Path("a.py"), HEAD + text)
    return script, next(call for call in script.calls if script.name(call.func) == "here")


FIRST = [
    "if dist.get_rank() == 0: here()",
    "if get_rank() == 0 and step % 10 == 0: here()",
    "if not dist.get_rank(): here()",
    "if dist.get_rank() in (-1, 0): here()",
    "if int(os.environ['RANK']) == 0: here()",
    "if int(os.environ.get('LOCAL_RANK', 0)) == 0: here()",
    "rank = dist.get_rank()\nif rank == 0: here()",
    "rank = dist.get_rank() if dist.is_initialized() else 0\nif rank == 0: here()",
    "is_main = dist.get_rank() == 0\nif is_main: here()",
    "if ddp:\n    rank = dist.get_rank()\nelse:\n    rank = 0\nif rank == 0: here()",
    "if ddp:\n    main = dist.get_rank() == 0\nelse:\n    main = True\nif main: here()",
    "if not dist.is_initialized() or dist.get_rank() == 0: here()",
    "def is_main(): return dist.get_rank() == 0\nif is_main(): here()",
    "def is_main():\n    if not dist.is_initialized(): return True\n    return get_rank() == 0\nif is_main(): here()",
    "if accelerator.is_main_process: here()",
    "if trainer.is_global_zero: here()",
    "def f(rank):\n    if rank != 0: return\n    here()",
    "if dist.get_rank() > 0: pass\nelse: here()",
    "def save(): here()\nif dist.get_rank() == 0: save()",
    "class A:\n    def __init__(self): self.r = dist.get_rank()\n    def f(self):\n        if self.r == 0: here()",
]
UNKNOWN = [
    "here()",
    "if step == 0: here()",
    "if dist.get_rank() == 0 or step > 5: here()",
    "if dist.get_rank() < 8: here()",
    "if step > 3 and dist.get_rank() == 0: pass\nelse: here()",
    "def save(): here()\nsave()\nif dist.get_rank() == 0: save()",
    "import other\ndef save(): here()\nif dist.get_rank() == 0: other.save()",
    "if dist.get_rank() == 0: x = 1\nhere()",
    "rank = order['rank']\nif rank == 0: here()",
    "for x in y:\n    if dist.get_rank() == 0: z = 1\n    here()",
]


@pytest.mark.parametrize("text", FIRST)
def test_rank_0_alone_comes_here(text: str) -> None:
    assert reached_by(*read(text)) == "first"
    assert perhaps_guarded(*read(text))


@pytest.mark.parametrize("text", UNKNOWN)
def test_nothing_shows_that_only_some_come_here(text: str) -> None:
    assert reached_by(*read(text)) == ""


@pytest.mark.parametrize(
    "text", ["if dist.get_rank() != 0: here()", "if dist.get_rank() == 0: pass\nelse: here()", "if rank > 0: here()"]
)
def test_all_but_rank_0_come_here(text: str) -> None:
    assert reached_by(*read(text)) == "others"


@pytest.mark.parametrize(
    "text",
    [
        "def write(): here()",
        "import atexit\ndef write(): here()\natexit.register(write)",
        "@once\ndef main(): here()",
        "if config.writes_on_master: here()",
        "class A:\n    def train(self):\n        if self.gpu_id == 0: self.save()\n    def save(self): here()",
        "def save_on_rank_zero(): here()\nsave_on_rank_zero()",
    ],
)
def test_somebody_may_have_asked_for_the_rank(text: str) -> None:
    assert perhaps_guarded(*read(text))


@pytest.mark.parametrize("text", ["here()", "def main(): here()\nmain()", "if epoch % 5 == 0: here()"])
def test_every_rank_comes_here(text: str) -> None:
    assert not perhaps_guarded(*read(text))


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("m = DDP(m)\nhere(m)", {"ddp"}),
        ("m = torch.nn.parallel.DistributedDataParallel(m, device_ids=[0])\nhere(m)", {"ddp"}),
        ("m = build()\nif ddp:\n    m = DDP(m.to('cuda'))\nhere(m)", {"ddp"}),
        ("m = torch.compile(DDP(m))\nhere(m)", {"ddp", "compile"}),
        ("m = DDP(m)\nn = m.module\nhere(n)", set()),
        ("m = FSDP(module=m).cuda()\nhere(m)", {"fsdp1"}),
        ("for layer in m.layers: fully_shard(layer)\nfully_shard(m)\nhere(m)", {"fsdp2"}),
        ("here(m)\nfully_shard(m)", set()),
        ("a = Accelerator()\nm, o = a.prepare(DDP(m), o)\nhere(m)", {"accelerate", "ddp"}),
        ("a = Accelerator()\nm, o = a.prepare(m, DDP(o))\nhere(m)", {"accelerate"}),
        ("f = Fabric()\nf.launch()\nm, o = f.setup(m, o)\nhere(m)", {"fabric"}),
        ("def train(model, n):\n    here(model)\nm = DDP(build())\ntrain(m, 3)", {"ddp"}),
        ("def train(n, model=None):\n    here(model)\ntrain(3, model=FSDP(m))", {"fsdp1"}),
        ("class A:\n    def __init__(self, m): self.m = DDP(m)\n    def f(self): here(self.m)", {"ddp"}),
        ("m, n = DDP(m), build()\nhere(n)", set()),
        ("from mine import DistributedDataParallel\nm = DistributedDataParallel(m)\nhere(m)", set()),
    ],
)
def test_how_a_model_is_wrapped(text: str, wrapped: set[str]) -> None:
    script, call = read(text)
    assert script.wrapped(call.args[0], call) == wrapped


def test_a_launch_file_is_read_as_a_shell_reads_it() -> None:
    text = """#!/bin/bash
#SBATCH -N 2 --gres=gpu:h100:8   # two nodes
#SBATCH --cpus-per-task 16
# srun old
export A=1 B="two words"
C=3 srun --label torchrun \\
    --nproc_per_node=8 \\
    train.py --name 'it''s' &
echo "not # a comment
"
"""
    read_file = LaunchFile(Path("a.sh"), text)
    assert (read_file.job("nodes"), read_file.job("cpus-per-task")) == (2, 16)
    assert read_file.sbatch["gres"][0] == "gpu:h100:8"
    assert {name: value for name, (value, _) in read_file.variables.items()} == {"A": "1", "B": "two words", "C": "3"}
    started = next(one for one in read_file.commands if one.is_torchrun)
    assert (started.line, started.background, started.option("nproc-per-node")) == (6, True, "8")
    assert started.words[-1] == "its"


@pytest.mark.parametrize(
    "text",
    [
        "loss = torch.ones(1)\nloss = loss.detach()\nloss = loss.clone()\ndist.all_reduce(loss)\nloss.item()",
        "def f(x):\n    x = x.clone()\n    dist.all_reduce(x)\n    x.item()\n    f(x)",
        "def f(m):\n    return g(m)\ndef g(m):\n    m(1)\n    return f(m)\nf(DDP(f))",
        "a = b\nb = a\na = DDP(b)\nb = torch.compile(a)\na.state_dict()\ntorch.save(a.state_dict(), a)",
        "rank = rank\nif rank == 0: dist.barrier()",
        "m = m.module\nm = m.module.to(m)\nm(1).backward()",
        "def is_main(): return is_main()\nif is_main(): dist.barrier()",
        "def save(): save()\ndef save(): torch.save(1, path)\nsave()",
        "x, *y = dist.get_rank(), 1\n[x.a, y[0]] = z\nwith open(x) as (a, b): pass",
        "class A(A):\n    def f(self): self.f = self.f\n    model = DDP(self.model)",
        "for x in DataLoader(): pass\ntorch.utils.data.DataLoader(*a, **b)\ntorch.save(*a)\ntorch.load()",
        "lambda m: m(DDP(m))\nmatch x:\n    case {'a': b}: dist.barrier()",
        "async def f():\n    async with a as b: await dist.barrier()\n    return [x async for x in y]",
    ],
)
def test_strange_scripts_end(text: str) -> None:
    lint_text(Path("a.py"), HEAD + text, all_rules())
