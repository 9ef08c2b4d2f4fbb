"""NaN and inf planted in one place: module, rank and sample are named."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.train.step as step_module
from shardwise.errors import TrainingError
from shardwise.run.loop_recorder import LoopRecorder
from shardwise.run.start import start
from shardwise.train.nonfinite.nonfinite_error import NonFiniteError, NonFiniteSource
from shardwise.train.run_files import RunFile
from tests.models import byte_attention
from tests.planted import WORLD_2, WORLD_4, Model, Place, batches_of, expected, found_at, summed
from tests.turns import by_turns
from tests.worlds import run_each


def wrong(place: Any, by_rank: list[dict[str, Any]]) -> str:
    """What the ranks said that is not so; they must say the same."""
    want, said = expected(place), by_rank[0]
    apart = {key: said.get(key) for key, value in want.items() if said.get(key) != value}
    if any(one["text"] != said["text"] for one in by_rank if "text" in one):
        return f"{place}: ranks differ"
    return f"{place}: {apart} for {want}\n{said.get('text')}" if apart else ""


@pytest.mark.turns(1)
def test_each_planted_number_is_named_at_its_source() -> None:
    failed = []
    for world, all_places in ((2, WORLD_2), (4, WORLD_4)):
        places = [all_places[nth] for nth in by_turns(range(len(all_places)), 3, f"{world} ranks")]
        found = run_each(found_at, world, [(place,) for place in places], timeout_s=240.0)
        failed += [text for place, one in zip(places, found, strict=True) if (text := wrong(place, one))]
    assert not failed, "\n".join(failed)


def trained(model: nn.Module, loss: Any = summed, output: Path | None = None, batches: Any = None) -> NonFiniteSource:
    """The source that a run in this process alone names."""
    session = start("ddp", grad_accum=2, receipts=False, output=output)
    session.observers = [one for one in session.observers if not isinstance(one, LoopRecorder)]  # it keeps a file open
    batches = batches or batches_of(Place("", "ddp", "", "", world=1, accum=2, batch=-1))
    try:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), batches[0][0])
        for step in session.steps(batches):
            step.run(model, loss)
            step.update(optimizer, clip_norm=1.0)
    except NonFiniteError as error:
        assert isinstance(error, TrainingError)
        assert error.exit_code == 1
        assert error.source is not None
        return error.source
    finally:
        session.close()
    raise AssertionError("nothing was found")


def test_dropout_draws_the_same_numbers_again() -> None:
    torch.manual_seed(1)
    model = Model("random", 1)
    fault = model.blocks[1].get_submodule("fault")
    source = trained(model)
    at = 2 * (source.step - 1) + (source.micro_batch or 0) - 1
    assert fault.hits[at]
    assert source.rows == tuple(fault.hits[at])  # of the first time
    assert not any(fault.hits[:at])


def test_what_a_replay_does_not_show_again_is_said(tmp_path: Path) -> None:
    calls = []

    def sometimes(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return summed(outputs, labels) * (float("nan") if len(calls) == 3 else 1.0)

    source = trained(Model("", 1), sometimes, tmp_path)
    written = json.loads((tmp_path / RunFile.NONFINITE).read_text())
    assert (written["schema"], written["step"], written["problem"]) == (1, 2, "the loss is nan")
    assert written["source"]["reason"] == "not reproduced"
    assert (source.reason, source.module, source.rank) == ("not reproduced", None, None)


def test_gradients_whose_norm_alone_overflows_are_named_by_the_largest() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1e30

    source = trained(Model("", 1), lambda outputs, labels: summed(Steep.apply(outputs), labels))
    assert source.reason == "norm"
    assert source.parameters
    assert source.largest is not None and source.largest > 1e20


def test_a_healthy_run_is_the_same_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        with pytest.raises(AssertionError, match="nothing was found"):
            trained(model := byte_attention(0.2), batches=[(batch["ids"], labels) for batch, labels in healthy])
        return [p.detach() for p in model.parameters()], torch.get_rng_state()

    healthy = batches_of(Place("", "ddp", "", "", world=1, accum=2, batch=-1))
    found, state = weights()
    monkeypatch.setattr(step_module, "random_state", lambda device: torch.empty(0))
    monkeypatch.setattr(step_module, "explained", lambda session, step: contextlib.nullcontext())
    without, same = weights()
    assert all(torch.equal(one, other) for one, other in zip(found, without, strict=True))
    assert torch.equal(state, same)


def test_a_model_that_the_replay_cannot_call_leaves_the_error_as_it_is(tmp_path: Path) -> None:
    class Scaled(Model):
        def forward(self, ids: torch.Tensor, pixels: torch.Tensor, scale: float | None = None) -> torch.Tensor:
            assert scale is not None, "a scale is needed"
            return super().forward(ids, pixels) * scale

    session = start("ddp", grad_accum=1, receipts=False, output=tmp_path)
    session.observers = [one for one in session.observers if not isinstance(one, LoopRecorder)]
    try:
        model = Scaled("", 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
            for step in session.steps(batches_of(Place("", "ddp", "", "", world=1, accum=1, batch=-1))):
                for micro in step:
                    step.backward(summed(model(**micro.inputs, scale=float("nan")), micro.labels))
                step.update(optimizer, clip_norm=1.0)
    finally:
        session.close()
    assert caught.value.source is not None
    note = "the replay could not call the model: AssertionError: a scale is needed"
    assert caught.value.source.note.startswith(note)
    assert json.loads((tmp_path / RunFile.NONFINITE).read_text())["problem"] == "the loss is nan"


def one_rank_alone() -> str:
    """Rank 1 finds a number in step 1 that rank 0 does not."""
    honest, patch = step_module.check_finite, pytest.MonkeyPatch()

    def check(result: Any, *, scaled: bool = False) -> None:
        honest(result, scaled=scaled)
        if session.ranks.rank == 1:
            raise NonFiniteError(result.number, "the gradient norm is nan")

    session = start("ddp", grad_accum=1, receipts=False)
    patch.setattr(step_module, "check_finite", check)
    try:
        model = Model("", 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        for step in session.steps(batches_of(Place("", "ddp", "", "", accum=1, batch=-1))):
            step.run(model, summed)
            step.update(optimizer, clip_norm=1.0)
    except TrainingError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        patch.undo()
        session.close()
    return ""


def test_a_number_on_one_rank_alone_hangs_nobody() -> None:
    ((first, second),) = run_each(one_rank_alone, 2, [()], timeout_s=60.0)
    assert first.startswith(
        "TrainingError: ranks wait for each other at different points: rank 0 at the start of a step"
    )
    assert second.startswith(
        "NonFiniteError: step 1: the gradient norm is nan; the weights of the last good checkpoint"
    )
