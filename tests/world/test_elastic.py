"""A run whose world shrinks under it, 4 → 2 → 3 → 1 ranks, each leg under another strategy: the same samples at every
step, in the same order, and the losses of one process that was never interrupted. So too where the model itself is cut.
"""

from __future__ import annotations

import json
import os
import random
import signal
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.distributed.process_group import gather_ints
from shardwise.errors import Interrupted
from shardwise.run.job import Job, prepare_job
from shardwise.train.config import read_config
from tests.cli import configs
from tests.faults.kills import write_texts
from tests.worlds import WorldError, run_world

SHRINKING = (("ddp", 4, 5), ("fsdp", 2, 9), ("zero1", 3, 14), ("ddp", 1, None))  # strategy, ranks, last step of the leg
GROWING = (("ddp", 1, 3), ("zero2", 2, 7), ("hsdp", 4, 12), ("fsdp+offload", 3, None))
CUTTING = (("ddp", 2, 3), ("fsdp+tp2", 4, 6), ("ddp+pp2", 4, 10), ("ddp+tp2", 2, 13), ("ddp", 2, None))
GLOBAL_BATCH, EPOCHS = 12, 3

Leg = tuple[str, int, int | None]
Steps = dict[int, list[int]]  # step to the ids of its samples, in the order of the stream


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("legs", "data", "micro_batch"),
    [
        pytest.param(SHRINKING, {"pack": True}, None, id="packed-micro-batch-follows-the-world"),
        pytest.param(SHRINKING, {"pack": False}, 1, id="documents-accumulation-follows-the-world"),
        pytest.param(GROWING, {"pack": True, "mask_borders": True}, 1, id="growing-masked-borders"),
        pytest.param(CUTTING, {"pack": True}, 1, id="the-model-is-cut-and-whole-again"),
    ],
)
def test_the_same_samples_and_losses(
    tmp_path: Path, legs: tuple[Leg, ...], data: dict[str, Any], micro_batch: int | None
) -> None:
    texts = write_texts(tmp_path / "texts")
    alone, changing = tmp_path / "alone", tmp_path / "changing"
    options: dict[str, Any] = {"micro_batch": micro_batch}
    if legs is CUTTING:
        options["factory"] = "tests.models:byte_attention"
    full = train(alone, texts, ("ddp", 1, None), data, **options)
    seen = Counter(id_ for ids in full.values() for id_ in ids)
    missing = seen.pop(-1)
    assert set(seen.values()) == {EPOCHS}, "every epoch has every sample"
    assert missing == full[len(full)].count(-1), "only the last batch is not full"
    assert len(seen) % GLOBAL_BATCH, "an epoch ends within a step"
    found: Steps = {}
    for leg in legs:
        steps = train(changing, texts, leg, data, **options)
        assert min(steps) == len(found) + 1
        found |= steps
    assert found == full
    expected, losses = configs.losses(alone), configs.losses(changing)
    assert list(losses) == list(range(1, len(full) + 1)) == list(expected)
    pairs = {step: (losses[step], loss) for step, loss in expected.items()}
    far = {step: pair for step, pair in pairs.items() if not abs(float(pair[0]) - float(pair[1])) <= 1e-6}
    assert not far, far


@pytest.mark.turns(2)
def test_a_mixture_fetches_the_same_samples_of_each_source(tmp_path: Path) -> None:
    """4 → 2 → 1 ranks: each source goes on at its own place, and has its share."""
    notes, texts = write_texts(tmp_path / "notes"), write_texts(tmp_path / "texts")
    (notes / "0.txt").write_text("another beginning. " * 5)
    sources = [{"path": str(texts), "weight": 0.75}, {"path": str(notes), "weight": 0.25}]
    data = {"path": None, "sources": sources}
    steps = {"steps": 24, "epochs": None, "eval_every": 0}
    full = train(tmp_path / "alone", texts, ("ddp", 1, None), data, **steps)
    found: Steps = {}
    for leg in (("fsdp", 4, 7), ("ddp", 2, 15), ("zero1", 3, None)):
        found |= train(tmp_path / "changing", texts, leg, data, **steps)
    assert found == full
    ids = [id_ for one in full.values() for id_ in one]
    border = max(ids) // 2  # about as many samples each
    share = sum(id_ <= border for id_ in ids) / len(ids)
    assert len(ids) == 24 * GLOBAL_BATCH and abs(share - 0.75) < 3 * (0.75 * 0.25 / len(ids)) ** 0.5


@pytest.mark.turns(2)
def test_a_killed_mixture_fetches_the_same_samples_of_each_source(tmp_path: Path) -> None:
    """SIGKILL at a step drawn at random, 4 → 2 → 3 ranks: steps since the checkpoint are fetched again, the same."""
    notes, texts = write_texts(tmp_path / "notes"), write_texts(tmp_path / "texts", 6)
    (notes / "0.txt").write_text("another beginning. " * 5)
    weights = {texts: 0.6, notes: 0.4}
    sources = [{"path": str(path), "weight": weight} for path, weight in weights.items()]
    data: dict[str, Any] = {"path": None, "sources": sources}
    steps = {"steps": 20, "epochs": None, "eval_every": 0}
    full = train(tmp_path / "alone", texts, ("ddp", 1, None), data, **steps)
    rng_state = random.Random(11)
    folder = tmp_path / "changing"
    fetched: list[Steps] = []
    for (strategy, world), (low, high) in ((("fsdp", 4), (5, 8)), (("ddp", 2), (10, 15))):
        kill = Kill(rng_state.randint(low, high), rng_state.randrange(world), tmp_path / f"killed-{world}")
        with pytest.raises(WorldError, match=f"rank {kill.rank}. died without a traceback, exit code -9"):
            train(folder, texts, (strategy, world, None), data, kill=kill, **steps)
        fetched.append(kill.fetched(world))
        assert max(fetched[-1]) == kill.step
    fetched.append(train(folder, texts, ("zero1", 3, None), data, **steps))
    begins = [min(leg) for leg in fetched]
    ends = [max(leg) for leg in fetched[:2]]
    assert begins == [1, *(1 + (end - 1) // 4 * 4 for end in ends)], "each goes on from the newest checkpoint"
    for leg in fetched:
        assert leg == {step: full[step] for step in leg}
    assert {step for leg in fetched for step in leg} == set(full)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param((("fsdp", 2, 4), {}), (("ddp", 1, None), {"global_batch": 8}), id="smaller-batch"),
        pytest.param((("ddp", 1, 4), {}), (("zero1", 2, None), {"global_batch": 20}), id="larger-batch"),
        pytest.param((("ddp", 1, None), {"epochs": 1}), (("fsdp", 2, None), {"epochs": EPOCHS}), id="more-epochs"),
    ],
)
def test_every_sample_once_an_epoch_whatever_was_changed(
    tmp_path: Path, first: tuple[Leg, dict[str, int]], then: tuple[Leg, dict[str, int]]
) -> None:
    texts, seen = write_texts(tmp_path / "texts"), []
    for leg, changes in (first, then):
        steps = train(tmp_path / "run", texts, leg, {}, **changes)
        seen += [id_ for ids in steps.values() for id_ in ids if id_ >= 0]
    assert set(Counter(seen).values()) == {EPOCHS}
    number = len(set(seen))
    assert all(set(seen[epoch * number : (epoch + 1) * number]) == set(seen) for epoch in range(EPOCHS))
    assert all(float(loss) < 6 for loss in configs.losses(tmp_path / "run").values()), "no step without a sample"


def test_stopped_before_its_first_step_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """On three ranks the order of a sum shows; what a run is primed with must not be its first step."""
    texts = write_texts(tmp_path / "texts")
    for folder, legs in (("whole", (None,)), ("stopped", (0, 0, None))):
        for stop_after in legs:
            train(tmp_path / folder, texts, ("ddp", 3, stop_after), {}, epochs=1)
    assert configs.losses(tmp_path / "stopped") == configs.losses(tmp_path / "whole")


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a rank as a step begins; all ranks write what they fetched to ``log`` before it."""

    step: int
    rank: int
    log: Path

    def write(self, number: int, rank: int, ids: list[list[int]]) -> None:
        self.log.mkdir(exist_ok=True)
        with (self.log / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps([number, ids]) + "\n")

    def fetched(self, world: int) -> Steps:
        """The ids of each step that all ranks began, of plans whose ranks all have samples of their own."""
        lines = [(self.log / f"{rank}.jsonl").read_text().splitlines() for rank in range(world)]
        ranks = [dict(json.loads(line) for line in one) for one in lines]
        return joined(ranks)


def train_here(text: str, stop_after: int | None, kill: Kill | None = None) -> dict[int, list[list[int]]]:
    """The loop of `shardwise train` on this rank; the ids that it really fetched, for each micro batch of each step."""
    from shardwise.distributed.process_group import join
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.loop import TrainingRun
    from shardwise.train.session import Session

    job = Job.model_validate_json(text)
    session = Session(ranks=join(job.plan.device), planner=lambda *_: job.plan)
    session.observers.append(observer := _Observer(stop_after, kill))
    run = TrainingRun(job.config, job.plan, open_corpus(job.corpus), session, _Silent())
    fetch = run.samples.batch

    def recorded(ids: Any) -> Any:
        observer.fetched.append(ids.tolist())
        return fetch(ids)

    run.samples.batch = recorded  # type: ignore[method-assign]
    try:
        run.train()
        assert stop_after is None
    except Interrupted:
        assert session.steps_done == stop_after
    session.close()
    return observer.steps


class _Observer:
    """Keeps what was fetched for each step, and asks for the end after one of them, on one rank only."""

    def __init__(self, stop_after: int | None, kill: Kill | None) -> None:
        self.stop_after, self.kill = stop_after, kill
        self.fetched: list[list[int]] = []
        self.steps: dict[int, list[list[int]]] = {}

    def on_prepared(self, session: Any) -> None:
        if self.stop_after == 0:
            session.stop()

    def on_step_start(self, session: Any, step: Any) -> None:
        number = len([micro for micro in step.micros if not micro.padding])
        self.steps[step.number] = self.fetched[-number:]  # before them may be what DDP was primed with
        rng_state = zlib.crc32(bytes(torch.get_rng_state().tolist()))
        groups: dict[int, set[int]] = {}
        for rank, (state,) in enumerate(gather_ints([rng_state], session.ranks)):
            groups.setdefault(rank // session.plan.dims.tp, set()).add(state)
        assert all(len(states) == 1 for states in groups.values()), "tensor-parallel ranks draw other numbers"
        assert len(set.union(*groups.values())) == len(groups), "two groups draw the same numbers"
        if self.kill is not None:
            self.kill.write(step.number, session.ranks.rank, self.steps[step.number])
            gather_ints([0], session.ranks)  # all have written
            if (step.number, session.ranks.rank) == (self.kill.step, self.kill.rank):
                os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, session: Any, step: Any) -> None:
        if step.number == self.stop_after and session.ranks.rank == session.ranks.world_size - 1:
            session.stop()

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class _Silent:
    """A reporter that is not heard."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def train(folder: Path, texts: Path, leg: Leg, data: dict[str, Any], kill: Kill | None = None, **changed: Any) -> Steps:
    """Begin or resume the run in ``folder``; what all the ranks together fetched in each step."""
    strategy, world, stop_after = leg
    folder.mkdir(exist_ok=True)
    factory = changed.pop("factory", "tests.models:byte_decoder")
    changes: dict[str, dict[str, Any]] = {
        "model": {"factory": factory, "kwargs": {"dropout": 0.0}},  # the luck of a rank is its own
        "data": {"path": str(texts), "heldout_fraction": 0.2, **data},
        "train": {"steps": None, "epochs": EPOCHS, "global_batch": GLOBAL_BATCH, "eval_every": 3, "eval_samples": 4},
        "parallel": {"strategy": strategy, "nproc": world},
        "checkpoint": {"every": 4},
    }
    changes["train"] |= {"seed": 7, **changed}
    job = prepare_job(read_config(configs.write_config(folder, **changes)), lambda text: None).job
    everyone = run_world(train_here, world, job.to_json(), stop_after, kill)
    places = [job.plan.dims.place(rank) for rank in range(world)]
    ranks = [steps for steps, place in zip(everyone, places, strict=True) if place.tp == place.cp == place.pp == 0]
    alike = [ranks[place.dp] for place in places]
    assert everyone == alike, "ranks that share a sample have fetched different ones"
    return joined(ranks)


def joined(ranks: list[dict[int, list[list[int]]]]) -> Steps:
    """What all ranks fetched in each step, in the order of the stream."""
    return {
        step: [id_ for micro in zip(*(rank[step] for rank in ranks), strict=True) for ids in micro for id_ in ids]
        for step in ranks[0]
    }
