"""Loaders as people write them: every sample once, the same weights as one process, or one clear sentence."""

from __future__ import annotations

import collections
import dataclasses
import fractions
import io
import itertools
import multiprocessing
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)

from shardwise.distributed.process_group import gather_ints, gather_largest, gather_text, join
from shardwise.errors import DataError, RankError, UserError
from shardwise.report.terminal import print_plan
from shardwise.run.callbacks import RunRecorder
from shardwise.run.job import prepare_job
from shardwise.run.start import start
from shardwise.train.config import read_config
from shardwise.train.data.data_sharding import dealer_of, loads_by_index
from shardwise.train.data.items import from_text, to_text
from shardwise.train.data.windows import windows
from shardwise.train.session import Session
from tests.cli.configs import write_config
from tests.worlds import WorldError, run_world

SAMPLES, BATCH = 24, 2
DATA = TensorDataset(torch.arange(SAMPLES).double()[:, None] / SAMPLES, torch.arange(SAMPLES))


def prepared(strategy: str = "ddp", accum: int = 1) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    session = start(strategy, grad_accum=accum, receipts=False)
    model = net()
    return session, *session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def passes(loader: Any, accum: int = 1, number: int = 1, **options: Any) -> list[int]:
    """The samples that this rank is given; ranks have generators of their own, as they do in life."""
    session, _, _ = prepared(accum=accum)
    torch.manual_seed(100 + session.ranks.rank)
    random.seed(session.ranks.rank)
    np.random.seed(session.ranks.rank)
    seen: list[int] = []
    for _ in range(number):
        for step in session.steps(loader, **options):
            seen += [int(x) for micro in step.micros if not micro.padding for x in torch.as_tensor(micro.labels)]
            session.steps_done = step.number
    session.close()
    return seen


def said(loader: Any, accum: int = 1, **options: Any) -> str:
    with pytest.raises((DataError, ValueError, RuntimeError, OSError)) as caught:
        passes(loader, accum, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


# loaders


class Mixing(DataLoader):
    """Mixup in the loader, with the global generators, and each batch with the one before it."""

    def __iter__(self) -> Iterator[Any]:
        last = None
        for inputs, labels in super().__iter__():
            share = torch.rand(()).double() * random.random() * np.random.random()
            last = inputs if last is None else last[: len(inputs)]
            yield share * inputs + (1 - share) * last, labels
            last = inputs


class Flow(IterableDataset):
    """Draws as it goes, from a buffer."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for index in itertools.chain(range(SAMPLES), [None] * 8):
            if len(buffer) == 8 or index is None:
                yield DATA[buffer.pop(int(torch.randint(len(buffer), ())))]
            if index is not None:
                buffer.append(index)


class Timm(Sampler):
    def __init__(self) -> None:
        self.rank, self.num_replicas = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, SAMPLES, self.num_replicas))

    def __len__(self) -> int:
        return SAMPLES // self.num_replicas


class Detectron(Sampler):
    def __init__(self) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(range(SAMPLES), self._rank, None, self._world_size)


class Grouped(BatchSampler):
    """A batch sampler of one's own around one that deals."""

    def __init__(self, inner: Any) -> None:
        self.base = inner

    def __iter__(self) -> Iterator[list[int]]:
        items = list(self.base)
        return iter([items[n : n + BATCH] for n in range(0, len(items), BATCH)])


class Quiet(Sampler):
    """Deals by rank, and nothing about it says so."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), SAMPLES, dist.get_world_size()))


class Tars(IterableDataset):
    """As webdataset's pipelines are."""

    def __init__(self) -> None:
        def split_by_node(items: Any) -> Any:
            return itertools.islice(items, dist.get_rank(), None, dist.get_world_size())

        self.pipeline = [range(SAMPLES), split_by_node, DATA.__getitem__]

    def __iter__(self) -> Iterator[Any]:
        return map(self.pipeline[2], self.pipeline[1](self.pipeline[0]))


class Knows(Dataset):
    """A map-style dataset that knows its rank, for its log."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return DATA[index]


class Files(Knows):
    """A map-style dataset that cuts itself."""

    def __init__(self) -> None:
        self.files = [f"{n}.txt" for n in range(dist.get_rank(), SAMPLES, dist.get_world_size())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return DATA[int(self.files[index].split(".")[0])]


def rows(number: int = SAMPLES) -> list[dict[str, Any]]:
    return [{"x": [n / SAMPLES], "labels": n} for n in range(number)]


def collate(items: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([one["x"] for one in items]), torch.tensor([one["labels"] for one in items])


def by_hugging_face(kind: str) -> Any:
    from datasets import Dataset as Table
    from datasets.distributed import split_dataset_by_node

    full = Table.from_list(rows())
    part = full if kind == "whole" else full.to_iterable_dataset(num_shards=2) if kind == "stream" else full
    part = part if kind == "whole" else split_dataset_by_node(part, dist.get_rank(), dist.get_world_size())
    return DataLoader(part, batch_size=BATCH, collate_fn=collate)


def by_accelerate(kind: str) -> Any:
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "batches":
        inner = DataLoader(DATA, batch_size=BATCH).batch_sampler
        return DataLoader(DATA, batch_sampler=BatchSamplerShard(inner, world, rank))
    return DataLoader(IterableDatasetShard(Flow(), BATCH, False, world, rank), batch_size=BATCH)


def own_batches() -> list[Any]:
    return [DATA[n : n + BATCH] for n in range(BATCH * dist.get_rank(), SAMPLES, BATCH * dist.get_world_size())]


def everything() -> dict[str, Any]:
    world = join("cpu").world_size
    found: dict[str, Any] = {
        "subclass": passes(Mixing(DATA, BATCH, shuffle=True)),
        "stream that draws": passes(DataLoader(Flow(), BATCH)),
        "generator": passes(batch for batch in DataLoader(DATA, BATCH, shuffle=True)),
        "timm": passes(DataLoader(DATA, BATCH, sampler=Timm())),
        "detectron2": passes(DataLoader(DATA, BATCH, sampler=Detectron())),
        "grouped": passes(DataLoader(DATA, batch_sampler=Grouped(Detectron()))),
        "webdataset": passes(DataLoader(Tars(), BATCH)),
        "rank for the log": passes(DataLoader(Knows(), BATCH, shuffle=True)),
        "whole table": passes(by_hugging_face("whole")),
        "split stream": passes(by_hugging_face("stream")),
        "accelerate batches": passes(by_accelerate("batches")),
        "quiet, said": passes(DataLoader(DATA, BATCH, sampler=Quiet()), sharded=True),
        "own list, said": passes(own_batches(), sharded=True),
        "subset, said": passes(DataLoader(Subset(DATA, list(Quiet())), BATCH), sharded=True),
    }
    refused = {
        "quiet": said(DataLoader(DATA, BATCH, sampler=Quiet())),
        "own list": said(own_batches()),
        "subset": said(DataLoader(Subset(DATA, list(Quiet())), BATCH)),
        "files": said(DataLoader(Files(), BATCH, shuffle=True)),
        "split table": said(by_hugging_face("table")),
        "other ranks": said(DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 4, dist.get_rank()))),
        "own luck": said([(torch.rand(2, 1).double() + dist.get_rank(), torch.zeros(2).long())] * 4),
        "lengths": said([DATA[n : n + BATCH] for n in range(0, SAMPLES - 4 * BATCH * dist.get_rank(), BATCH)]),
    }
    return {"found": found, "refused": refused, "world": world}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(everything, 2)


def test_every_sample_comes_once(ranks: list[dict[str, Any]]) -> None:
    for kind in ranks[0]["found"]:
        taken = sorted(n for rank in ranks for n in rank["found"][kind])
        assert taken == list(range(SAMPLES)), (kind, [rank["found"][kind] for rank in ranks])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("quiet", "the loader's BatchSampler draws different samples on each rank"),
        (
            "own list",
            r"the loader \(list\) gives ranks 0 and 1 different batches: if each rank's loader already yields its own",
        ),
        ("subset", r"the loader's dataset \(Subset, 12 samples\) differs between rank 1 and rank 0"),
        ("files", r"the loader's dataset \(Files, 12 samples\) differs between rank 1"),
        ("split table", r"the loader's dataset \(Dataset, 12 samples\) differs between rank 1"),
        ("other ranks", "the loader's DistributedSampler shards for rank . of 4, but this rank takes part . of 2"),
        ("own luck", r"the loader \(list\) gives ranks 0 and 1 different batches"),
        ("lengths", r"the loader \(list\) has 12 batches on rank 0 and 8 on rank 1"),
    ],
)
def test_what_would_be_wrong_is_refused_on_all_ranks(ranks: list[dict[str, Any]], kind: str, words: str) -> None:
    for rank in ranks:
        assert re.match(f"DataError: {words}", rank["refused"][kind]), rank["refused"][kind]


# the weights of one process


def trained(strategy: str, accum: int) -> float:
    """How far the weights are from those of one process, after two passes with a loader that mixes."""
    session, model, optimizer = prepared(strategy, accum)
    loader = Mixing(DATA, BATCH, shuffle=True)
    for epoch in range(2):
        torch.manual_seed(epoch + 10 * session.ranks.rank)
        random.seed(epoch + 10 * session.ranks.rank)
        np.random.seed(epoch + 10 * session.ranks.rank)
        for step in session.steps(loader):
            for micro in step:
                step.backward((model(micro.inputs)[:, 0] - micro.labels / SAMPLES).square().sum())
            step.update(optimizer)
    alone = net()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for epoch in range(2):
        torch.manual_seed(epoch)
        random.seed(epoch)
        np.random.seed(epoch)
        for window in windows(Mixing(DATA, BATCH, shuffle=True), 2 * accum):
            number = sum(len(labels) for _, labels in window)
            for inputs, labels in window:
                ((alone(inputs)[:, 0] - labels / SAMPLES).square().sum() / number).backward()
            plain.step()
            plain.zero_grad()
    full = [getattr(p, "full_tensor", lambda p=p: p)() for p in session.module.parameters()]
    session.close()
    return max(float((a - b).abs().max()) for a, b in zip(full, alone.parameters(), strict=True))


def all_trained() -> dict[str, float]:
    cases = itertools.product(("ddp", "zero1", "zero2", "fsdp"), (1, 3))
    return {f"{strategy} x{accum}": trained(strategy, accum) for strategy, accum in cases}


def test_a_loader_that_mixes_trains_as_in_one_process() -> None:
    for errors in run_world(all_trained, 2):
        assert max(errors.values()) < 1e-12, errors


# what a sampler yields


class Odd(Sampler):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Told(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: Any) -> Any:
        kind, weight = item
        assert type(item) is tuple and type(weight) is np.float32 and type(kind) is str
        return torch.tensor([float(weight)]), torch.tensor(int(float(weight) * 100))


def told() -> tuple[list[int], str]:
    items = [("a", np.float32(0.25)), ("b", np.float32(0.75)), ("c", np.float32(0.5)), ("d", np.float32(1))]
    return passes(DataLoader(Told(), 1, sampler=Odd(items))), said(
        DataLoader(DATA, 1, sampler=Odd([fractions.Fraction(1, 2)] * 4))
    )


def test_what_a_sampler_yields_arrives_as_it_is() -> None:
    results = run_world(told, 2)
    assert [seen for seen, _ in results] == [[25, 50], [75, 100]]
    assert all("sampler yields a fractions.Fraction, which cannot be sent" in text for _, text in results)


@pytest.mark.parametrize(
    "item",
    [
        *(0, -(2**70), True, None, 0.1, float("inf"), -0.0, "", "\ud800 ü", b"\x00\xff", (), (1, (2.5, [None])), []),
        *([1, 2], [1, True], {"a": 1, 2: (3,)}, {(1, 2): {"tuple": [1]}}, range(1, 9, 3), slice(None, 4, None)),
        *(np.int64(7), np.uint8(255), np.float32(0.75), np.float16("nan"), np.bool_(True), np.str_("ö"), np.arange(6)),
        *(np.zeros((0, 3)), torch.tensor(3), torch.tensor(0.1, dtype=torch.bfloat16), torch.arange(4).reshape(2, 2).T),
        *(np.complex64(1j), torch.empty(0, 2), np.datetime64("2024-01-01"), [[1, 2], (3, 4)]),
    ],
    ids=repr,
)
def test_nothing_is_lost_on_the_way(item: Any) -> None:
    (back,) = from_text(to_text([item]))
    assert type(back) is type(item)
    assert repr(back) == repr(item)
    if isinstance(item, torch.Tensor | np.ndarray | np.generic):
        assert back.dtype == item.dtype
        assert tuple(back.shape) == tuple(item.shape)


@pytest.mark.parametrize(
    "item", [object(), {1, 2}, fractions.Fraction(1), collections.OrderedDict(), np.array([object()]), lambda: 0]
)
def test_what_cannot_be_told_is_refused_by_name(item: Any) -> None:
    with pytest.raises(DataError, match=f"sampler yields a {type(item).__module__}"):
        to_text([(item,)])


def test_a_subclass_without_an_iteration_of_its_own_is_the_plain_loader() -> None:
    class Named(DataLoader):
        """PyTorch Geometric's are like this."""

    assert loads_by_index(Named(DATA)) and loads_by_index(DataLoader(DATA))
    assert not loads_by_index(Mixing(DATA)) and not loads_by_index(DataLoader(Flow()))
    patched = DataLoader(DATA)
    patched._get_iterator = lambda: iter(())  # type: ignore[method-assign]
    assert not loads_by_index(patched)


@dataclasses.dataclass
class Share:
    rank: int = 1
    world_size: int = 4


class HuggingFace(IterableDataset):
    _distributed: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_who_deals_is_read_off_attributes() -> None:
    stream = HuggingFace()
    assert dealer_of(DataLoader(stream)) is None
    stream._distributed = Share()
    found = dealer_of(DataLoader(stream))
    assert found is not None and found.share == (1, 4)
    assert dealer_of(DataLoader(stream), sharded=False) is None
    assert dealer_of([1, 2]) is None and dealer_of(iter(())) is None
    recursive = Mixing(DATA)
    recursive.__dict__["loader"] = recursive
    assert dealer_of(recursive) is None


# failures


class Broken(Dataset):
    """Raises where it is told to, on rank 1 alone; or takes its process with it."""

    def __init__(self, at: int, kind: str = "raise") -> None:
        self.at, self.kind, self.rank, self.loaded = at, kind, dist.get_rank(), 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        if self.rank == 1 and index // 2 >= self.at:
            if self.kind == "die":
                os._exit(3)
            raise ValueError(f"file {self.at} is broken")
        return torch.zeros(1).double(), torch.tensor(index)


class BrokenSampler(Sampler):
    def __iter__(self) -> Iterator[int]:
        yield from range(500)
        raise ValueError("no more")


class BrokenLoader:
    """Not at all, or at once, or later."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            if dist.get_rank() == 1 and number == self.at:
                raise ValueError("stream is gone")
            yield DATA[:BATCH]


def allow_workers() -> None:
    """A rank of a test is a daemon, which may have no children of its own."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def failures() -> dict[str, str]:
    allow_workers()
    workers: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": True}
    workers["multiprocessing_context"] = "fork"  # a fork server would load everything first
    found = {f"at {at} x{accum}": said(DataLoader(Broken(at), 2), accum) for at, accum in ((0, 1), (1, 4), (999, 1))}
    # its chunk of 64 batches ends within the window in which it fails: rank 0 goes on to draw the next one
    found |= {f"chunk {at}": said(DataLoader(Broken(at), 2), 5) for at in (121, 123, 125, 127, 129)}
    found["worker"] = said(DataLoader(Broken(131), 2, **workers), 3)
    found["stream at once"], found["stream"] = said(BrokenLoader(0)), said(BrokenLoader(7), 2)
    found["sampler"] = said(DataLoader(Broken(10**6), 2, sampler=BrokenSampler()))
    return found


def test_a_loader_that_fails_on_one_rank_stops_all_with_its_name() -> None:
    first, second = run_world(failures, 2)
    for kind, text in first.items():
        if kind == "sampler":
            assert text == "ValueError: no more"
            assert second[kind].startswith("DataError: the loader (DataLoader) failed on rank 0") or (
                "sampler failed on rank 0: ValueError: no more" in second[kind]
            )
            continue
        assert text.startswith("DataError: the loader (") and "failed on rank 1: " in text, (kind, text)
        assert second[kind], kind  # the rank itself raises what its loader raised: of a dead worker one of several
    assert "ValueError: file 999 is broken" in first["at 999 x1"]


def dies() -> None:
    """Ends with what was raised, as a script does: a rank that stayed would keep the other one waiting."""
    allow_workers()
    raise RuntimeError(said(DataLoader(Broken(21, "die"), 2, num_workers=1, multiprocessing_context="fork"), 1))


def test_a_worker_that_dies_ends_all_ranks() -> None:
    """PyTorch raises in a signal handler, also in the middle of a message between ranks: then neither knows the other's
    state, and all that holds is that both end, rank 0 with a sentence.
    """
    with pytest.raises(WorldError) as caught:
        run_world(dies, 2)
    text = str(caught.value)
    assert "still in" not in text, text
    first = text.partition("[rank 0]")[2].partition("[rank 1]")[0]
    sentences = ("DataError: the loader (", "TrainingError: ranks wait for each other", "RankError: ")
    assert any(sentence in first for sentence in sentences), text


def exchanges_with_one_that_has_ended() -> None:
    ranks = join("cpu")
    if ranks.rank == 1:
        os._exit(3)
    said = []
    for exchange in (
        lambda: gather_largest([1], ranks),
        lambda: gather_ints([1] * 200, ranks, "x"),
        lambda: gather_text("x", ranks),
    ):
        with pytest.raises(RankError) as caught:
            exchange()
        said.append(str(caught.value))
    raise RuntimeError(f"{len(said)} said so: {said}")


def test_an_exchange_with_a_rank_that_has_ended_says_so() -> None:
    with pytest.raises(WorldError, match="3 said so"):
        run_world(exchanges_with_one_that_has_ended, 2)


# shapes that batches come in


def shapes() -> dict[str, Any]:
    allow_workers()
    ragged = [([[1.0] * (n % 3 + 1) for n in range(2)], torch.tensor([n, n + 1])) for n in range(0, SAMPLES, 2)]
    nested = [{"a": {"b": [torch.zeros(2), [torch.ones(1)]]}, "labels": torch.tensor([n])} for n in range(SAMPLES)]
    endless = ((torch.zeros(1), torch.tensor([n])) for n in itertools.count())
    nothing: list[Any] = [] if dist.get_rank() else [DATA[:BATCH]] * 4
    return {
        "ragged": passes(ragged),
        "nested": passes(nested),
        "endless": passes(endless, limit=SAMPLES // 2),
        "persistent": passes(
            DataLoader(DATA, BATCH, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
        ),
        "nothing": said(nothing),
        "nothing, said": said(nothing, sharded=True),
    }


def test_batches_of_any_shape() -> None:
    found = run_world(shapes, 2)
    for kind in ("ragged", "nested", "endless", "persistent"):
        assert sorted(n for rank in found for n in rank[kind]) == list(range(SAMPLES)), kind
    for rank in found:
        assert "gives ranks 0 and 1 different batches" in rank["nothing"]
        assert "rank 1 got no batch at all" in rank["nothing, said"]


# to be stopped and go on


def loaders() -> dict[str, Callable[[], Any]]:
    return {
        "mixing": lambda: Mixing(DATA, BATCH, shuffle=True),
        "flow": lambda: DataLoader(Flow(), BATCH),
        "timm": lambda: DataLoader(DATA, BATCH, sampler=Timm()),
        "grouped": lambda: DataLoader(DATA, batch_sampler=Grouped(Detectron())),
        "own list": own_batches,
        "shuffled by python": lambda: DataLoader(DATA, BATCH, sampler=PythonShuffle()),
    }


class PythonShuffle(Sampler):
    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)


def part(folder: str, kind: str, stop: int | None) -> tuple[list[Any], list[torch.Tensor]]:
    """Two passes, with dropout between the loader's draws."""
    session = start("ddp", receipts=False)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    torch.manual_seed(11 + session.ranks.rank)
    random.seed(5 + session.ranks.rank)
    np.random.seed(5 + session.ranks.rank)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.load(folder)
    loader, seen = loaders()[kind](), []
    for _ in range(2):
        for step in session.steps(loader, sharded=True if kind == "own list" else None):
            for micro in step:
                seen.append((step.number, micro.inputs.tolist(), micro.labels.tolist()))
                step.backward((model(micro.inputs)[:, 0] - micro.labels / SAMPLES).square().sum())
            step.update(optimizer)
            if step.number == stop:
                session.save(folder)
                session.close()
                return seen, []
    weights = [p.detach().clone() for p in model.parameters()]
    session.close()
    return seen, weights


def resumed(folder: str) -> dict[str, bool]:
    found = {}
    for kind in loaders():
        full, weights = part(f"{folder}/{kind}/none", kind, None)
        for stop in (2, 8):
            first, _ = part(f"{folder}/{kind}/{stop}", kind, stop)
            rest, ends = part(f"{folder}/{kind}/{stop}", kind, None)
            same = all(torch.equal(a, b) for a, b in zip(weights, ends, strict=True))
            found[f"{kind} {stop}"] = same and first + rest == full
    return found


def test_each_goes_on_with_the_samples_of_the_uninterrupted_run(tmp_path: Path) -> None:
    for found in run_world(resumed, 2, str(tmp_path)):
        assert all(found.values()), found


def two_runs(folder: str) -> str:
    """A second run saves into the folder of one that still runs."""
    first, model, optimizer = prepared()
    for step in first.steps(DataLoader(DATA, BATCH), limit=1):
        for micro in step:
            step.backward(model(micro.inputs).sum())
        step.update(optimizer)
    first.save(folder)
    second, model, optimizer = prepared()
    for step in second.steps(DataLoader(DATA, BATCH), limit=1):
        for micro in step:
            step.backward(model(micro.inputs).sum())
        step.update(optimizer)
    with pytest.raises(UserError) as caught:
        second.save(folder)
    first.close()
    return str(caught.value)


def test_two_runs_with_one_folder(tmp_path: Path) -> None:
    found = run_world(two_runs, 2, str(tmp_path))
    assert found[0] == found[1]
    assert "another" in found[0], found


# packed documents


@pytest.mark.parametrize("masked", [False, True])
def test_packing_is_said_in_the_plan_and_in_the_receipt(tmp_path: Path, masked: bool) -> None:
    config = read_config(write_config(tmp_path, data={"mask_borders": masked}), ["parallel.nproc=1"])
    prepared = prepare_job(config, lambda text: None)
    console = Console(file=io.StringIO(), width=300)
    print_plan(prepared.choice, prepared.spec, prepared.cluster, prepared.corpus, console, config)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    loss = "no loss" if masked else "loss"
    assert f"joined: documents of one sample attend to each other, and it has {loss} on their first tokens" in text
    session = start("ddp", receipts=False)
    watch = RunRecorder(prepared.job, session, print, console)
    (line,) = watch.effects.notes
    assert (line.ok, line.planned) == (None, "packed")
    assert line.found == f"attend to each other, first tokens {'without' if masked else 'with'} loss"
    session.close()
