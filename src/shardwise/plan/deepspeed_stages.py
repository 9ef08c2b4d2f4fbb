"""DeepSpeed configuration of a plan, for ``deepspeed.initialize``; needs no DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.errors import PlanError
from shardwise.plan.plan import Plan

Location = Literal["device", "cpu", "nvme"]

REDUCE_BUCKET = 50_000_000  # elements that DeepSpeed reduces together: 200 MB in fp32 (its own default is 2 GB)
GATHER_BUCKET = 50_000_000  # elements that ZeRO-1 and 2 gather together after the update
PREFETCH_BUCKET = 50_000_000  # elements that ZeRO-3 gathers ahead: DeepSpeed's own default
NVME_TILE = 100_000_000  # elements of the optimizer in host memory at once: fp32 weight, gradient, 2 states
NVME_BUFFERS = 5  # parameters in transit from or to the drive
NVME_BUFFER = 100_000_000  # elements of each, where the largest parameter is unknown: DeepSpeed's own default
NVME_LEAST = 1 << 20  # minimum bytes on a rank for DeepSpeed to swap a parameter, or a tile of the optimizer
STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3}


def zero_stage(plan: Plan) -> int:
    """Return ZeRO's stage of the strategy: 1, 2 or 3.

    Raises:
        PlanError: DeepSpeed has no such stage.
    """
    stage = STAGES.get(plan.parsed.base)
    if stage is None:
        raise PlanError(
            f"strategy '{plan.strategy}' is not a ZeRO stage; DeepSpeed runs zero1, zero2 and fsdp (ZeRO-3)"
        )
    return stage


def optimizer_place(plan: Plan) -> Location:
    """Return the storage of fp32 weights and optimizer state."""
    if plan.parsed.nvme:
        return "nvme"
    return "cpu" if plan.parsed.offload else "device"


def parameter_place(plan: Plan) -> Location:
    """Return the storage of the compute parameters.

    Host memory with ``+offload+nvme``, else the drive.
    """
    if zero_stage(plan) < 3:
        return "device"
    if plan.parsed.offload:
        return "cpu"
    return "nvme" if plan.parsed.nvme else "device"


def deepspeed_config(
    plan: Plan, *, clip_norm: float | None = None, largest_parameter: int | None = None
) -> dict[str, Any]:
    """Build the ``config`` argument of ``deepspeed.initialize`` for ``plan``.

    No setting that affects results is left to DeepSpeed's defaults: clipping (1.0 by default) is ``clip_norm``, or off,
    and gradients are accumulated and reduced in fp32 for every compute dtype. The user's optimizer is not part of it.
    Under ``bf16`` DeepSpeed casts the compute weights, and keeps fp32 ones with the optimizer.

    Args:
        plan: its strategy is ``zero1``, ``zero2`` or ``fsdp`` (ZeRO-3), under either engine.
        clip_norm: the largest norm of the gradient; off if ``None``.
        largest_parameter: elements of the largest parameter, which sizes the buffers between NVMe and memory.

    Raises:
        PlanError: the strategy is not a ZeRO stage, or it needs NVMe and the plan has no path to it.
    """
    stage, micro = zero_stage(plan), plan.micro_batch or 1
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": plan.device == "cuda",
        "reduce_scatter": True,
        "reduce_bucket_size": REDUCE_BUCKET,
    }
    if stage < 3:
        zero |= {"allgather_partitions": True, "allgather_bucket_size": GATHER_BUCKET}
    else:
        zero |= {
            "stage3_prefetch_bucket_size": PREFETCH_BUCKET,
            "stage3_param_persistence_threshold": 0,  # small parameters are sharded, too
            "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear for the whole process
        }
    zero |= _offloading(plan, largest_parameter)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": plan.grad_accum,
        "train_batch_size": micro * plan.grad_accum * plan.dims.dp,
        "gradient_clipping": 0.0 if clip_norm is None else float(clip_norm),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "prescale_gradients": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
    if plan.precision in ("bf16", "fp16"):
        config[plan.precision] = {"enabled": True}
    return config


@dataclass(frozen=True)
class Swapped:
    """Swapped elements of a rank: parameters, and fp32 weights (each state has as many)."""

    parameters: int
    stepped: int

    def num_bytes(self, plan: Plan, states: int) -> int:
        """Bytes on the drive, with ``states`` fp32 tensors of the optimizer for each fp32 weight."""
        width = 4 if plan.precision == "fp32" else 2
        return self.parameters * width + self.stepped * 4 * (1 + states)

    def moved_bytes(self, plan: Plan, states: int) -> tuple[int, int]:
        """Bytes written and read in a step without accumulation.

        Weights are read forward and backward and written by the update, the optimizer's are read and written by it.
        Gradients stay in host memory.
        """
        weights = self.parameters * (4 if plan.precision == "fp32" else 2)
        optimizer = self.stepped * 4 * (1 + states)
        return weights + optimizer, 2 * weights + optimizer


def swapped(plan: Plan, parameters: Iterable[int], groups: Sequence[Iterable[int]]) -> Swapped:
    """Count a rank's swapped elements under ZeRO-3 ``+nvme``.

    DeepSpeed keeps anything smaller than `NVME_LEAST` in memory. ``parameters`` are the elements of each parameter of
    the model, ``groups`` those of the trained ones in each of the optimizer's groups. Source:
    `stage3._create_fp16_sub_groups` and the swappers of DeepSpeed 0.19.
    """
    ranks, width = plan.dims.dp, 4 if plan.precision == "fp32" else 2
    shares = [math.ceil(number / ranks) for number in parameters]
    away = sum(s for s in shares if s * width >= NVME_LEAST) if parameter_place(plan) == "nvme" else 0
    stepped = 0
    for group in groups if optimizer_place(plan) == "nvme" else ():
        tile = 0
        for share in (math.ceil(number / ranks) for number in group):
            tile += share
            if tile >= NVME_TILE:
                stepped, tile = stepped + tile, 0
        stepped += tile if tile * 4 >= NVME_LEAST else 0
    return Swapped(away, stepped)


def _offloading(plan: Plan, largest_parameter: int | None) -> dict[str, Any]:
    """Build the offload tables of optimizer state and parameters; empty for the device."""
    pinned = plan.device == "cuda"
    state, weights = optimizer_place(plan), parameter_place(plan)
    if "nvme" in (state, weights) and not plan.nvme_path:
        raise PlanError(
            f"strategy '{plan.strategy}' swaps to NVMe and the plan has no path: set parallel.nvme_path to a "
            "folder on the drive"
        )
    tables: dict[str, Any] = {}
    if state != "device":
        tables["offload_optimizer"] = {"device": state, "pin_memory": pinned}
    if weights != "device":
        tables["offload_param"] = {"device": weights, "pin_memory": pinned}
    if state == "nvme":
        tables["sub_group_size"] = NVME_TILE
        tables["offload_optimizer"] |= {"nvme_path": plan.nvme_path, "buffer_count": 4}
    if weights == "nvme":
        size = NVME_BUFFER if largest_parameter is None else largest_parameter
        tables["offload_param"] |= {
            "nvme_path": plan.nvme_path,
            "buffer_count": NVME_BUFFERS,
            "buffer_size": size,
            "max_in_cpu": 0,
        }
    return tables
