"""``start("auto")`` asks the planner: for batches like the sample that ``session.prepare`` gets."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import DoesNotFit
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.read import read_model
from shardwise.parallel.apply import parameter_names
from shardwise.plan.plan import Plan
from shardwise.run.start import automatic, start
from shardwise.search.choose import choose
from shardwise.train.optimizer import workload_of
from tests.models import byte_decoder
from tests.worlds import run_world

DRAFT = Plan(device="cpu", grad_accum=2)


def machine(memory: int | None) -> ClusterSpec:
    return ClusterSpec(device="cpu", device_name="Device", devices_per_node=4, device_memory_bytes=memory)


def planned(memory: int | None, sample: torch.Tensor | None) -> Plan:
    model = byte_decoder(0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    return automatic(DRAFT, model, workload_of(optimizer, parameter_names(model)), machine(memory), sample)


def test_what_a_forward_saves_is_counted() -> None:
    """A memory that the state takes half of: enough for a small batch, not for a large one."""
    spec = read_model(byte_decoder(0.0))
    state = sum(p.num_elements for p in spec.parameters) * 16
    memory = 4 * state
    small = planned(memory, torch.zeros(1, 8, dtype=torch.int64))
    assert small.strategy == "ddp" and "fit" in small.reason and "unknown" not in small.reason
    assert small.micro_batch is None and small.seq_len is None and small.grad_accum == 2
    with pytest.raises(DoesNotFit, match="no plan fits 4 × Device"):
        planned(memory, torch.zeros(4096, 64, dtype=torch.int64))


def test_without_a_sample_it_says_what_is_unknown() -> None:
    found = planned(None, None)
    assert found.strategy == "ddp"
    said = "what a forward saves is unknown: give session.prepare(model, optimizer, sample) a micro batch"
    assert said in found.reason


def test_no_axis_that_a_loop_is_written_for() -> None:
    """Too little for any whole model: tensor parallel would do, and is not taken."""
    with pytest.raises(DoesNotFit) as raised:
        planned(1000, torch.zeros(1, 8, dtype=torch.int64))
    assert "+tp" not in str(raised.value).partition("use more")[0].partition("would do")[0]


def prepare() -> str:
    session = start("auto", receipts=False)
    rank = session.ranks.rank
    model = byte_decoder(0.0)
    sample = torch.zeros(rank + 1, 8 * (rank + 1), dtype=torch.int64)
    session.prepare(model, torch.optim.AdamW(model.parameters()), sample)
    plan = session.plan.to_json()
    session.close()
    return plan


def test_ranks_with_other_samples_have_one_plan() -> None:
    assert len(set(run_world(prepare, 2))) == 1


def test_one_limit_of_memory() -> None:
    """A model that cannot be traced is judged by the planner's own share of the memory."""
    from shardwise.search.problem import usable_bytes

    spec = read_model(byte_decoder(0.0))
    with pytest.raises(DoesNotFit) as raised:
        choose(DRAFT, spec, workload_of(torch.optim.SGD(byte_decoder(0.0).parameters())), machine(1000))
    assert "usable" in str(raised.value) and usable_bytes(machine(1000)) == 900
