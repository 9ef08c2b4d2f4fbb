"""A Trainer of Lightning whose strategy is `ShardwiseStrategy`, for the ranks of tests.

Apart from the tests, since importing Lightning takes seconds, and each worker imports every file of tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from shardwise.gradcheck.views import GradientRecorder, full_weights
from shardwise.integrations.lightning import ShardwiseStrategy
from tests.models import VOCAB, decoder
from tests.world.test_observe import loss_of
from tests.world.test_observe_tools import elastic

ACCUM, MICRO, STEPS = 2, 2, 2


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


class InFloat32(Module):
    """Calls its net itself, past the module's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net.float()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        assert loss.dtype == torch.float32
        return loss
