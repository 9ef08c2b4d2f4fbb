"""The run folder of observed loops on two ranks: each planted wait is in its part, and what is unknown says why."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import shardwise
from shardwise.errors import UserError
from shardwise.observation.step_clock import StepClock
from shardwise.report.html.observed_folder import ObservedLoop
from tests.commands import shardwise as command
from tests.models import VOCAB, decoder
from tests.world import test_observe as loops
from tests.world import test_observe_tools as tools
from tests.worlds import run_each

PLANTED = 0.1  # seconds


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take long."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(PLANTED / 2)
        ids = torch.randint(VOCAB, (8,), generator=torch.Generator().manual_seed(index + 64 * dist.get_rank()))
        return ids[:-1], ids[1:]


class Waits(nn.Module):
    """A decoder that takes long; rank 1's last gradient comes when rank 0 has had all of its own for a while."""

    def __init__(self, flags: Path) -> None:
        super().__init__()
        self.inner, self.flags, self.calls = decoder().float(), flags, 0
        self.inner.embed.weight.register_hook(self.wait)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        time.sleep(PLANTED)
        outputs: torch.Tensor = self.inner(ids)
        outputs.register_hook(lambda _: time.sleep(PLANTED))
        return outputs

    def wait(self, _: torch.Tensor) -> None:
        flag = self.flags / f"ready-{self.calls}"
        if dist.get_rank() == 0:
            torch.autograd.Variable._execution_engine.queue_callback(flag.touch)
            return
        while not flag.exists():
            time.sleep(0.005)
        time.sleep(PLANTED)


class SlowAdamW(torch.optim.AdamW):
    """An optimizer that takes long."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(PLANTED)
        return super()._init_group(*args, **kwargs)


def planted(folder: Path) -> Any:
    model = DDP(Waits(folder.parent))
    data = DataLoader(Slow(), batch_size=2)
    entered, number = model._pre_forward, itertools.count()

    def enter(*args: Any, **kwargs: Any) -> Any:
        (folder.parent / f"entered-{dist.get_rank()}-{next(number)}").touch()
        return entered(*args, **kwargs)

    model._pre_forward = enter  # type: ignore[method-assign]

    @contextlib.contextmanager
    def around(last: bool) -> Iterator[None]:
        """Rank 1 comes to the first forward of step 2, where DDP orders its buckets, when rank 0 has been in it."""
        if (model.module.calls, dist.get_rank()) == (2, 1):
            while not (folder.parent / "entered-0-2").exists():
                time.sleep(0.005)
            time.sleep(3 * PLANTED)
        with contextlib.nullcontext() if last else model.no_sync():
            yield

    return loops.train(
        model,
        SlowAdamW(model.parameters()),
        "ddp",
        data=data,
        accum=2,
        around=around,
        before_step=lambda: time.sleep(PLANTED),
    )


class Recomputing(nn.Module):
    """A decoder whose slow head is computed again in a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder().float()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        def head(outputs: torch.Tensor) -> torch.Tensor:
            time.sleep(PLANTED)
            outputs = outputs * 2
            outputs.register_hook(lambda _: time.sleep(PLANTED)) if outputs.requires_grad else None
            return outputs

        found: torch.Tensor = checkpoint(head, self.inner(ids), use_reentrant=True)
        return found


def recomputed(_: Path) -> Any:
    model = Recomputing()
    return loops.train(model, loops.adamw(model))


def in_the_way(folder: Path) -> Any:
    """A file where the folder is to be made: there is a receipt, the log says why there is no report."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    model = DDP(loops.plain())

    def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if dist.get_rank() == 0:
            folder.touch()
        yield from loops.batches(3)

    receipt = loops.train(model, loops.adamw(model), data=data())
    assert receipt.ok
    return said


def bits(kind: str, _: Path) -> bool:
    """The same gradients, weights and random numbers as without an observer."""
    alone, timed = loops.trained(kind, observed=False), loops.trained(kind, observed=True)
    return len(alone) == len(timed) > 20 and all(map(torch.equal, alone, timed))


class Quick(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        ids = torch.randint(VOCAB, (8,), generator=torch.Generator().manual_seed(index + 64 * dist.get_rank()))
        return ids[:-1], ids[1:]


def slow_loader(_: Path) -> Any:
    """Each rank waits for its samples most of the time, and FSDP2 hides where ranks wait for each other."""
    model = loops.sharded(loops.plain())
    return loops.train(model, loops.adamw(model), data=DataLoader(Quick(0.03), batch_size=2), steps=8)


def late_rank(_: Path) -> Any:
    """One rank does something else in each step, and the other waits for it."""
    model = DDP(loops.plain())
    data = DataLoader(Quick(0.0), batch_size=2)
    late = lambda: time.sleep(0.15 * dist.get_rank())  # noqa: E731
    return loops.train(model, loops.adamw(model), data=data, steps=8, before_step=late)


def reduces_each_time(_: Path) -> Any:
    """Two micro batches, and DDP reduces both."""
    return loops.of_ddp(accum=2, steps=8)


LOOPS: dict[str, Callable[[Path], Any]] = {
    "planted": planted,
    "no-sync": lambda _: loops.with_no_sync(),
    "fsdp2": lambda _: loops.of_fsdp2(accum=2),
    "fsdp1": lambda _: loops.of_fsdp1(),
    "zero1": lambda _: loops.of_zero1(),
    "closures": lambda _: loops.with_closures(),
    "fp16": lambda _: loops.scaled_fp16(),
    "compiled": lambda _: loops.compiled(outside=False),
    "recompute": recomputed,
    "slow-loader": slow_loader,
    "late-rank": late_rank,
    "each-time": reduces_each_time,
}
LONG = {"slow-loader", "late-rank", "each-time"}
TOOLS: dict[str, tuple[str, str, Callable[[], Any]]] = {  # module and name of what is given the folder
    "trainer": ("transformers", "ReceiptCallback", lambda: tools.of_trainer({"gradient_accumulation_steps": 2})),
    "accelerate": ("accelerate", "observe", lambda: tools.of_accelerate({})),
    "fabric": ("fabric", "observe", lambda: tools.of_fabric("ddp")),
    "lightning": ("lightning", "LightningReceiptCallback", lambda: tools.of_lightning("ddp")),
}
UNSEEN = {"fsdp1", "fsdp2", "deepspeed", "recompute", "slow-loader"}  # waits for other ranks
DEEPSPEED = ["deepspeed"] * (importlib.util.find_spec("deepspeed") is not None)


def run_observed(name: str, root: str) -> Any:
    """Run a loop of this file or its neighbours with a run folder."""
    folder = Path(root) / name
    if name in TOOLS:
        module, taken, run = TOOLS[name]
        place = importlib.import_module(f"shardwise.integrations.{module}")
        with mock.patch.object(place, taken, functools.partial(getattr(place, taken), output=folder)):
            return run()
    into = functools.partial(shardwise.observe, output=folder)
    defaults = loops.train.__kwdefaults__
    with mock.patch.object(shardwise, "observe", into), mock.patch.dict(defaults, observe=into):
        if name == "deepspeed":
            return tools.of_deepspeed(2, 1, "deepspeed-zero2")
        if name.startswith("bits-"):
            return bits(name.removeprefix("bits-"), folder)
        return in_the_way(folder) if name == "in-the-way" else LOOPS[name](folder)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    root = tmp_path_factory.mktemp("observed")
    names = [*LOOPS, "in-the-way", *(f"bits-{kind}" for kind in loops.BITS), *TOOLS, *DEEPSPEED]
    found = run_each(run_observed, 2, [(name, str(root)) for name in names], timeout_s=170)
    return root, dict(zip(names, found, strict=True))


def read(folder: Path) -> ObservedLoop:
    return ObservedLoop.model_validate_json((folder / "observed.json").read_text())


def test_each_planted_wait_is_in_its_part(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    """Sleeps have a least length; nothing else about times is certain."""
    found = read(ran[0] / "planted")
    first, second = found.timing.ranks
    for row in (first, second):
        assert row["data"] >= 2 * PLANTED
        assert row["forward"] >= 2 * PLANTED
        assert row["optimizer"] >= PLANTED
        assert row["other"] >= PLANTED
    assert first["backward"] >= 2 * PLANTED
    assert second["backward"] >= 3 * PLANTED
    assert first["exposed_dp"] + first["slowest_rank"] >= 4 * PLANTED
    reduced = next(one for one in found.collectives if (one.rank, one.name) == (0, "all_reduce"))
    assert reduced.seconds is not None and reduced.seconds >= PLANTED
    assert found.timing.tokens_per_s is not None
    assert found.timing.tokens_per_s * found.timing.step_s == pytest.approx(2 * 2 * 2 * 7)
    assert found.samples_per_s == pytest.approx(found.timing.tokens_per_s / 7)
    recompute = read(ran[0] / "recompute").timing.ranks[0]
    assert recompute["forward"] >= PLANTED
    assert recompute["backward"] >= 2 * PLANTED


def test_parts_add_up_and_what_is_unknown_says_why(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    root, _ = ran
    loaders = {"planted", "fp16", "slow-loader", "late-rank", *TOOLS} - {"accelerate", "fabric"}
    for name in (*LOOPS, *TOOLS, *DEEPSPEED):
        found = read(root / name)
        timing = found.timing
        sums = [sum(row.values()) for row in timing.ranks]
        assert timing.step_s == pytest.approx(sum(sums) / 2), name
        assert min(value for row in timing.ranks for value in row.values()) >= 0, name
        for part in ("forward", "backward", "optimizer", "other"):
            spread = timing.parts[part]
            assert spread is not None and spread.low_s > 0, f"{name}: {part}"
        absent = {part for part, spread in timing.parts.items() if spread is None}
        assert timing.unmeasured.keys() <= absent, name
        assert {"transfer", "recompute", "clip"} <= timing.unmeasured.keys(), name
        assert ("data" in absent) == ("data" in timing.unmeasured), name
        assert name in loaders or "no DataLoader" in timing.unmeasured["data"], name
        assert ("exposed_dp" in absent) == ("exposed_dp" in timing.unmeasured), name
        assert ("exposed_dp" in absent) == (name in UNSEEN), name
        assert all((one.seconds is None) == bool(one.unknown) for one in found.collectives), name
        assert timing.tokens_per_s is not None, name
        assert (found.findings is None) == ("findings" in found.unknown) == (name not in LONG), name
    assert "skipped" in read(root / "fp16").timing.unmeasured["data"]
    assert {name for name in TOOLS if read(root / name).timing.parts["data"] is not None} == {"trainer", "lightning"}


def test_the_diagnosis_is_that_of_own_runs(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    """Each planted cause is found; other work on the machine may add some."""
    loader, late, each = (read(ran[0] / name) for name in ("slow-loader", "late-rank", "each-time"))
    for found in (loader, late, each):
        assert (found.timing.steps, found.timing.warm_up) == (5, 2)
        assert found.timing.cpu_wait_s is not None
        assert "slow-link" in found.not_judged
    finding = next(one for one in loader.findings or () if one.kind == "data-loader")
    assert finding.level == "alarm" and finding.seconds is not None and finding.seconds >= 0.06
    assert "no worker processes of its loader" in finding.evidence
    assert "only DDP waits" in loader.not_judged["straggler"]
    assert not [one for one in loader.findings or () if one.kind in ("healthy", "straggler", "communication")]
    finding = next(one for one in late.findings or () if one.kind == "straggler")
    assert finding.rank == 1 and "in the loop's own code" in finding.text
    assert late.timing.late_rank == 1
    assert each.timing.early_reduces == 1
    folder = ran[0] / "late-rank"
    command("report", str(folder))
    record = json.loads((folder / "report.json").read_text())
    assert "straggler" in [one["kind"] for one in record["findings"]]
    assert record["figures"]["steps"] == 7
    page = (folder / "report.html").read_text()
    assert "Rank 1 is slower than the others" in page and "diagnosis of slow link: what the link should" in page


def test_bits_stay_and_a_folder_that_cannot_be_made_ends_nothing(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    root, found = ran
    assert [found[f"bits-{kind}"] for kind in loops.BITS] == [[True, True]] * len(loops.BITS)
    first, second = found["in-the-way"]
    assert first == [
        f"observe: no report: '{root / 'in-the-way'}' cannot be written: File exists; choose another output"
    ]
    assert not second


def test_report(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    folder = ran[0] / "planted"
    command("report", str(folder))
    record = json.loads((folder / "report.json").read_text())
    assert record["timing"] == json.loads((folder / "observed.json").read_text())["timing"]
    assert (record["state"], record["findings"]) == ("unknown", None)
    assert record["figures"]["peak_bytes"] is None and record["plan"] is None
    page = (folder / "report.html").read_text()
    for text in (
        "No verdict: 1 step is too few to judge",
        "memory: an observation measures none",
        "all_reduce in backward, rank 0",
        "passed through Python",
        "recompute (it is in the backward)",
        "samples across ranks",
    ):
        assert text in page, text


def test_folders_that_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, file = tmp_path / "run", tmp_path / "file"
    run.mkdir()
    (run / "job.json").touch()
    file.touch()
    for output, why in ((run, "has a run of shardwise train"), (file, "is not a folder"), ("", "give the path")):
        with pytest.raises(UserError, match=why):
            shardwise.observe(model, optimizer, output=output)
    assert loops.hooks_of(model, optimizer) == 0
    (run / "job.json").unlink()
    (run / "observed.json").write_text('{"schema": 1}')
    refused = command("report", str(run), exit_code=2)
    assert "is not what shardwise.observe writes (receipt: Field required)" in " ".join(refused.stderr.split())


class Masked(nn.Module):
    """A model that is called as Hugging Face's are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(input_ids) * attention_mask[..., None]
        return found


def test_tokens_are_those_that_the_mask_leaves(tmp_path: Path) -> None:
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shardwise.observe(model, optimizer, output=tmp_path / "masked", on_receipt=lambda _: None):
        for step in range(2):
            for micro in range(2):
                ids = torch.arange(8).roll(2 * step + micro).reshape(2, 4)
                model(input_ids=ids, attention_mask=(ids < 5).long()).sum().backward()
            optimizer.step()
    found = read(tmp_path / "masked")
    assert found.timing.tokens_per_s == pytest.approx(2 * 5 / found.timing.step_s)
    assert found.samples_per_s == pytest.approx(2 * 2 / found.timing.step_s)


def test_one_process_and_a_device_whose_clock_is_not_the_host(tmp_path: Path) -> None:
    """A model that is not on a CPU has the length of its step alone."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shardwise.observe(model, optimizer, output=tmp_path / "one", on_receipt=lambda _: None):
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    found = read(tmp_path / "one")
    assert found.timing.world_size == 1 and found.collectives == ()
    assert found.samples_per_s == pytest.approx(3 / found.timing.step_s)
    assert found.timing.tokens_per_s is None and "token" in found.unknown["tokens_per_s"]
    clock = StepClock(nn.Linear(2, 2, device="meta"))
    clock.start()
    clock.stop()
    times = clock.times([], None)
    assert times.parts == {} and times.step_s >= 0
    assert all("events of the device" in times.unknown[part] for part in ("forward", "backward", "data", "exposed_dp"))
