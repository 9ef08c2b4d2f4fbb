"""`ShardwiseStrategy` in Lightning's Trainer: gradients of one process, and checkpoints that resume."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import shardwise
from shardwise.checkpoint.readers.detect import open_source
from shardwise.gradcheck.views import GradientRecorder, full_weights
from shardwise.integrations.lightning import ShardwiseStrategy
from tests.models import VOCAB, decoder
from tests.world.test_observe import loss_of
from tests.world.test_observe_tools import elastic
from tests.worlds import run_each, run_world

ACCUM, MICRO, STEPS = 2, 2, 2
Weights = dict[str, torch.Tensor]


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = decoder()
        self.example_input_array = torch.zeros(MICRO, 7, dtype=torch.int64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("held_out", loss_of(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Recorded(lightning.Callback):
    """Gradients of the first step, and the full weights at the end."""

    def __init__(self) -> None:
        self.recorder, self.first, self.weights = GradientRecorder(), {}, {}
        self.batches: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.session.observers.append(self.recorder)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self.batches += [torch.cat(batch, 1)] if index < ACCUM else []  # Lightning shuffles

    def on_train_batch_end(self, *_: Any) -> None:
        self.first = self.first or dict(self.recorder.raw)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = full_weights(trainer.strategy.session.module)


def dataset() -> torch.utils.data.TensorDataset:
    """As many samples as two steps of two ranks have."""
    ids = torch.randint(VOCAB, (STEPS * ACCUM * MICRO * 2, 8), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])


def fit(
    strategy: str,
    *,
    epochs: int = 1,
    folder: Path | None = None,
    resume: Path | None = None,
    module: type[Module] = Module,
    **options: Any,
) -> Recorded:
    recorded, callbacks = Recorded(), []
    options |= {"options": {"sequence_parallel": False}} if "+tp" in strategy else {}
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        # the decoder sums over the sequence, which is why it stays whole
        strategy=ShardwiseStrategy(strategy, **options),
        max_epochs=epochs,
        accumulate_grad_batches=ACCUM,
        gradient_clip_val=0.5,
        callbacks=[recorded, *callbacks],
        plugins=[elastic()],
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(dataset(), batch_size=MICRO)
    trainer.fit(module(), loader, loader, ckpt_path=None if resume is None else str(resume))
    return recorded


Found = tuple[Weights, list[torch.Tensor]]


def gradients(strategy: str) -> Found:
    recorded = fit(strategy)
    return recorded.first, recorded.batches


def errors(ranks: list[Found], dp: int) -> list[float]:
    """Of each rank, against one process over the samples of all data-parallel ranks."""
    batches = {str(batch): batch for _, own in ranks for batch in own}  # tensor-parallel ranks have the same ones
    assert len(batches) == dp * ACCUM
    rows = torch.cat(list(batches.values()))
    module = Module()
    module.training_step((rows[:, :7], rows[:, 7:]), 0).backward()
    reference = {name: p.grad for name, p in module.named_parameters()}
    assert all(found.keys() == reference.keys() for found, _ in ranks)
    return [max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in reference.items()) for found, _ in ranks]


def test_gradients_are_those_of_one_process() -> None:
    cases = [("ddp",), ("fsdp",), ("zero1",), ("zero2",), ("fsdp+offload",)]
    for (name,), ranks in zip(cases, run_each(gradients, 2, cases, timeout_s=170), strict=True):
        assert max(errors(ranks, 2)) < 1e-9, name


class InFloat32(Module):
    """Calls its net itself, past the module's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net.float()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        assert loss.dtype == torch.float32
        return loss


def low_precision(strategy: str, precision: str) -> None:
    """The receipt raises where the compute dtype or the recompute is not as planned."""
    fit(strategy, module=InFloat32, precision=precision, recompute="full")


def test_precision_and_recompute_are_as_planned() -> None:
    cases = [("ddp", "bf16"), ("fsdp", "bf16"), ("zero1", "fp16")]
    run_each(low_precision, 2, cases, timeout_s=170)


def test_tensor_parallel_gradients_are_those_of_one_process() -> None:
    assert max(errors(run_world(gradients, 4, "fsdp+tp2", timeout_s=170), 2)) < 1e-9


def resumed() -> tuple[Weights, Weights, list[str], str]:
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    folder = Path(made[0])
    whole = fit("fsdp", epochs=2, folder=folder).weights
    place = folder / "epoch=0.ckpt"
    with open_source(str(place)) as source:
        kind, names = source.kind, sorted(source.tensors)
    again = fit("ddp", epochs=2, resume=place).weights
    return whole, again, names, kind


def test_a_checkpoint_in_our_format_resumes_under_another_strategy() -> None:
    for whole, again, names, kind in run_world(resumed, 2, timeout_s=170):
        assert "Shardwise" in kind
        assert "model/net.head.weight" in names
        assert "optimizer/net.head.weight/exp_avg" in names
        worst = max(float((whole[name] - again[name]).abs().max()) for name in whole)
        assert worst < 1e-9


@pytest.mark.parametrize("strategy", ["fsdp+pp2", "fsdp+cp2", "deepspeed-zero2", "fsdp+lora"])
def test_what_does_not_run_in_lightnings_loop_is_refused(strategy: str) -> None:
    with pytest.raises(shardwise.ShardwiseError, match="one micro batch at a time"):
        ShardwiseStrategy(strategy)
