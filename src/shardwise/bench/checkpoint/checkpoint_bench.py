"""Benchmark checkpoint saving beside a running training: several contenders, in turns.

One model trains under one strategy, and every contender saves its live state. A turn of a contender is one save and the
steps after it; in every round each has one turn, in random order, and one more turn has no save at all.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.nn import functional

from shardwise.bench.checkpoint.contenders import (
    OURS,
    OURS_ASYNC,
    RAW,
    RAW_DIRECT,
    Contender,
    Ours,
    Raw,
    live_digests,
)
from shardwise.bench.quartiles import Quartiles
from shardwise.bench.step.step_bench import Batch
from shardwise.checkpoint.storage.direct_io import is_on_disk
from shardwise.checkpoint.storage.local_storage import remove_folder
from shardwise.distributed.process_group import Ranks
from shardwise.errors import CheckpointError
from shardwise.import_object import optional_object
from shardwise.plan.plan import Plan
from shardwise.train.config import OptimizerTable
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import build_optimizer
from shardwise.train.session import Session

PEERS = "benchmarks.peers.save_peers:peers"  # other tools' ways, in the benchmarks of this repository
OWN = (RAW, RAW_DIRECT, OURS, OURS_ASYNC)
NO_SAVE = "no save"
STEPS = 10  # after each save
VOCABULARY, SEQ_LEN, LAYERS = 256, 16, 12
STATE_COPIES = 3  # of a parameter under AdamW: itself and two averages
_PER_LAYER = 12  # weights of a layer, in squares of its width
_MOST_SAMPLES = 1 << 12
_WARM_UP = 3


class Turn(BaseModel):
    """Save and the steps after it; seconds of the slowest rank.

    ``seconds`` is until the save was durable, ``stall_s`` how long it blocked the loop, ``loop_s`` from the call of the
    save to the end of the last of ``steps_s``, and ``late_s`` how long the save continued after that.
    """

    model_config = ConfigDict(frozen=True)

    contender: str
    round: int
    num_bytes: int
    seconds: float
    stall_s: float
    loop_s: float
    late_s: float
    steps_s: tuple[float, ...]
    load: float


class ContenderRow(BaseModel):
    """Measurements of one contender; ratios are of the two turns of a round.

    ``of_raw`` is the raw write's time over the contender's, ``of_direct`` that of the write past the page cache,
    ``over_ours`` its time over that of our save of the same kind, ``stall_of_sync`` its stall over that of our save in
    the foreground. For ``dip`` and ``lost_s`` see `SaveTurns`.
    """

    model_config = ConfigDict(frozen=True)

    contender: str
    num_bytes: int
    seconds: Quartiles
    bytes_per_s: Quartiles
    of_raw: Quartiles
    of_direct: Quartiles | None
    over_ours: Quartiles | None
    stall_s: Quartiles
    stall_of_sync: Quartiles
    dip: Quartiles
    lost_s: Quartiles


def _seconds(turn: Turn) -> float:
    return turn.seconds


class SaveTurns(BaseModel):
    """Turns of all contenders under one strategy, and the model that was trained meanwhile."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    state_bytes: int
    samples_of_a_step: int | None
    checked: tuple[str, ...]
    turns: tuple[Turn, ...]

    @property
    def contenders(self) -> list[str]:
        """Names of the contenders, in order of their creation."""
        return list(self.checked)

    def of(self, contender: str) -> list[Turn]:
        """Turns of one contender, by round."""
        return sorted((turn for turn in self.turns if turn.contender == contender), key=lambda turn: turn.round)

    def paired(self, one: str, other: str, value: Callable[[Turn], float]) -> list[float]:
        """Ratio of ``value`` of ``one`` to that of ``other``, by round."""
        pairs = zip(self.of(one), self.of(other), strict=True)
        return [value(a) / value(b) if value(b) else math.nan for a, b in pairs]

    def dips(self, contender: str) -> list[float]:
        """Ratio of the median step after a save to that of the turn without one; 1 is no dip."""
        return self.paired(contender, NO_SAVE, lambda turn: statistics.median(turn.steps_s))

    def lost(self, contender: str) -> list[float]:
        """Additional seconds of a save and the steps after it, over as many steps without a save."""
        return [a.loop_s - b.loop_s for a, b in zip(self.of(contender), self.of(NO_SAVE), strict=True)]

    def summary(self) -> list[ContenderRow]:
        """Build one row for each contender."""
        return [self._row(contender) for contender in self.contenders]

    def _row(self, name: str) -> ContenderRow:
        turns = self.of(name)
        rival = OURS_ASYNC if name.endswith("async") else OURS
        return ContenderRow(
            contender=name,
            num_bytes=turns[-1].num_bytes,
            seconds=Quartiles.of([turn.seconds for turn in turns]),
            bytes_per_s=Quartiles.of([turn.num_bytes / turn.seconds for turn in turns]),
            of_raw=Quartiles.of(self.paired(RAW, name, _seconds)),
            of_direct=Quartiles.of(self.paired(RAW_DIRECT, name, _seconds)) if RAW_DIRECT in self.checked else None,
            over_ours=Quartiles.of(self.paired(name, rival, _seconds)) if name not in OWN else None,
            stall_s=Quartiles.of([turn.stall_s for turn in turns]),
            stall_of_sync=Quartiles.of([a.stall_s / b.stall_s for a, b in zip(turns, self.of(OURS), strict=True)]),
            dip=Quartiles.of(self.dips(name)),
            lost_s=Quartiles.of(self.lost(name)),
        )


class Decoder(nn.Module):
    """Small decoder of a requested size; synthetic, as only its bytes and its time matter."""

    def __init__(self, width: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [samples, tokens, vocabulary]."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return hidden + self.down(functional.gelu(self.up(self.second(hidden))))


def decoder_of(state_bytes: int) -> Callable[[], nn.Module]:
    """Build a factory of `Decoder`: fp32 weights and AdamW state take about ``state_bytes``."""
    weights = state_bytes / (4 * STATE_COPIES)
    width = max(16, round(math.sqrt(weights / (_PER_LAYER * LAYERS)) / 16) * 16)
    layers = max(1, round((weights - 2 * VOCABULARY * width) / (_PER_LAYER * width * width)))
    return lambda: Decoder(width, layers)


class OngoingTraining:
    """Running training: one step at a time, with a callback before the weights change."""

    def __init__(
        self, factory: Callable[[], nn.Module], table: OptimizerTable, plan: Plan, ranks: Ranks, seed: int
    ) -> None:
        self.ranks = ranks
        self.plan = plan
        self._table = table
        self._session = Session(ranks=ranks, planner=lambda *_: plan)
        torch.manual_seed(seed)
        made = factory()
        self.model, self.optimizer = self._session.prepare(made, build_optimizer(made.parameters(), table, made))
        self._waiting: list[list[Batch]] = []
        self._steps = self._session.run_windows(self._feed())

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Run one step on this rank's micro batch.

        Returns its seconds without those of ``before_update``, and the latter.
        """
        begin = time.perf_counter()
        self._waiting.append([batch])
        current = next(self._steps)
        for micro in current:
            current.backward(token_loss_sum(self.model(micro.inputs), micro.labels), count=micro.num_tokens)
        asked = time.perf_counter()
        before_update()
        waited = time.perf_counter() - asked
        current.update(self.optimizer, clip_norm=self._table.clip_norm)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin - waited, waited

    def _feed(self) -> Iterator[list[Any]]:
        while True:
            yield self._waiting.pop()


def random_batches(samples: int, ranks: Ranks) -> Iterator[Batch]:
    """Yield random tokens, [samples, SEQ_LEN], for the `Decoder`."""
    generator = torch.Generator().manual_seed(ranks.rank)
    while True:
        tokens = torch.randint(VOCABULARY, (samples, SEQ_LEN + 1), generator=generator).to(ranks.device)
        yield tokens[:, :-1], tokens[:, 1:]


def samples_for_step(training: OngoingTraining, step_s: float) -> int:
    """Number of samples of a micro batch so that a step takes from ``step_s`` to its double."""
    samples = 1
    while True:
        batches = random_batches(samples, training.ranks)
        times = [training.step(next(batches))[0] for _ in range(_WARM_UP)]
        if _slowest([min(times)])[0] >= step_s or samples >= _MOST_SAMPLES:
            return samples
        samples *= 2


def bench_checkpoints(
    training: OngoingTraining,
    batches: Iterator[Batch],
    folder: Path,
    *,
    rounds: int,
    seed: int,
    samples_of_a_step: int | None = None,
    tick: Callable[[int], None] = lambda done: None,
) -> SaveTurns:
    """Let every contender save ``rounds`` times beside the training; collective.

    Before that each contender saves once, and its files are read back and compared bit for bit. ``folder``, which all
    ranks see, is empty afterwards. ``tick`` is called with the number of finished rounds.

    Raises:
        CheckpointError: a contender's files differ from the state.
    """
    training.step(next(batches))  # the optimizer's state is created in its first step
    contenders = list(_contenders(training, batches, folder))
    try:
        order = random.Random(seed)
        turns: list[Turn] = []
        for number in range(rounds):
            places: list[Contender | None] = [*contenders, None]
            order.shuffle(places)
            for contender in places:
                turns.append(_turn(training, batches, contender, number))
            tick(number + 1)
    finally:
        for contender in contenders:
            contender.close()
    return SaveTurns(
        strategy=training.plan.strategy,
        state_bytes=_total(contenders[0].share_bytes if isinstance(contenders[0], Ours) else 0),
        samples_of_a_step=samples_of_a_step,
        checked=tuple(contender.name for contender in contenders),
        turns=tuple(turns),
    )


def _contenders(training: OngoingTraining, batches: Iterator[Batch], folder: Path) -> Iterator[Contender]:
    """Yield each contender, after its files have been read back correctly."""
    state = (training.model, training.optimizer)

    def room(name: str) -> Path:
        path = folder / name
        path.mkdir(exist_ok=True)
        return path

    ours = Ours(room("ours"), *state, training.plan, background=False)
    makers: list[Callable[[], Contender]] = [
        lambda: ours,
        lambda: Ours(room("ours-async"), *state, training.plan, background=True),
        lambda: Raw(room("raw"), ours.share_bytes, direct=False),
    ]
    if hasattr(os, "O_DIRECT") and is_on_disk(folder):
        makers.append(lambda: Raw(room("raw-direct"), ours.share_bytes, direct=True))
    if (peers := optional_object(PEERS)) is not None:
        makers += peers(room, *state, training.plan)
    for make in makers:
        contender = make()
        _check(training, batches, contender)
        yield contender


def _check(training: OngoingTraining, batches: Iterator[Batch], contender: Contender) -> None:
    """Save, train meanwhile, read back, and compare with the state at the call of `save`."""
    expected = contender.written() if isinstance(contender, Raw) else live_digests(training.model, training.optimizer)
    contender.save(0)
    training.step(next(batches), contender.before_update)
    contender.finish()
    if live_digests(training.model, training.optimizer) == expected:
        raise CheckpointError("a step has changed nothing of the state; so nothing can be said of a checkpoint")
    dist.barrier()
    found = contender.restored()
    wrong = sorted(name for name in expected if found.get(name) != expected[name])  # a peer names tied tensors twice
    if wrong:
        raise CheckpointError(f"{contender.name} did not save {', '.join(wrong[:3])} as it was")
    _clear(contender.folder)


def _turn(training: OngoingTraining, batches: Iterator[Batch], contender: Contender | None, number: int) -> Turn:
    """Run one save and the steps after it, starting with an idle disk."""
    training.step(next(batches))
    os.sync()
    dist.barrier()
    load = os.getloadavg()[0]
    steps, stall = [], 0.0
    begin = time.perf_counter()
    if contender is not None:
        contender.save(number + 1)
        stall = time.perf_counter() - begin
    for _ in range(STEPS):
        dist.barrier()  # so that no rank is charged for another's wait
        took, waited = training.step(next(batches), contender.before_update if contender else lambda: None)
        steps.append(took)
        stall += waited
    loop = time.perf_counter() - begin
    if contender is not None:
        contender.finish()
    late = time.perf_counter() - begin - loop
    dist.barrier()
    num_bytes = _bytes_in(contender.folder) if contender else 0
    seconds, stall, loop, late, *slowest = _slowest([contender.seconds if contender else 0, stall, loop, late, *steps])
    if contender is not None:
        _clear(contender.folder)
    return Turn(
        contender=contender.name if contender else NO_SAVE,
        round=number,
        num_bytes=num_bytes,
        seconds=seconds,
        stall_s=stall,
        loop_s=loop,
        late_s=late,
        steps_s=tuple(slowest),
        load=load,
    )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _clear(folder: Path) -> None:
    """Remove the saved files, except a run's lock."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            if path.is_dir():
                remove_folder(path)
            elif not path.name.startswith(".lock"):
                path.unlink()
    dist.barrier()


def _slowest(values: Sequence[float]) -> list[float]:
    """Maximum of each value over the ranks."""
    wire = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(wire, op=dist.ReduceOp.MAX)
    return list(wire.tolist())


def _total(value: int) -> int:
    wire = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(wire)
    return int(wire)
