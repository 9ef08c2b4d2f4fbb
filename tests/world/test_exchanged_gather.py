"""Two ranks gather into each other's memory: bit by bit what gloo's own all_gather gives, and counted as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor

from shardwise.distributed.places import on_one_node
from shardwise.errors import UserError
from shardwise.measure.collectives import CollectiveRecorder
from shardwise.parallel.data_parallel.exchanged_gather import PARTS, ExchangedGather
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.models import decoder, ragged_batches
from tests.worlds import run_each, run_world

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)
SIZES = (1, 1000, 262145)


def gathers(parts: int) -> list[str]:
    """What is another than of gloo's all_gather."""
    group, comm, wrong = dist.group.WORLD, ExchangedGather(parts), []
    rank = dist.get_rank()
    for dtype in TYPES:
        for size in SIZES:
            for in_place in (True, False):
                for async_op in (True, False):
                    part = torch.arange(size).add(100 * rank).to(torch.float32).to(dtype)
                    want = torch.empty(2 * size, dtype=dtype)
                    found = comm.allocate((2 * size,), dtype=dtype, device=part.device)
                    dist.all_gather(list(want.chunk(2)), part)
                    own = found.narrow(0, rank * size, size) if in_place else torch.empty_like(part)
                    own.copy_(part)
                    with CollectiveRecorder(lambda: "forward") as recorder:
                        work = comm(output_tensor=found, input_tensor=own, group=group, async_op=async_op)
                    if async_op:
                        work.wait()
                    counted = [(one.name, one.num_bytes) for one in recorder.collectives]
                    if not torch.equal(found, want) or work is None is async_op:
                        wrong.append(f"{dtype} {size} {in_place} {async_op}")
                    if counted != [("all_gather", 2 * part.nbytes)]:
                        wrong.append(f"{dtype} {size}: {counted}")
    return wrong


def test_it_is_the_all_gather_of_two() -> None:
    assert run_each(gathers, 2, [(1,), (PARTS,)]) == [[[], []]] * 2


def test_ranks_of_other_nodes_send_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_one_node((0, 1)), "no launcher"
    place = {
        "RANK": 1,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "host",
        "MASTER_PORT": 1,
    }
    for key, value in place.items():
        monkeypatch.setenv(key, str(value))
    assert on_one_node((2, 3)) and not on_one_node((1, 2)) and not on_one_node((0, 2))


def kinds(strategy: str) -> Any:
    """For each unit of a model, root and blocks, the kind of its gather, and whether it is freed after its forward."""
    session = start(strategy, receipts=False)
    model = decoder()
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    session.close()
    return [(type(one._all_gather_comm), one._reshard_after_forward) for one in groups]


def test_only_two_ranks_exchange_and_only_the_last_block_stays() -> None:
    last = {"fsdp": [False, True, True, False], "zero2": [False] * 4, "hsdp": [False, True, True, False]}
    for world, strategy, kind in (
        (2, "fsdp", ExchangedGather),
        (2, "zero2", ExchangedGather),
        (4, "hsdp", ExchangedGather),
    ):
        for found in run_world(kinds, world, strategy):
            assert found == [(kind, freed) for freed in last[strategy]], (world, strategy)
    for found in run_world(kinds, 4, "fsdp"):
        assert found == [(DefaultAllGather, freed) for freed in last["fsdp"]]


def swapped(strategy: str, how: str) -> list[str]:
    """What goes wrong where a user changes weights after a forward without gradients between two steps."""
    session = start(strategy, receipts=False)
    model = decoder()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found: list[dict[str, torch.Tensor]] = []
    wrong: list[str] = []
    for step in session.steps(ragged_batches(2 * session.ranks.world_size)):
        for micro in step:
            step.backward(token_loss_sum(model(micro.inputs), micro.labels), count=micro.num_tokens)
        step.update(optimizer)
        found.append({name: p.full_tensor().clone() for name, p in model.named_parameters() if isinstance(p, DTensor)})
        if len(found) == 1:
            with torch.no_grad():
                wrong += changes[how](model, optimizer, micro.inputs)
    session.close()
    before, after = found
    assert len(before) == len(after) == len(list(model.parameters()))
    times = 1 if how == "a gathered copy" else 2
    return wrong + [name for name in before if not torch.equal(after[name], times * before[name])]


def by_parameters(model: Any, optimizer: Any, inputs: torch.Tensor) -> list[str]:
    model(inputs)
    for parameter in model.parameters():
        parameter.mul_(2)
    return []


def by_data(model: Any, optimizer: Any, inputs: torch.Tensor) -> list[str]:
    """Past the version of a tensor."""
    model(inputs)
    for _, parameter in model.named_parameters():
        parameter.data.mul_(2)
    return []


def by_the_optimizer(model: Any, optimizer: Any, inputs: torch.Tensor) -> list[str]:
    """Shards, while copies of some are gathered: the next forward must not take these."""
    model(inputs)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.mul_(2)
    logits = model(inputs)
    model.reshard()
    return [] if torch.equal(logits, model(inputs)) else ["the next forward takes old weights"]


def by_a_gathered_copy(model: Any, optimizer: Any, inputs: torch.Tensor) -> list[str]:
    logits = model(inputs)
    model.head.weight.mul_(2)
    with pytest.raises(UserError, match=r"changed in place .* \(head.weight\)"):
        model(inputs)
    return [] if torch.equal(logits, model(inputs)) else ["a refused change lives on"]


def by_one_rank_and_all(model: Any, optimizer: Any, inputs: torch.Tensor) -> list[str]:
    """One rank alone asks for weights first, and reads the head that a loss needs."""
    model(inputs)
    if dist.get_rank() == 0:
        next(model.parameters())
        torch.nn.functional.linear(torch.ones(2, model.head.in_features, dtype=torch.float64), model.head.weight)
    return by_parameters(model, optimizer, inputs)


def by_stored_parameters(model: Any, optimizer: Any, inputs: torch.Tensor) -> list[str]:
    """Shards that were taken before the forward, past their versions."""
    stored = list(model.parameters())
    with torch.inference_mode():
        model(inputs)
    for parameter in stored:
        parameter.data.mul_(2)
    logits = model(inputs)
    model.reshard()
    return [] if torch.equal(logits, model(inputs)) else ["the next forward takes old weights"]


changes = {
    "one rank first": by_one_rank_and_all,
    "stored parameters": by_stored_parameters,
    "parameters": by_parameters,
    "data": by_data,
    "shards": by_the_optimizer,
    "a gathered copy": by_a_gathered_copy,
}


def test_a_change_of_weights_after_a_forward_between_two_steps_is_made_or_refused() -> None:
    cases = [(strategy, how) for strategy in ("fsdp", "zero2") for how in changes]
    assert dict(zip(cases, run_each(swapped, 2, cases), strict=True)) == {case: [[], []] for case in cases}


def cut_off(strategy: str, forwards: int) -> list[str]:
    """Weights that lose a change which was made after a step that broke off, and after so many further forwards."""
    session = start(strategy, receipts=False)
    model = decoder()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    try:
        for step in session.steps(ragged_batches(4)):
            for micro in step:
                loss = token_loss_sum(model(micro.inputs), micro.labels)
                if step.number == 2:
                    raise ValueError("of the user's own loss")
                step.backward(loss, count=micro.num_tokens)
            step.update(optimizer)
    except ValueError:
        pass
    with torch.no_grad():
        before = {name: p.full_tensor().clone() for name, p in model.named_parameters() if isinstance(p, DTensor)}
        for _ in range(forwards):
            model(micro.inputs)
        for parameter in model.parameters():
            parameter.data.mul_(2)
    for step in session.steps(ragged_batches(2)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    after = {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    session.close()
    assert len(before) == len(list(model.parameters()))
    return [name for name in before if not torch.equal(after[name], 2 * before[name])]


def inferred(strategy: str) -> int:
    """An evaluation before any step, under `torch.inference_mode`."""
    session = start(strategy, receipts=False)
    model = decoder()
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with torch.inference_mode():
        found = [model(inputs).argmax(-1) for inputs, _ in ragged_batches(2)]
        assert len(list(model.parameters())) and len(found) == 2
    session.close()
    return len(found)


def test_an_evaluation_before_any_step_may_be_under_inference_mode() -> None:
    assert run_each(inferred, 2, [("fsdp",), ("zero2",)]) == [[2, 2]] * 2


def test_a_change_of_weights_after_a_step_that_broke_off_is_made() -> None:
    cases = [(strategy, forwards) for strategy in ("fsdp", "zero2") for forwards in (0, 1)]
    assert run_each(cut_off, 2, cases) == [[[], []]] * 4
