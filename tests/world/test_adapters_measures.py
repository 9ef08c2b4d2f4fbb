"""What a run with adapters measures and takes: FLOPs by hand, the plan's own words, and memory while it is loaded."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint.weights import BaseWeights
from shardwise.measure.step_flops import FlopsRecorder
from shardwise.parallel.lora.adapters import add_adapters
from shardwise.parallel.lora.quantize import packed, quantized_bytes
from shardwise.parallel.materialize import build
from shardwise.plan.dims import dims_for
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.expected_part import axis_of
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.families import family
from tests.world.test_checkpoint_memory import MIB, status
from tests.worlds import run_world

WIDTH, INNER, LAYERS, KV_WIDTH, VOCAB, LENGTH, BATCH, RANK = 64, 128, 4, 32, 64, 16, 4, 8


def by_hand() -> tuple[float, float, float]:
    """Weights of the base and its adapters, model FLOPs and executed FLOPs of one step over the batch."""
    shapes = [(WIDTH, WIDTH)] * 2 + [(WIDTH, KV_WIDTH)] * 2 + [(WIDTH, INNER)] * 3
    products = LAYERS * sum(a * b for a, b in shapes)
    adapters = LAYERS * RANK * sum(a + b for a, b in shapes)
    head = VOCAB * WIDTH
    base = products + 2 * head + (2 * LAYERS + 1) * WIDTH
    tokens = BATCH * LENGTH
    square = 2 * (2 * LENGTH * WIDTH) * tokens * LAYERS
    model = (4 * base + 6 * adapters) * tokens + 3 * square
    first = 2 * WIDTH * (WIDTH + 2 * KV_WIDTH) + 3 * 2 * RANK * WIDTH  # nothing goes back into the frozen embedding
    executed = (4 * products + 6 * adapters + 4 * head - first) * tokens + 3.5 * square
    return base + adapters, model, executed


def work(strategy: str) -> Any:
    dims = dims_for(parse_strategy(strategy), torch.distributed.get_world_size())
    plan = Plan(strategy=strategy, dims=dims, adapter=AdapterOptions(rank=RANK))
    session = start(plan, receipts=False)
    probe = FlopsRecorder(axis_of)
    session.observers.append(probe)
    model = family("wide-llama", dtype=torch.float32)
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.randint(VOCAB, (BATCH // dims.dp, LENGTH))
    for step in session.run_windows([[(ids, ids)]] * 2):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    session.close()
    assert probe.work is not None
    return probe.work.parameters, probe.work.model_flops, probe.work.executed_flops


def works(strategies: list[str]) -> list[Any]:
    return [work(strategy) for strategy in strategies]


@pytest.mark.parametrize(("world", "strategies"), [(1, ["ddp+lora", "ddp+qlora"]), (2, ["fsdp+qlora"])])
def test_flops_of_a_step_over_a_frozen_base_are_those_counted_by_hand(world: int, strategies: list[str]) -> None:
    """Packed products count as plain ones, and gradients of frozen weights are nobody's work."""
    parameters, model, executed = by_hand()
    for found in run_world(works, world, strategies):
        for counted in found:
            assert counted[0] == parameters
            assert counted[1] == pytest.approx(model, rel=5e-3)
            assert counted[2] == pytest.approx(executed, rel=5e-3)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 4096, bias=False)
        self.down = nn.Linear(4096, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Large(nn.Module):
    """384 MiB in twelve blocks, 48 MiB once they are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 1024)
        self.blocks = nn.ModuleList(Wide() for _ in range(12))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


BLOCK = 32 * MIB
BESIDE = 160 * MIB
"""Two files' read buffers (32 MiB), a process group and DDP's bucket, bitsandbytes' tables, and what glibc keeps."""


def loaded(strategy: str, folder: str) -> tuple[int, int]:
    """Bytes that loading took at its peak, and those of the packed weights here."""
    dims = dims_for(parse_strategy(strategy), torch.distributed.get_world_size())
    plan = Plan(strategy=strategy, dims=dims, adapter=AdapterOptions(rank=4))
    session = start(plan, receipts=False)
    model = build(Large, 0, real=False)
    add_adapters(model, plan, real=session.ranks.is_main)
    packed(torch.randn(64, 64), True, "nf4")  # its tables are made once
    base = BaseWeights(model, folder)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(1, 8, dtype=torch.int64), base)
    peak = status("VmHWM")
    base.close()
    here = quantized_bytes(session.module)
    session.close()
    return peak - before, here


@pytest.mark.turns(6)
def test_a_base_is_packed_block_by_block_while_it_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(Large().state_dict(), tmp_path / "model.safetensors")
    for world, strategy, parts in ((1, "ddp+qlora", 1), (2, "fsdp+qlora", 2)):
        for peak, here in run_world(loaded, world, strategy, str(tmp_path)):
            assert here == 48 * MIB // parts
            assert peak < here + BLOCK + BESIDE, f"{strategy}: {peak / MIB:.0f} MiB"
