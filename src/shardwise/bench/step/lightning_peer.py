"""Lightning's Trainer as a peer of ``bench step --against``."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from shardwise.bench.step.step_bench import Batch, MakeOptimizer
from shardwise.distributed.process_group import Ranks
from shardwise.environment import look_like_torchelastic
from shardwise.plan.plan import Plan

Loss = Callable[[Any, Batch], torch.Tensor]


class TrainerStep:
    """A step of a Trainer, whose loop runs in a thread: the two take turns and never run at once.

    It is the Trainer's data loader, too, and there it waits for the next micro batch.
    """

    def __init__(self, fit: Callable[[Any], None], stop: Callable[[], None]) -> None:
        self._micros: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._losses: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()
        self.loss = torch.zeros(())
        self.within: AbstractContextManager[Any] = nullcontext()  # around each micro batch, in the Trainer's thread
        self._stop, threads = stop, torch.get_num_threads()

        def train() -> None:
            torch.set_num_threads(threads)  # OpenMP has a number for each thread
            try:
                fit(self)
            except BaseException as error:
                self._losses.put(error)

        self._thread = threading.Thread(target=train, daemon=True)

    def __len__(self) -> int:
        return 1 << 40  # where a loader has no length the Trainer fetches one batch more before each step

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._micros.get()) is not None:
            with self.within:
                yield batch
            self._losses.put(self.loss)  # the Trainer asks for the next: it is through with this one

    def __call__(self, micros: Sequence[Batch]) -> float:
        """Train on the micro batches of a step; return this rank's mean loss."""
        if not self._thread.is_alive():
            self._thread.start()
        total = 0.0
        for batch in micros:
            self._micros.put(batch)
            loss = self._losses.get()
            if isinstance(loss, BaseException):
                raise loss
            total += loss.item() / len(micros)
        return total

    def close(self) -> None:
        """End the Trainer's loop. Collective."""
        if self._thread.is_alive():
            self._stop()
            self._micros.put(None)
            self._thread.join()


def build_trainer(
    model: nn.Module, plan: Plan, ranks: Ranks, make_optimizer: MakeOptimizer, clip_norm: float | None, mean_loss: Loss
) -> TrainerStep:
    """Build Lightning's Trainer in its ``barebones`` mode; DDP, or FSDP2 by ``ModelParallelStrategy``. Collective."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import FSDPModule

    sharded = plan.parsed.base == "fsdp"

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_model(self) -> None:
            if sharded and not isinstance(model, FSDPModule):  # it may be called more than once
                fully_shard_blocks(model, self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(list(self.parameters()))

        def training_step(self, batch: Batch, index: int) -> torch.Tensor:
            loss = mean_loss(self.model, batch)
            step.loss = loss.detach()
            return loss

    look_like_torchelastic()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    two_axes: Any = ModelParallelStrategy(data_parallel_size=plan.dims.dp, tensor_parallel_size=1)
    trainer = Trainer(
        barebones=True,
        accelerator=ranks.device.type,
        devices=ranks.local_world_size,
        strategy=two_axes if sharded else DDPStrategy(gradient_as_bucket_view=True),
        plugins=[TorchElasticEnvironment()],
        accumulate_grad_batches=plan.grad_accum,
        gradient_clip_val=clip_norm,
        use_distributed_sampler=False,
        max_epochs=-1,
    )

    def stop() -> None:
        trainer.should_stop = True

    step = TrainerStep(lambda loader: trainer.fit(Module(), loader), stop)
    return step


def fully_shard_blocks(model: nn.Module, mesh: Any) -> nn.Module:
    """Put FSDP2 around each repeated block and the whole, as Lightning's documentation shows."""
    from torch.distributed.fsdp import fully_shard

    from shardwise.model.read import find_blocks

    for name in find_blocks(model):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
