"""Whole parameters on every rank: DistributedDataParallel, and ZeRO-1, whose optimizer states are on one rank each."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.distributed.comm_timer import COMM_TIMER, EXPOSED_DP
from shardwise.distributed.places import on_one_node
from shardwise.distributed.shared_memory import SharedMemory, share_memory
from shardwise.errors import ModelError, UserError
from shardwise.model.facts import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.stored_types import reduced_dtype
from shardwise.plan.traffic import SHARING_RANKS


def apply_replicate(module: nn.Module, spec: ModelSpec, plan: Plan, world_size: int, device: torch.device) -> nn.Module:
    """Wrap ``module`` in DDP; a single rank gets no wrapper.

    Gradients are stored in the reduction buckets; gradients that ``no_sync`` accumulates before the last micro batch
    are a second copy (seen in the dry run, counted by the estimate). Buffers are broadcast before each forward only if
    there is batch norm, whose running statistics would diverge otherwise.
    """
    if world_size == 1:
        return module
    outer = Replicated(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=plan.find_unused_parameters,
        static_graph=plan.static_graph,
        bucket_cap_mb=plan.bucket_cap_mb,
        **_buffer_option(sync=bool(spec.batch_norms)),
    )
    outer.syncs_buffers = bool(spec.batch_norms)
    sent, outer.memory = reduction_dtype(spec, plan), memory_of_node(device) if not outer.sparse else None
    if sent is not None or outer.memory is not None:
        outer.reduction = BucketReduction(sent, outer.memory)
        # DDP reads annotations, and takes one hook
        DistributedDataParallel.register_comm_hook(outer, outer.reduction, lambda how, bucket: how(bucket))
    return outer


def reduction_dtype(spec: ModelSpec, plan: Plan) -> torch.dtype | None:
    """Return the type in which DDP's buckets are added up, where it is not their own."""
    trained = {p.dtype for p in spec.parameters if p.trainable}
    changed = {reduced_dtype(plan, dtype) for dtype in trained if reduced_dtype(plan, dtype) != dtype}
    found: torch.dtype | None = getattr(torch, changed.pop()) if changed else None
    return found


def memory_of_node(device: torch.device) -> SharedMemory | None:
    """Return the memory that all ranks share, if they are few and of one machine's CPUs; collective."""
    world, ranks = dist.group.WORLD, dist.get_world_size()
    if world is None or device.type != "cpu" or dist.get_backend() != "gloo" or ranks > SHARING_RANKS:
        return None
    return share_memory(world, may=on_one_node(range(ranks)))


@dataclass
class BucketReduction:
    """Adds up DDP's buckets in another type than their own, through memory that ranks share, or both.

    The mean is taken before, and the sum is cast back. What is shared is reduced after the last gradient: while a rank
    computes, none of it would be faster. ``waits``: the bucket is given back at once, as where no other rank answers.
    ``replaced``: a hook of the user's own does all of it.
    """

    dtype: torch.dtype | None
    memory: SharedMemory | None = None
    waits: bool = False
    replaced: Callable[[Any], torch.futures.Future[torch.Tensor]] | None = None
    _ready: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = field(default_factory=list)

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Begin the reduction of one bucket."""
        if self.replaced is not None:
            return self.replaced(bucket)
        own = bucket.buffer()
        if self.memory is not None:
            return self._share(own, self.memory, last=bucket.is_last())
        sent = own.to(self.dtype).div_(dist.get_world_size())
        if self.waits:
            dist.all_reduce(sent)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(own)
            return done
        work = dist.all_reduce(sent, async_op=True).get_future()
        return work.then(lambda done: own.copy_(done.value()[0]))

    def _share(self, own: torch.Tensor, memory: SharedMemory, *, last: bool) -> torch.futures.Future[torch.Tensor]:
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._ready.append((own, reduced))
        if last:
            ready, self._ready = self._ready, []
            buckets = [bucket for bucket, _ in ready]
            sent = buckets if self.dtype is None else [bucket.to(self.dtype) for bucket in buckets]
            with COMM_TIMER.part(EXPOSED_DP):  # DDP's hooks run before those that would find the last gradient
                memory.mean(sent)
            if sent is not buckets:
                torch._foreach_copy_(buckets, sent)
            for bucket, done in ready:
                done.set_result(bucket)
        return reduced


class Replicated(DistributedDataParallel):
    """DDP that forwards attributes of the user's model (``model.config``, ``model.generate``).

    ``forwards`` counts calls: a backward of a loss that did not come from one reduces nothing. With
    ``syncs_buffers`` every forward is collective, also without gradients.
    """

    forwards = 0
    syncs_buffers = False
    reduction: BucketReduction | None = None
    memory: SharedMemory | None = None

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._reduced = [p for p in module.parameters() if p.requires_grad]  # in DDP's order
        sparse = (part.weight for part in module.modules() if getattr(part, "sparse", False) is True)
        self.sparse = {id(weight) for weight in sparse if isinstance(weight, nn.Parameter)}
        self._marks: list[int] = []

    def __getstate__(self) -> Any:
        """Leave out what a copy, which has no hook, cannot take along."""
        kept = {name: one for name, one in super().__getstate__().items() if name not in ("memory", "reduction")}
        return kept | {"_comm_hooks": []}

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce by a hook of the user's own, as DDP does."""
        if self.reduction is None or self.reduction.dtype is not None or self.reduction.replaced is not None:
            super().register_comm_hook(state, hook)  # raises where there is one
        else:
            self.reduction.replaced = functools.partial(hook, state)

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Join uneven inputs as DDP does.

        Raises:
            UserError: by a divisor that becomes smaller, which DDP does not tell a hook.
        """
        options = inspect.signature(DistributedDataParallel.join).bind(self, *args, **kwargs)
        if self.reduction is not None and not options.arguments.get("divide_by_initial_world_size", True):
            raise UserError(
                "model.join(divide_by_initial_world_size=False): gradients are averaged over all ranks here; leave it "
                "out, or leave out join: a session gives ranks without data empty batches"
            )
        return super().join(*args, **kwargs)

    def mark(self) -> None:
        """Save references to the gradients before a backward that reduces."""
        self._marks = [-1 if p.grad is None else p.grad._version for p in self._reduced]

    def late(self) -> list[nn.Parameter]:
        """Return the parameters that DDP still waits for after a backward that reduces."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            listed = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
            if listed is None:
                raise
            return [self._reduced[int(index)] for index in listed.group(1).split()]
        marks = self._marks or [-1] * len(self._reduced)
        for p, mark in zip(self._reduced, marks, strict=True):
            if p.grad is not None and p.grad._version != mark:
                return []
        return list(self._reduced)  # the backward has reached no parameter, and DDP has not started to wait

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; a backward after it reduces gradients."""
        self.forwards += int(torch.is_grad_enabled())
        return super().forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def finish_reduction(outer: nn.Module) -> list[nn.Parameter]:
    """Complete a reducing backward that left parameters without gradients.

    Return those without any this step.

    DDP reduces a bucket once each of its parameters has had a gradient in that backward, and otherwise leaves the rest
    of the step unreduced. Zeros replace missing gradients (added to gradients of earlier micro batches), by a
    second backward of the missing parameters alone. DDP itself reports which are missing, which is free where none
    are; ``find_unused_parameters`` would walk the graph in each forward.
    """
    if not isinstance(outer, Replicated) or not outer.require_backward_grad_sync:
        return []
    late = outer.late()
    missing = [p for p in late if p.grad is None]
    if any(id(p) in outer.sparse for p in late):
        raise ModelError(
            "this rank's samples do not use an embedding with sparse=True that other ranks may use, and sparse "
            "gradients of some ranks alone cannot be reduced; build it with sparse=False"
        )
    if late:
        frozen = [p for p in late if not p.requires_grad]  # frozen after DDP was built: it still waits for them
        for p in frozen:
            p.requires_grad_(True)
        torch.autograd.backward(late, [torch.zeros_like(p) for p in late])
        for p in frozen:
            p.requires_grad_(False)
        outer.reducer._check_reducer_finalized()
    return missing


def _buffer_option(*, sync: bool) -> dict[str, Any]:
    """Return DDP's buffer option under the name that this PyTorch uses (renamed in 2.13)."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": sync}


def shard_optimizer(optimizer: Optimizer, memory: SharedMemory | None = None) -> Optimizer:
    """Shard the optimizer's state over the ranks by full parameters.

    Each rank steps the parameters that are assigned to it to balance them, and broadcasts them. A parameter is never
    split, so the largest one limits the balance. Frozen parameters are left out: they would be broadcast needlessly. A
    single rank keeps its optimizer. Ranks that share ``memory`` send through it.
    """
    if dist.get_world_size() == 1:
        return optimizer
    with warnings.catch_warnings():  # torch.distributed.optim still uses torch.jit.script at import
        warnings.simplefilter("ignore", DeprecationWarning)
        from shardwise.parallel.data_parallel.sharded_optimizer import ShardedOptimizer
    kind = type(optimizer)
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ModelError(
            "a learning-rate scheduler was built before session.prepare, and zero1 replaces the optimizer; "
            "build the scheduler from the optimizer that prepare returns"
        )
    accepted = inspect.signature(kind).parameters
    defaults: dict[str, Any] = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    groups = []
    for group in optimizer.param_groups:
        groups.append({**group, "params": [p for p in group["params"] if p.requires_grad]})  # custom keys, too
    try:
        made = ShardedOptimizer(groups, kind, **defaults)
    except (TypeError, ValueError) as error:
        raise ModelError(f"zero1 cannot build {kind.__name__} from its defaults ({error}); use fsdp or ddp") from None
    made.memory = memory
    return made
