"""CPU ranks of one machine reduce and broadcast through shared memory: what gloo gives, for all sizes, in any order."""

from __future__ import annotations

import os
import random
import subprocess
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.distributed import shared_memory
from shardwise.distributed.shared_memory import PIECE, SharedMemory, share_memory
from shardwise.errors import ReceiptError, UserError
from shardwise.measure.collectives import CollectiveRecorder
from shardwise.parallel.data_parallel.ddp import Replicated
from shardwise.receipts.drift import DriftRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.models import decoder, ragged_batches
from tests.worlds import run_each, run_world

APART = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
"""What a launcher says of two machines."""
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def here() -> SharedMemory:
    assert dist.group.WORLD is not None
    found = share_memory(dist.group.WORLD)
    assert found is not None, "this machine has no memory that ranks can share"
    return found


def tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of one element, of less and more than a piece, and of just one."""
    generator = torch.Generator().manual_seed(rank)
    numbers = (1, 1000, PIECE // dtype.itemsize, 2 * PIECE // dtype.itemsize + 3)
    return [torch.randn(number, generator=generator, dtype=torch.float32).to(dtype) for number in numbers]


def compared() -> list[str]:
    """What is another than by a sum in the order of ranks, or is counted as something else."""
    memory, world, wrong = here(), dist.get_world_size(), []
    for dtype in TYPES:
        everyone = [tensors(rank, dtype) for rank in range(world)]
        own = [one.clone() for one in everyone[dist.get_rank()]]
        with CollectiveRecorder(lambda: "backward") as recorder:
            memory.mean(own)
        for mine, *of_ranks in zip(own, *everyone, strict=True):
            want = of_ranks[0] * (1 / world)
            for one in of_ranks[1:]:
                want = want + one * (1 / world)
            if not torch.equal(mine, want):
                wrong.append(f"{dtype}: the mean of {len(mine)}")
        size = sum(one.nbytes for one in own)
        counted = [(one.name, one.num_bytes, one.dtype) for one in recorder.collectives]
        if counted != [("all_reduce", size, str(dtype).removeprefix("torch."))]:
            wrong.append(f"{dtype}: {counted}")
    mixed = [torch.full((3,), float(dist.get_rank()), dtype=dtype) for dtype in (torch.float32, torch.float64) * 2]
    with CollectiveRecorder(lambda: "backward") as recorder:
        memory.mean(mixed[:: 1 - 2 * (dist.get_rank() % 2)])  # in another order on odd ranks
    counted = [(one.num_bytes, one.dtype) for one in recorder.collectives]
    if counted != [(24, "float32"), (48, "float64")] or {one.mean().item() for one in mixed} != {(world - 1) / 2}:
        wrong.append(f"two types at once: {counted}, {mixed}")
    parts = [
        [*tensors(rank, torch.float32)[: rank + 2], torch.tensor([rank], dtype=torch.int16)] for rank in range(world)
    ]
    given = [[one if rank == dist.get_rank() else torch.zeros_like(one) for one in of] for rank, of in enumerate(parts)]
    memory.broadcast(given)
    for rank, (found, want) in enumerate(zip(given, parts, strict=True)):
        if not all(torch.equal(a, b) for a, b in zip(found, want, strict=True)):
            wrong.append(f"the weights of rank {rank}")
    memory.broadcast([[] for _ in range(world)])
    return wrong


def hurried() -> list[str]:
    """Many collectives of random sizes, in which now one rank is late and now another."""
    memory, world, rank = here(), dist.get_world_size(), dist.get_rank()
    alike, own = random.Random(1), random.Random(100 + rank)
    wrong = []
    for number in range(120):
        sizes = [alike.randint(1, 3 * PIECE // 4) for _ in range(alike.randint(1, 3))]
        mine = [torch.full((size,), float(number + rank)) for size in sizes]
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        memory.mean(mine)
        want = number + (world - 1) / 2
        wrong += [f"{number}" for one in mine if not torch.allclose(one, torch.tensor(want))]
        weights = [
            [torch.full((size,), float(number * (r == rank)) + r * (r == rank)) for size in sizes] for r in range(world)
        ]
        memory.broadcast(weights)
        wrong += [f"{number} of {r}" for r in range(world) for one in weights[r] if not (one == number + r).all()]
    return wrong


def both() -> list[str]:
    return [*compared(), *hurried()]


@pytest.mark.parametrize("world", [2, 3])
def test_it_is_the_mean_and_the_broadcast_of_all(world: int) -> None:
    assert run_world(both, world) == [[]] * world


def test_memory_of_another_process_of_the_same_number_is_not_taken() -> None:
    made = shared_memory._create()
    assert made is not None
    memoryview(made[1])[shared_memory.SLOTS * PIECE :].cast("q")[1] = 7
    assert shared_memory._open(os.getpid(), made[0], 7) is not None
    assert shared_memory._open(os.getpid(), made[0], 8) is None
    os.close(made[0])
    assert shared_memory._open(os.getpid(), made[0], 7) is None


def refused() -> list[str]:
    """What a rank says of one that ended, one that does not answer, and one with another number of bytes."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier()
    memory = share_memory(group)
    assert memory is not None
    said = []
    if dist.get_rank() == 0:
        gone = subprocess.Popen(["true"])
        gone.wait()
        for process in (gone.pid, memory._processes[1]):
            memory._processes[1] = process
            with pytest.raises(RuntimeError) as error:
                memory._swap(4)
            memory._count -= 1
            said.append(str(error.value))
    dist.barrier()
    with pytest.raises(RuntimeError) as error:
        memory.mean([torch.zeros(1 + dist.get_rank())])
    return [*said, str(error.value)]


def test_a_rank_that_ends_or_stays_away_or_has_another_size_is_told() -> None:
    sizes = (
        "ranks are in different collectives, one may have been interrupted: all_reduce of 4 bytes of torch.float32 "
        "after 0 pieces, all_reduce of 8 bytes of torch.float32 after 0 pieces"
    )
    ended = "rank 1 of the group has ended inside a collective through shared memory"
    late = "rank 1 of the group did not answer in time inside a collective through shared memory"
    assert run_world(refused, 2) == [[ended, late, sizes], [sizes]]


def shared(strategy: str, how: str) -> tuple[bool, list[str]]:
    """Whether a prepared model shares memory, and what its ranks have that differs after a step."""
    patches = {
        "another node": mock.patch.dict("os.environ", **APART),
        "one cannot": mock.patch.object(shared_memory, "_open", lambda *place: None),
    }
    spoilt = patches.get(how) if how == "another node" or dist.get_rank() == 1 else None
    with spoilt or mock.patch.dict("os.environ"):
        session = start(strategy, receipts=False)
        model = decoder()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in session.steps(ragged_batches(2)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    outer = session.applied.outer
    session.close()
    assert isinstance(outer, Replicated)
    weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    return outer.memory is not None, [] if all(torch.equal(weights, one) for one in everyone) else ["w"]


def test_only_ranks_of_one_machine_that_can_share_memory_do() -> None:
    cases = [(s, how) for s in ("ddp", "zero1") for how in ("", "another node", "one cannot")]
    assert run_each(shared, 2, cases) == [[(not how, [])] * 2 for _, how in cases]


def joined(strategy: str) -> str:
    session = start(strategy, receipts=False)
    model = decoder()
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError) as error:
        model.join(divide_by_initial_world_size=False)  # type: ignore[operator]
    with model.join():  # type: ignore[operator]
        pass
    session.close()
    return str(error.value)


def test_a_divisor_that_the_reduction_would_ignore_is_refused() -> None:
    for said in run_world(joined, 2, "ddp"):
        assert said.startswith("model.join(divide_by_initial_world_size=False): gradients are averaged over all ranks")


def dropped(strategy: str, method: str) -> str:
    """What stops a run in which a rank leaves out what another wrote."""
    plain = SharedMemory._swap

    def own(memory: SharedMemory, size: int) -> list[torch.Tensor]:
        found = plain(memory, size)
        return [found[memory.group.rank()]] * len(found)

    def spoilt(memory: SharedMemory, *args: Any) -> None:
        with mock.patch.object(SharedMemory, "_swap", own if dist.get_rank() == 1 else plain):
            unspoilt(memory, *args)

    unspoilt = getattr(SharedMemory, method)
    session = start(strategy, receipts=False)
    DriftRecorder.attach(session, 1.0)
    model = decoder()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with mock.patch.object(SharedMemory, method, spoilt):
        try:
            for step in session.steps(ragged_batches(12)):
                step.run(model, token_loss_sum)
                step.update(optimizer)
        except ReceiptError as error:
            return str(error)
        finally:
            session.close()
    return ""


def test_a_reduction_or_a_broadcast_that_leaves_a_rank_out_is_caught() -> None:
    cases = [("ddp", "mean"), ("zero1", "broadcast")]
    for (_, method), said in zip(cases, run_each(dropped, 2, cases), strict=True):
        assert all("differ" in one for one in said), (method, said)
