"""`OptimizerSpec`: what the package knows of each named optimizer, declared once; all else asks `OPTIMIZERS`.

Pure data, so that planning needs no torch: the class that steps is named, and imported where it is built. How to add
one is in docs/extending.md.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.plan.strategy import Strategy

QUANTISED_BLOCK = 256  # elements that share an fp32 scale in 8-bit Adam (Dettmers 2021, arXiv 2110.02861; bitsandbytes)
QUANTISED_FROM = 4096  # tensors with fewer elements keep fp32 state (bitsandbytes: min_8bit_size)
_ITEMSIZES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
_LARGE = (4096, 4096)

Mode = Literal["deepspeed", "tp", "shards", "offload", "in_backward", "dry_run"]


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The shape of a parameter, of its rows on this rank, and of those on the rank that has most.

    ``in_block``: it is one of a repeated block's.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    fullest: tuple[int, ...]
    in_block: bool = False


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of optimizer state on this rank; without a ``dtype`` it has the parameter's."""

    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerSpec:
    """What is known of an optimizer before one is built."""

    name: str
    help: str
    # called with the parameters, ``lr``, the hyperparameters of the config, and ``arguments``, which never change
    factory: str
    # those that it accepts, with their defaults: ``betas``, ``eps``, ``momentum`` and ``weight_decay`` are keys of
    # ``[optimizer]``, others of ``[optimizer.kwargs]``
    hyperparameters: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # tensors of the parameter's shape that it keeps (where ``planned_with`` is set), and 0-d ones; plans may count
    # another number of the latter
    states: int
    planned_with: Mapping[str, Any] = field(default_factory=dict)
    scalars: int = 1
    plan_scalars: int | None = None
    # the tensors with dimensions, where they are not ``states`` tensors of the parameter's shape and dtype
    state: Callable[[ParameterShard], tuple[StateTensor, ...]] | None = None
    # parameter-shaped tensors that live only while it steps: of all parameters together, and of one after the other,
    # of which the largest counts; on CPU where they are others
    temporaries: tuple[float, float] = (1.0, 0.0)
    cpu_temporaries: tuple[float, float] | None = None
    # bytes that a step reads and writes for an element: weight and states both ways, the gradient once
    moved_bytes: float
    # modes that are not possible, and why
    refuses: Mapping[Mode, str] = field(default_factory=dict)
    # the number of the parameter group that a parameter is in, where there are several
    group: Callable[[ParameterShard], int] | None = None
    # the step of an element depends on no other element, so sharded parameters need no trial
    elementwise: bool = False
    # suggested where nothing fits with AdamW
    proposed: bool = False
    # what must be installed, and the command that installs it
    package: tuple[str, str] | None = None
    # a base class of the factory's, whose instances keep the same state
    state_class: str | None = None

    def state_bytes(self, shard: ParameterShard, itemsize: int) -> int:
        """Bytes of the state with dimensions of a parameter on this rank."""
        tensors = (StateTensor(shard.local),) * self.states if self.state is None else self.state(shard)
        return sum(math.prod(t.shape) * (_ITEMSIZES[t.dtype] if t.dtype else itemsize) for t in tensors)

    def state_dtypes(self, shape: tuple[int, ...], dtype: str) -> set[str]:
        """The dtypes of the state with dimensions of a parameter."""
        if self.state is None:
            return {dtype}
        return {tensor.dtype or dtype for tensor in self.state(ParameterShard(shape, shape, shape))}

    @property
    def least_bytes(self) -> float:
        """Bytes of state that an fp32 element has at the least: those of a large matrix, rounded down."""
        return self.state_bytes(ParameterShard(_LARGE, _LARGE, _LARGE), 4) // math.prod(_LARGE)

    def builds(self, optimizer: object) -> bool:
        """Whether an optimizer is one of the factory's class, or of a class made from it."""
        kind = loaded_class(self.factory)
        return kind is not None and isinstance(optimizer, kind)

    def require_package(self) -> None:
        """Check that what it needs is installed, before anything is read or built.

        Raises:
            ConfigError: it is not.
        """
        if self.package is not None and importlib.util.find_spec(self.package[0]) is None:
            raise ConfigError(
                f"optimizer.name '{self.name}' needs {self.package[0]}; install it with: {self.package[1]}"
            )


OPTIMIZERS: dict[str, OptimizerSpec] = {}


def declare(spec: OptimizerSpec) -> None:
    """Make an optimizer known under its name."""
    OPTIMIZERS[spec.name] = spec


def declared(optimizer: object) -> OptimizerSpec | None:
    """The declaration of a live optimizer, by its class; ``None`` where there is none."""
    for spec in OPTIMIZERS.values():
        kinds = [loaded_class(path) for path in (spec.factory, spec.state_class) if path is not None]
        if any(kind is not None and isinstance(optimizer, kind) for kind in kinds):
            return spec
    return None


def loaded_class(path: str) -> type | None:
    """The class ``module:name``; ``None`` where the module is not loaded, of whose classes there are no instances."""
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) else None


def names_without(mode: Mode) -> list[str]:
    """The optimizers that do not refuse a mode."""
    return [spec.name for spec in OPTIMIZERS.values() if mode not in spec.refuses]


def either(names: list[str]) -> str:
    """``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


_OTHERWISE = {"in_backward": "take in_backward out", "shards": "ddp or zero1"}


def refusals(name: str | None, strategy: Strategy, *, in_backward: bool = False) -> list[str]:
    """Return why an optimizer cannot step what a strategy leaves on a rank, each with a fix; empty if it can."""
    refused = OPTIMIZERS[name].refuses if name in OPTIMIZERS else {}
    if not refused:
        return []
    if strategy.engine == "deepspeed" and "deepspeed" in refused:
        able, twins = either(names_without("deepspeed")), "the same stage on PyTorch (zero1, zero2, fsdp)"
        return [f"is not for {strategy}: {refused['deepspeed']}; use {able}, or {twins}"]
    asked: dict[str, tuple[Mode, bool]] = {
        "+tp": ("tp", strategy.tp > 1),
        "zero2, fsdp and hsdp": ("shards", strategy.shards_parameters),
        "+offload": ("offload", strategy.offload),
        "in_backward": ("in_backward", in_backward),
    }
    return [
        f"is not for {option}: {refused[mode]}; use {names_without(mode)[0]}, or "
        + _OTHERWISE.get(mode, f"a strategy without {option}")
        for option, (mode, is_asked) in asked.items()
        if is_asked and mode in refused
    ]


def _blockwise_state(shard: ParameterShard) -> tuple[StateTensor, ...]:
    """Two codes of a byte for each element, and two fp32 scales for each block, with room for as many on each rank."""
    if math.prod(shard.shape) < QUANTISED_FROM:
        return (StateTensor(shard.local, "float32"),) * 2
    blocks = math.ceil(math.prod(shard.fullest) / QUANTISED_BLOCK)
    return (StateTensor(shard.local, "uint8"), StateTensor((blocks,), "float32")) * 2


def _factored_state(shard: ParameterShard) -> tuple[StateTensor, ...]:
    """A number for each row here and one for each column (of a matrix, on every rank), or one for each element."""
    local = shard.local
    if len(shard.shape) < 2:
        return (StateTensor(local),)
    is_matrix = len(shard.shape) == 2 and shard.shape[0] > 1
    columns = (1, local[-1]) if is_matrix else (*local[:-2], min(local[-2], 1), local[-1])
    return StateTensor((*local[:-1], 1)), StateTensor(columns)


def _group_of_muon(shard: ParameterShard) -> int:
    """The first group has the matrices of the blocks, the second all else."""
    return 0 if shard.in_block and len(shard.shape) == 2 else 1


def _state_of_muon(shard: ParameterShard) -> tuple[StateTensor, ...]:
    """A momentum for each matrix of the blocks, the two moments of AdamW for all else."""
    return (StateTensor(shard.local),) * (1 + _group_of_muon(shard))


_WHOLE = "it orthogonalises whole matrices, and a rank holds a part"
_FLATTENED = "DeepSpeed cuts flattened weights anywhere, and its state goes by rows or blocks"

declare(
    OptimizerSpec(
        name="adamw",
        factory="torch.optim:AdamW",
        help="Adam with decoupled weight decay",
        states=2,
        moved_bytes=28.0,
        hyperparameters={"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        arguments={"fused": True},  # one pass over the weights, on CPU and on GPU alike
        elementwise=True,
    )
)
declare(
    OptimizerSpec(
        name="adamw8bit",
        factory="shardwise.optim.adamw8bit:AdamW8bit",
        help="AdamW whose moments take a byte an element (bitsandbytes)",
        states=2,
        scalars=0,  # it counts its steps in a Python number
        plan_scalars=1,
        state=_blockwise_state,
        # bitsandbytes' kernel for GPUs makes none, its CPU code both moments in fp32, the gradient's copy, the
        # denominator and its quotient
        temporaries=(0.0, 0.0),
        cpu_temporaries=(0.0, 5.0),
        moved_bytes=16.0,
        hyperparameters={"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        refuses={
            "deepspeed": _FLATTENED,
            "tp": "its blocks of 256 run along a rank's rows, and parts cut along columns do not go together",
            "dry_run": "its kernels do not run under fake tensors",
        },
        elementwise=True,
        proposed=True,
        package=("bitsandbytes", "pip install 'shardwise[qlora]'"),
    )
)
declare(
    OptimizerSpec(
        name="sgd",
        factory="torch.optim:SGD",  # not fused: PyTorch has no fused SGD for sharded parameters
        help="stochastic gradient descent",
        states=1,
        scalars=0,
        planned_with={"momentum": 0.9},
        moved_bytes=20.0,
        hyperparameters={"momentum": 0.0, "weight_decay": 0.0},
        elementwise=True,
    )
)
declare(
    OptimizerSpec(
        name="adafactor",
        factory="shardwise.optim.adafactor:Adafactor",
        help="second moments as sums over rows and columns (Shazeer 2018, arXiv 1804.04235)",
        states=0,
        state=_factored_state,
        temporaries=(0.0, 2.0),  # the update and a square
        moved_bytes=16.0,
        hyperparameters={"weight_decay": 0.0},
        refuses={
            "deepspeed": _FLATTENED,
            "tp": "its sums over rows and columns are not those of parts that are cut along columns",
            "dry_run": "its step reads sums as numbers, and fake tensors have none",
        },
        proposed=True,
        state_class="torch.optim:Adafactor",
    )
)
declare(
    OptimizerSpec(
        name="muon",
        factory="shardwise.optim.muon:Muon",
        help="orthogonalised momentum for matrices of the blocks, AdamW for the rest (Jordan 2024)",
        states=2,
        state=_state_of_muon,
        group=_group_of_muon,
        temporaries=(0.0, 3.0),  # of a matrix: the update, and in bf16 its orthogonalised copy, the next, and products
        moved_bytes=24.0,
        hyperparameters={"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.95},
        refuses={
            "deepspeed": _FLATTENED,
            "tp": _WHOLE,
            "shards": _WHOLE,
            "in_backward": "it steps all matrices together after the backward",
        },
    )
)
