"""The fit receipt: bytes at rest are exact, peaks are told beside the prediction, whoever predicted how much."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.cost.memory.estimate import Estimate, Phase
from shardwise.errors import ReceiptError
from shardwise.measure.peaks import peak_watch
from shardwise.receipts.fit import FitRecorder
from shardwise.receipts.receipt import Line
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.models import decoder, ragged_batches

BIG = 8 * 1024**2


def exact_estimate(model: nn.Module, **more: Any) -> Estimate:
    held = sum(p.nbytes for p in model.parameters())
    scalars = 4 * len(list(model.parameters()))  # AdamW counts the steps of each parameter
    known = {"activations": None, "logits": None, "buffers": 0}
    return Estimate(parameters=held, gradients=held, optimizer=2 * held + scalars, **{**known, **more})


@contextlib.contextmanager
def trained(
    estimate: Callable[[nn.Module], Estimate], steps: int = 3, sabotage: Callable[[nn.Module], None] | None = None
) -> Iterator[FitRecorder]:
    session = start("ddp", receipts=False, device="cpu")
    try:
        model = decoder().float()
        watching = list(session.phase_watchers)
        probe = FitRecorder(estimate(model))
        session.observers.append(probe)
        model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        if sabotage is not None:
            sabotage(model)
        for step in session.steps(ragged_batches(steps)):
            for micro in step:
                step.backward(token_loss_sum(model(micro.inputs), micro.labels), count=micro.num_tokens)
            step.update(optimizer, clip_norm=1.0)
        assert session.phase_watchers == watching
        yield probe
    finally:
        session.close()


def lines(probe: FitRecorder) -> dict[str, Line]:
    assert probe.receipt is not None
    return {line.name: line for line in probe.receipt.lines}


def test_peaks_of_each_phase_are_told_beside_the_prediction():
    phases = (Phase(name="forward", allocated=1), Phase(name="backward", allocated=2), Phase(name="save", allocated=3))

    def estimate(model: nn.Module) -> Estimate:
        return exact_estimate(model, activations=1000, logits=24, allocated=4096, reserved=8192, phases=phases)

    with trained(estimate) as probe:
        found, peaks = lines(probe), probe.peaks
    assert peaks is not None
    assert probe.measurement is not None and probe.measurement.peaks == peaks
    assert list(peaks.allocated) == ["forward", "backward", "optimizer"]
    assert found["peak in forward"].planned == "1 B"
    assert found["peak in forward"].found.endswith(f"({peaks.allocated['forward']:.2f} × plan)")
    assert found["peak in backward"].planned == "2 B"
    assert found["peak in optimizer"].planned == "not predicted"
    assert "plan" not in found["peak in optimizer"].found
    assert found["activations, logits"].planned == "≤ 1.00 KiB"
    assert found["peak allocated"].planned == "4.00 KiB"
    assert all(found[name].ok is True for name in ("parameters", "gradients", "optimizer"))
    assert all(found[name].ok is None for name in found if name not in ("parameters", "gradients", "optimizer"))


def test_what_is_held_is_the_floor_of_every_peak():
    with trained(exact_estimate) as probe:
        peaks = probe.peaks
    assert peaks is not None
    held = sum(p.nbytes for p in decoder().float().parameters())
    assert held * 3 <= peaks.start < held * 3 + 4096  # parameters, two states; and scalars and inputs
    assert peaks.saved is not None and peaks.saved > 0
    assert peaks.allocated["forward"] >= peaks.start + peaks.saved
    assert peaks.allocated["optimizer"] >= peaks.start + held  # gradients are there


def test_a_buffer_that_nobody_planned_shows():
    """A forward that takes 8 MiB more than planned is found to take 8 MiB more."""

    class Wasteful(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            waste = torch.zeros(BIG, dtype=torch.uint8)
            return self.inner(x) + waste[0]

    def sabotage(model: nn.Module) -> None:
        model.blocks[1] = Wasteful(model.blocks[1])

    with trained(exact_estimate) as probe:
        honest = probe.peaks
    assert honest is not None
    planned = honest.allocated["forward"]

    def estimate(model: nn.Module) -> Estimate:
        return exact_estimate(model, allocated=planned, phases=(Phase(name="forward", allocated=planned),))

    with trained(estimate) as probe:
        assert "(1.00 × plan)" in lines(probe)["peak in forward"].found
    with trained(estimate, sabotage=sabotage) as probe:
        found, wasted = lines(probe), probe.peaks
    assert wasted is not None
    assert wasted.allocated["forward"] >= honest.allocated["forward"] + BIG - honest.saved  # it is gone before the end
    assert wasted.allocated["optimizer"] == honest.allocated["optimizer"]
    for name in ("peak in forward", "peak allocated"):
        ratio = float(found[name].found.split("(")[1].split(" ×")[0])
        assert ratio > 10


def test_a_wrong_byte_at_rest_stops_the_run():
    def estimate(model: nn.Module) -> Estimate:
        right = exact_estimate(model)
        return right.model_copy(update={"gradients": right.gradients - 4})

    with pytest.raises(ReceiptError, match="gradients"), trained(estimate):
        pass


def test_two_steps_are_too_few_for_peaks():
    with trained(exact_estimate, steps=2) as probe:
        found = lines(probe)
    assert probe.peaks is None
    assert found["parameters"].ok is True
    assert found["peak in backward"].found == "not measured: fewer than three steps"


def test_a_profiler_of_the_users_is_told():
    with torch.profiler.profile(), trained(exact_estimate, steps=4) as probe:
        found = lines(probe)
    assert found["peak in backward"].found == "not measured: another profiler is on"


def test_unknown_parts_of_an_estimate_are_unknown():
    def estimate(model: nn.Module) -> Estimate:
        return exact_estimate(model).model_copy(update={"optimizer": None})

    with trained(estimate) as probe:
        found = lines(probe)
    assert found["optimizer"].ok is None and found["optimizer"].planned == "unknown"
    assert found["activations, logits"].planned == "not predicted"
    assert found["activations, logits"].found != "not predicted"


def test_nothing_is_watched_after_the_step():
    with trained(exact_estimate, steps=5) as probe:
        assert probe._watch is None
        assert not torch.autograd._profiler_enabled()


class FakeCuda:
    """The caching allocator's counters, moved by hand."""

    def __init__(self) -> None:
        self.now = self.peak = 100
        self.reserved = 512

    def take(self, number: int) -> None:
        self.now += number
        self.peak = max(self.peak, self.now)

    def reset(self, device: object) -> None:
        self.peak = self.now


def test_on_cuda_the_allocators_peaks_are_read_at_each_border(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: fake.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: fake.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: fake.reserved)
    monkeypatch.setattr("shardwise.measure.peaks.device_bytes", lambda device: 4096)
    watch = peak_watch(torch.device("cuda"))

    session: Any = SimpleNamespace(
        device=torch.device("cuda"),
        phase_watchers=[],
        applied=SimpleNamespace(engine=None, outer=nn.Linear(1, 1), pipeline=None),
    )
    assert watch.start(session)
    (enter,) = session.phase_watchers
    fake.take(900)  # before the first forward: no phase
    fake.take(-900)
    enter("forward")
    fake.take(50)
    fake.take(-20)
    enter("backward")
    fake.take(70)
    fake.take(-80)
    fake.reserved = 1024
    enter("clip")
    fake.take(5)
    fake.take(-5)
    enter("optimizer")
    fake.take(3)
    peaks = watch.stop(session, session)
    assert peaks.allocated == {"forward": 150, "backward": 200, "optimizer": 125}
    assert peaks.reserved == {"forward": 512, "backward": 1024, "optimizer": 1024}
    assert (peaks.start, peaks.saved, peaks.device) == (100, 30, 4096)
    assert session.phase_watchers == []
