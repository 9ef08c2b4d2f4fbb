"""Reference gradients of one process, computed outside of any group, with their noise.

A model may ask for the world size. Computed among ranks, the reference could contain the error that it should find; so
it is computed before there is a group, and passed to the ranks as files.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.checkpoint.readers.huggingface import HuggingFaceSource
from shardwise.checkpoint.shard_files import write_file
from shardwise.distributed.process_group import join, leave
from shardwise.errors import ModelError, ShardwiseError
from shardwise.gradcheck.batches import STEPS, Batch, Data, Key, Reference, global_batch, reference
from shardwise.gradcheck.compare import TOLERANCE, compare
from shardwise.model.call_module import call
from shardwise.plan.plan import Plan
from shardwise.train.loss import token_loss_sum

NOISY = 1e-6  # of plain PyTorch's own gradient, computed in two ways: above it there is no valid reference
_NOISE = "noise.json"
_NO_GROUP = "process group"  # in torch's error where a group is needed and missing


Result = TypeVar("Result")


def write_references(make: Callable[[], nn.Module], data: Data, plans: Sequence[Plan], folder: Path) -> None:
    """Compute the references of all global batches of ``plans`` into ``folder``.

    To be called outside of any group. A model that cannot run without a group is computed in a group of one.

    Raises:
        ModelError: the model raised something.
    """
    for plan, step in itertools.product(plans, STEPS):
        batches = global_batch(data, plan, step)
        name = _name(plan, step, batches)
        if (folder / f"{name}.json").exists():
            continue
        if not (folder / _NOISE).exists():
            (folder / _NOISE).write_text(json.dumps(_alone(partial(_noise, make, batches))))
        made = _alone(partial(_computed, make, batches))
        found = {name: gradient for name, gradient in made.gradients.items() if gradient is not None}
        values = {name: torch.view_as_real(g) if g.is_complex() else g for name, g in found.items()}
        write_file(folder / f"{name}.safetensors", values)
        facts = {"norm": made.norm, "loss": made.loss, "tokens": made.tokens}
        (folder / f"{name}.json").write_text(json.dumps(facts))


def _computed(make: Callable[[], nn.Module], batches: Mapping[Key, Batch]) -> Reference:
    return reference(make(), batches)


def _alone(compute: Callable[[], Result]) -> Result:
    """Run a model where there is no other rank."""
    try:
        return compute()
    except ShardwiseError:
        raise
    except Exception as error:
        if _NO_GROUP not in str(error):
            raise ModelError(
                f"one process alone cannot compute the model's gradient: {type(error).__name__}: {error}"
            ) from error
    ranks = join("cpu")
    try:
        return compute()
    finally:
        leave(ranks)


def _name(plan: Plan, step: int, batches: Mapping[Key, Batch]) -> str:
    return f"{plan.dims.dp}-{plan.grad_accum}-{plan.micro_batch or 1}-{step}-{len(batches)}"


def _noise(make: Callable[[], nn.Module], batches: Mapping[Key, Batch]) -> float:
    """Return the difference between the batch's gradient at once and sample by sample."""
    full = reference(make(), batches).gradients
    apart = reference(make(), batches, one_by_one=True).gradients
    return max((d.error for d in compare(full, apart)), default=0.0)


class References:
    """References that `write_references` left in ``folder``."""

    def __init__(self, make: Callable[[], nn.Module], folder: Path) -> None:
        self._folder = folder
        self._noise: float = json.loads((folder / _NOISE).read_text())
        self.tolerance = max(TOLERANCE, 10 * self._noise)
        self._known: dict[str, Reference] = {}
        self._trained = {n: p.is_complex() for n, p in make().named_parameters() if p.requires_grad}

    def of(self, plan: Plan, step: int, batches: Mapping[Key, Batch]) -> Reference:
        """Return the reference of one global batch.

        Raises:
            ModelError: one process does not reproduce its own gradient, so there is nothing to compare with.
        """
        if not self._noise <= NOISY:
            raise ModelError(
                "one process alone does not reproduce this model's gradient: a batch at once and its samples one by "
                f"one differ by {self._noise:.1e}. The model draws random numbers, or its samples depend on each "
                "other (batch norm), so no strategy can give the same gradient; use group norm or layer norm"
            )
        name = _name(plan, step, batches)
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> Reference:
        facts = json.loads((self._folder / f"{name}.json").read_text())
        with HuggingFaceSource(self._folder / f"{name}.safetensors") as source:
            values = {n.removeprefix("model/"): source.read(n, info.full) for n, info in source.tensors.items()}
        gradients = {
            n: None if n not in values else torch.view_as_complex(values[n]) if is_complex else values[n]
            for n, is_complex in self._trained.items()
        }
        return Reference(gradients, facts["norm"], facts["loss"], facts["tokens"])


class _OwnCalls(TorchDispatchMode):
    """Names of the collectives that pass the dispatcher."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.add(func._overloadpacket.__name__.strip("_"))
        return func(*args, **(kwargs or {}))


def refuse_own_collectives(model: nn.Module, batch: Batch) -> None:
    """Check that the bare model does not communicate, by one batch on every rank at once.

    Collective. Ranks do not have the same number of micro batches in every step, and a model that communicates would
    hang.

    Raises:
        ModelError: it communicates.
    """
    with _OwnCalls() as recorder:
        token_loss_sum(call(model, batch[0]), batch[1]).backward()
    if recorder.names:
        raise ModelError(
            f"the model itself talks to other ranks ({', '.join(sorted(recorder.names))}) in its forward or backward: "
            "one process has none, and where ranks have different numbers of micro batches one of them waits for ever, "
            "so there is nothing to verify; compute from the rank's own batch alone"
        )
