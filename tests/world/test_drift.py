"""What ranks hold alike and a forward changes on each alone: told by name, whatever the step, and no false alarm."""

from __future__ import annotations

import logging
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import ModelError, ReceiptError
from shardwise.measure.state import local
from shardwise.receipts.drift import DriftRecorder, bit_sums
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.families import family
from tests.models import Decoder, decoder, ragged_batches
from tests.worlds import run_world


class Stateful(Decoder):
    """With state of one kind that a forward changes, from ``begin`` forwards on."""

    def __init__(self, kind: str, begin: int = 0) -> None:
        super().__init__()
        self.kind, self.begin, self.calls = kind, begin, 0
        if kind == "spectral":
            self.head = nn.utils.parametrizations.spectral_norm(self.head)
        if kind == "batch norm":
            self.batch_norm = nn.BatchNorm1d(7)
        self.register_buffer("codebook", torch.zeros(4).double())
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training and self.calls > self.begin:
            with torch.no_grad():
                self.seen += 1
                if self.kind == "codebook":
                    self.codebook.lerp_(ids[0, :4].double(), 0.1)
                if self.kind == "nan":
                    self.codebook.fill_(float("nan"))
                if self.kind == "count" and dist.get_rank():
                    self.seen += 1
                if self.kind == "scratch":
                    self.scratch.fill_(float(ids.sum()))
                if self.kind == "weight" and dist.get_rank():
                    self.blocks[1].up.weight[0, 0] += 0.01
                if self.kind == "rounding" and dist.get_rank():
                    self.scale.mul_(1 + 1e-15)
        if self.kind == "batch norm":
            x = self.batch_norm(self.embed(ids))
            for block in self.blocks:
                x = block(x)
            return self.head(x * self.scale)
        return super().forward(ids)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(
    model: nn.Module,
    strategy: str,
    steps: int = 6,
    share: float = 1.0,
    save: str = "",
    length: int = 7,
    spoilt: bool = False,
) -> tuple[DriftRecorder, list[str], str, Session]:
    """A run with ``share`` of the time for checks; what was warned about, and what stopped it."""
    said, batches = Said(), ragged_batches(2 * steps)
    batches = [(ids[:, :length], labels[:, :length]) for ids, labels in batches]
    logging.getLogger("shardwise").addHandler(said)
    session = start(strategy, receipts=False)
    watch = DriftRecorder.attach(session, share)
    outer, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), batches[0][0])
    error = ""
    try:
        for step in session.steps(batches):
            step.run(outer, token_loss_sum)
            step.update(optimizer)
            if spoilt and step.number == 2 and dist.get_rank() == 3:
                for name, parameter in session.module.named_parameters():
                    if name.endswith("norm.weight") and "layers" not in name:
                        local(parameter.detach()).add_(0.05)
        if save:
            session.save(save)
    except ReceiptError as found:
        error = str(found)
    logging.getLogger("shardwise").removeHandler(said)
    session.close()
    return watch, [text for text in said.texts if text.startswith("by step")], error, session


def unwritten() -> tuple[int, list[str], str]:
    """Messages of stepped weights come, all their bytes, and go nowhere."""
    from shardwise.parallel.data_parallel.sharded_optimizer import ShardedOptimizer

    send: Any = ShardedOptimizer._send

    def not_written(optimizer: Any, weights: list[torch.Tensor], source: int, *, own: bool) -> Any:
        return send(optimizer, weights if own else [w.clone() for w in weights], source, own=own)

    torch.manual_seed(0)
    no_memory = mock.patch("shardwise.parallel.data_parallel.ddp.share_memory", lambda *_, **__: None)
    with mock.patch.object(ShardedOptimizer, "_send", not_written), no_memory:
        watch, said, error, _ = train(Stateful("none").double(), "zero1")
    return watch.checks, said, error


KINDS = ("none", "codebook", "nan", "count", "scratch", "spectral", "weight", "rounding", "batch norm")


def stateful(folder: str) -> dict[str, tuple[int, list[str], str]]:
    found = {}
    for strategy in ("ddp", "zero1", "fsdp"):
        for kind in KINDS:
            if strategy == "fsdp" and kind in ("weight", "rounding"):  # no rank has a copy
                continue
            torch.manual_seed(0)
            watch, said, error, _ = train(Stateful(kind, begin=2).double(), strategy)
            found[f"{strategy} {kind}"] = (watch.checks, said, error)
    found["zero1 unwritten"] = unwritten()
    for kind in ("codebook", "weight"):  # no time for a check after the first: the save looks
        torch.manual_seed(0)
        watch, said, error, _ = train(Stateful(kind, begin=2).double(), "ddp", share=0.0, save=f"{folder}/{kind}")
        found[f"save {kind}"] = (watch.checks, said, error)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, list[str], str]]]:
    return run_world(stateful, 2, str(tmp_path_factory.mktemp("drift")))


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_buffers_that_drift_are_warned_about_once(found: list[Any], strategy: str) -> None:
    for kind, name in (("codebook", "codebook"), ("count", "seen")):
        checks, said, error = found[0][f"{strategy} {kind}"]
        assert checks >= 4 and error == ""
        assert len(said) == 1, said
        assert f"by step 3, '{name}' (ranks 0 and 1 differ): buffers have drifted apart" in said[0]
        assert found[1][f"{strategy} {kind}"][1] == [], "rank 0 speaks"


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_weights_that_drift_stop_all_ranks(found: list[Any], strategy: str) -> None:
    for rank in found:
        _, said, error = rank[f"{strategy} weight"]
        assert error.startswith(f"by step 3, weights have drifted apart that {strategy} keeps alike on all ranks: ")
        assert "'blocks.1.up.weight' (ranks 0 and 1 differ)" in error and said == []
    for rank in found:
        assert "weights have drifted apart that zero1 keeps alike on all ranks: " in rank["zero1 unwritten"][2]
    _, said, error = found[0]["ddp rounding"]
    assert error == "" and len(said) == 1 and "'scale' (ranks 0 and 1 differ): weights differ in their last" in said[0]


def test_no_false_alarms(found: list[Any]) -> None:
    for rank in found:
        for key, (_, said, error) in rank.items():
            if key.split()[1] in ("none", "nan", "scratch", "spectral", "batch"):
                assert (said, error) == ([], ""), key


def test_a_save_looks_before_it_stores(found: list[Any]) -> None:
    checks, said, error = found[0]["save codebook"]
    assert checks == 1 and error == "" and len(said) == 1 and "'codebook' (ranks 0 and 1 differ)" in said[0]
    for rank in found:
        assert rank["save weight"][0] == 1 and "'blocks.1.up.weight'" in rank["save weight"][2]


def cut() -> dict[str, tuple[int, list[str], str]]:
    """Replicas of hsdp, of tensor-parallel ranks, and of pipeline stages; rank 3 spoils one after step 2."""
    found = {}
    for strategy in ("hsdp", "ddp+tp2", "fsdp+tp2", "ddp+pp2"):
        for spoilt in (False, True):
            watch, said, error, _ = train(family("llama"), strategy, length=6, spoilt=spoilt)
            found[f"{strategy} {spoilt}"] = (watch.checks, said, error)
    return found


@pytest.mark.turns(3)
def test_replicas_beside_shards() -> None:
    for rank in run_world(cut, 4):
        for key, (checks, said, error) in rank.items():
            assert said == [] and checks >= 2, (key, said)
            expected = "by step 3, weights have drifted apart" if key.endswith("True") else ""
            assert error.startswith(expected) and bool(error) == bool(expected), (key, error)
            assert "norm.weight' (ranks " in error or not error, (key, error)


def renorm() -> list[str]:
    found = []
    for strategy in ("ddp", "zero1", "fsdp"):
        model = decoder()
        model.embed.max_norm = 1.0
        session = start(strategy, receipts=False)
        with pytest.raises(ModelError) as caught:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found.append(str(caught.value))
    return found


def test_an_embedding_that_scales_its_weights_is_refused() -> None:
    for texts in run_world(renorm, 2):
        assert all(text.startswith("'embed' has max_norm=1: its forward changes the weight rows") for text in texts)


def budget() -> tuple[int, float]:
    begun = time.perf_counter()
    torch.manual_seed(0)
    watch, _, _, _ = train(Stateful("none").double(), "ddp", steps=60, share=0.002)
    return watch.checks, watch.spent_s / (time.perf_counter() - begun)


def test_checks_keep_to_their_share_of_the_time() -> None:
    results = run_world(budget, 2)
    assert results[0][0] == results[1][0], "ranks check together"
    for checks, _ in results:
        assert 1 <= checks < 60


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), 1.0]),
        torch.zeros(0),
        torch.tensor(True),
        torch.zeros(3, dtype=torch.complex128),
        torch.ones(5, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.arange(12.0).reshape(3, 4).T,
        torch.ones(1).expand(5),
        torch.full((2,), -1, dtype=torch.int64),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=repr,
)
def test_every_kind_of_tensor_has_a_sum(tensor: torch.Tensor) -> None:
    (before,) = bit_sums([tensor])
    assert bit_sums([tensor.clone()]) == [before]
    if tensor.numel():
        other = tensor.detach().clone(memory_format=torch.contiguous_format)
        other.reshape(-1).view(torch.uint8)[0] ^= 1
        assert bit_sums([other]) != [before]
