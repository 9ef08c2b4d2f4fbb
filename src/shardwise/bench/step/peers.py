"""Training steps of other trainers, set up as their documentation shows, for ``bench step --against``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from shardwise.bench.step.lightning_peer import TrainerStep, build_trainer, fully_shard_blocks
from shardwise.bench.step.step_bench import PEER_LOOP, Batch, MakeOptimizer, TrainStep
from shardwise.distributed.process_group import Ranks
from shardwise.environment import local_rank_told, look_like_torchelastic
from shardwise.errors import UserError, did_you_mean
from shardwise.import_object import optional_object
from shardwise.plan.deepspeed_stages import STAGES
from shardwise.plan.plan import Plan

Build = Callable[[nn.Module, Plan, Ranks, MakeOptimizer, float | None], TrainStep]


class Peer(NamedTuple):
    """Another way to write the step: how it is built, for which strategies, and why for no others."""

    package: str
    strategies: tuple[str, ...]
    why: str
    build: Build


def build_hand(
    model: nn.Module, plan: Plan, ranks: Ranks, make_optimizer: MakeOptimizer, clip_norm: float | None
) -> TrainStep:
    """Build the loop of ``benchmarks/peers``: plain PyTorch. Collective."""
    step: TrainStep = optional_object(PEER_LOOP)(model, plan, ranks, make_optimizer, clip_norm)  # type: ignore[misc]
    return step


def build_accelerate(
    model: nn.Module, plan: Plan, ranks: Ranks, make_optimizer: MakeOptimizer, clip_norm: float | None
) -> TrainStep:
    """Build Accelerate's loop: ``accumulate``, ``backward``, ``clip_grad_norm_`` where gradients are synchronised."""
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.state import (  # type: ignore[import-untyped]
        AcceleratorState,
        GradientState,
        PartialState,
    )
    from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state.clear()  # they are kept for the life of a process, with the steps to accumulate
    accelerator = Accelerator(
        cpu=ranks.device.type == "cpu",
        gradient_accumulation_steps=plan.grad_accum,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    own = make_optimizer(list(model.parameters()))
    prepared, optimizer = accelerator.prepare(model, own)

    def step(micros: Sequence[Batch]) -> float:
        total = torch.zeros((), device=ranks.device)
        for batch in micros:
            with accelerator.accumulate(prepared):
                loss = mean_loss(prepared, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip_norm is not None:
                    accelerator.clip_grad_norm_(prepared.parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(micros)
        return total.item()

    return step


def build_fabric(
    model: nn.Module, plan: Plan, ranks: Ranks, make_optimizer: MakeOptimizer, clip_norm: float | None
) -> TrainStep:
    """Build Fabric's loop: ``no_backward_sync`` until the last micro batch; FSDP2 by ``ModelParallelStrategy``."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    def shard(module: Any, mesh: Any) -> Any:
        return fully_shard_blocks(module, mesh["data_parallel"])

    look_like_torchelastic()
    sharded = plan.parsed.base == "fsdp"
    strategy: Any = ModelParallelStrategy(shard, data_parallel_size=plan.dims.dp, tensor_parallel_size=1)
    fabric = Fabric(
        accelerator=ranks.device.type,
        devices=ranks.local_world_size,
        strategy=strategy if sharded else DDPStrategy(gradient_as_bucket_view=True),
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    prepared = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(make_optimizer(list(prepared.parameters())))

    def step(micros: Sequence[Batch]) -> float:
        total = torch.zeros((), device=ranks.device)
        for index, batch in enumerate(micros):
            with fabric.no_backward_sync(prepared, enabled=index < len(micros) - 1):
                loss = mean_loss(prepared, batch) / len(micros)
                fabric.backward(loss)
            total += loss.detach()
        if clip_norm is not None:
            fabric.clip_gradients(prepared, optimizer, max_norm=clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def build_deepspeed(
    model: nn.Module, plan: Plan, ranks: Ranks, make_optimizer: MakeOptimizer, clip_norm: float | None
) -> TrainStep:
    """Build DeepSpeed's loop: ZeRO stage 0 for ddp, 1 for zero1, 3 for fsdp; the engine accumulates and clips."""
    from shardwise.parallel.engines.deepspeed_available import import_deepspeed

    deepspeed = import_deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "gradient_clipping": clip_norm or 0.0,
        "zero_optimization": {"stage": STAGES.get(plan.parsed.base, 0)},
        "zero_allow_untested_optimizer": True,
    }
    with local_rank_told(ranks.local_rank), contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(verbose=False)
        optimizer = make_optimizer(list(model.parameters()))
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(micros: Sequence[Batch]) -> float:
        total = torch.zeros((), device=ranks.device)
        for batch in micros:
            loss = mean_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(micros)
        return total.item()

    return step


def build_lightning(
    model: nn.Module, plan: Plan, ranks: Ranks, make_optimizer: MakeOptimizer, clip_norm: float | None
) -> TrainStep:
    """Build Lightning's Trainer around the same loss. Collective."""
    return build_trainer(model, plan, ranks, make_optimizer, clip_norm, mean_loss)


def recorded(step: TrainStep, micros: Sequence[Batch], mode: contextlib.AbstractContextManager[Any]) -> None:
    """Take a step inside ``mode``, in the thread that trains. Collective."""
    if isinstance(step, TrainerStep):
        step.within = mode
        step(micros)
        step.within = contextlib.nullcontext()
        return
    with mode:
        step(micros)


def end(step: TrainStep) -> None:
    """End what runs beside a step, if anything does. Collective."""
    if isinstance(step, TrainerStep):
        step.close()


PEERS = {
    "hand": Peer("", ("ddp", "zero1", "fsdp"), "", build_hand),
    "accelerate": Peer("accelerate", ("ddp",), "its FSDP needs GPUs, and it has no zero1 of its own", build_accelerate),
    "fabric": Peer("lightning", ("ddp", "fsdp"), "it has no zero1 but DeepSpeed's", build_fabric),
    "lightning": Peer("lightning", ("ddp", "fsdp"), "it has no zero1 but DeepSpeed's", build_lightning),
    "deepspeed": Peer("deepspeed", ("ddp", "zero1", "fsdp"), "", build_deepspeed),
}
STRATEGIES = ("ddp", "zero1", "fsdp")


def mean_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of a batch, 0-d."""
    inputs, labels = batch
    outputs = model(inputs)
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def version_of(peer: str) -> str:
    """Return the installed version of a peer; PyTorch's for the loop by hand."""
    return metadata.version(PEERS[peer].package or "torch")


def read_peers(words: str) -> tuple[str, ...]:
    """Read ``hand,accelerate``.

    Raises:
        UserError: a name is unknown, or its package is not installed; lists all.
    """
    names = [name for name in (word.strip() for word in words.split(",")) if name]
    problems = [] if names else [f"--against '{words}' names no peer; choose from {', '.join(PEERS)}"]
    for name in names:
        if name not in PEERS:
            problems.append(
                f"--against '{name}' is not known; choose from {', '.join(PEERS)}{did_you_mean(name, PEERS)}"
            )
        elif name == "hand" and optional_object(PEER_LOOP) is None:
            problems.append("--against 'hand': its loops are in benchmarks/ of Shardwise's repository; run from there")
        elif PEERS[name].package and find_spec(PEERS[name].package) is None:
            problems.append(f"--against '{name}': it is not installed; pip install {PEERS[name].package}")
    if problems:
        raise UserError(*problems)
    return tuple(dict.fromkeys(names))
