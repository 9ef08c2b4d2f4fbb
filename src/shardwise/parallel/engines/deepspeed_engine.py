"""Apply a plan with DeepSpeed: the user's model and optimizer in ``deepspeed.initialize``.

The order of `apply_deepspeed` is that of `parallel.apply`: check → batch norm → recompute → weights → partition →
optimizer → engine. Weights are rank 0's; other ranks get theirs unit by unit, so that under ZeRO-3 only rank 0 has
more than its shard and one unit. Only the modules of this package that need DeepSpeed import it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.environment import local_rank_told
from shardwise.errors import ModelError, PlanError, ShardwiseError, UserError
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name, read_model
from shardwise.parallel.activation_checkpointing import apply_recompute
from shardwise.parallel.apply import (
    _MARK,
    Applied,
    apply_batch_norm,
    apply_to_optimizer,
    parameter_names,
    stop_caching,
)
from shardwise.parallel.data_parallel.unsupported import refuse_unsupported_of_engine
from shardwise.parallel.decide import check_model, refuse_renorm
from shardwise.parallel.engines.deepspeed_available import check_ready, forget_groups, import_deepspeed
from shardwise.parallel.engines.deepspeed_backward import OwnBackward
from shardwise.parallel.engines.deepspeed_nvme import SwapFolder
from shardwise.parallel.engines.deepspeed_order import GradientOrder, SameModules
from shardwise.parallel.engines.deepspeed_partitions import (
    all_states,
    find_local,
    link_states,
    make_states,
    own_range,
    part_of,
    set_local,
)
from shardwise.parallel.engines.deepspeed_unused import StandStill
from shardwise.parallel.engines.engine import EngineTensors, note_engine
from shardwise.parallel.materialize import broadcast_buffers, make_contiguous, materialize
from shardwise.parallel.precision import DTYPES
from shardwise.parallel.unsupported_tensors import check_tensors
from shardwise.plan.deepspeed_stages import Location, deepspeed_config, zero_stage
from shardwise.plan.plan import Plan

Weights = dict[str, torch.Tensor]
CheckOptimizer = Callable[[Optimizer, nn.Module, Plan, Ranks], None]


def apply_deepspeed(
    module: nn.Module, optimizer: Optimizer, plan: Plan, ranks: Ranks, check_optimizer: CheckOptimizer
) -> tuple[Applied, Optimizer]:
    """Apply ``plan`` to ``module`` and ``optimizer`` on this rank with DeepSpeed. Collective.

    Uses the existing process group. The returned optimizer is the user's own, whose parameters are now
    DeepSpeed's flat shards: set learning rates on its groups as usual; `Engine.update` steps it. ``check_optimizer``
    raises if the optimizer cannot step flattened parameters; it is called on all ranks, ahead of them.

    Raises:
        UserError: DeepSpeed is not available.
        PlanError: the plan is for a different number of ranks.
        ModelError: the model or the optimizer is not supported.
    """
    if getattr(module, _MARK, False):
        raise ModelError("this model was prepared by an earlier session; rebuild it, or continue with that session")
    check_tensors(module, plan)
    names, spec = parameter_names(module), read_model(module)
    check_for_deepspeed(spec, optimizer, plan)
    refuse_renorm(module, plan)
    if plan.dims.world_size != dist.get_world_size():
        raise PlanError(
            f"the plan is for {plan.dims.world_size} ranks ({plan.dims}), but {dist.get_world_size()} are running; "
            f"start {plan.dims.world_size} ranks or make a new plan"
        )
    deepspeed, device = import_deepspeed(), ranks.device
    check_optimizer(optimizer, module, plan, ranks)
    swap = _ready_to_swap(plan, ranks) if plan.parsed.nvme else None
    module, notes = apply_batch_norm(module, spec, plan)
    if plan.recompute != "none":
        notes += stop_caching(module)
    setattr(module, _MARK, True)
    blocks = apply_recompute(module, plan.recompute, spec.blocks, layers=plan.recompute_layers)
    largest = max(p.num_elements for p in spec.parameters)
    config = deepspeed_config(plan, largest_parameter=largest)
    with local_rank_told(ranks.local_rank):
        deepspeed.init_distributed(verbose=False)  # uses the existing group
        originals = _originals(module, plan)
        if zero_stage(plan) == 3:
            _partition(module, blocks, plan, config, device)
        else:
            materialize(module, device, broadcast=False)  # DeepSpeed broadcasts rank 0's weights itself
            make_contiguous(module)
        broadcast_buffers(module)
        bare = Applied(plan, module, module, tuple(blocks), spec)
        optimizer = _trained_only(apply_to_optimizer(optimizer, names, bare, plan))
        groups = _groups(module, optimizer)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its memory use
            inner, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    if inner.optimizer.optimizer is not optimizer:
        raise ModelError(f"DeepSpeed replaces {type(optimizer).__name__} by its own; use AdamW or SGD, or fsdp")
    _keep_gradients(inner.optimizer)
    engine = DeepSpeed(inner, optimizer, plan, ranks, groups, swap)
    if plan.precision != "fp32":  # DeepSpeed rounded them before it copied them
        engine.set_weights(lambda name: _sent(originals.pop(name, None), engine.shape(name), device))
    note_engine(module, engine)
    refuse_unsupported_of_engine(inner, plan.strategy)
    return Applied(plan, inner, module, tuple(blocks), spec, warnings=notes, engine=engine), optimizer


def _ready_to_swap(plan: Plan, ranks: Ranks) -> SwapFolder:
    """Compile the swap library and lock the folder on one process per machine.

    A failure raises on all ranks.

    Raises:
        UserError: as `check_ready` and `SwapFolder`.
    """
    failure, swap = "", SwapFolder(plan.nvme_path or "", holds=False)
    machines = gather_text(platform.node() or "?", ranks)  # an adopted group may have no local ranks
    if machines.index(machines[ranks.rank]) == ranks.rank:
        try:
            check_ready(nvme=True, nvme_path=plan.nvme_path, log=logging.getLogger("shardwise").warning)
            swap = SwapFolder(plan.nvme_path or "", holds=True)
        except ShardwiseError as error:
            failure = str(error)
    failures = [text for text in gather_text(failure, ranks) if text]
    if failures:
        swap.close()
        raise UserError(*failures[0].splitlines())
    return swap


def check_for_deepspeed(spec: ModelSpec, optimizer: Optimizer, plan: Plan) -> None:
    """Refuse what DeepSpeed does not support, before anything is changed.

    Raises:
        ModelError: lists all obstacles.
    """
    check_model(spec, plan)
    problems = []
    odd = sorted({p.dtype for p in spec.parameters if p.dtype != "float32"})
    if odd:
        problems.append(
            f"{plan.strategy} keeps fp32 weights with the optimizer, and the model has parameters of {', '.join(odd)}; "
            "build it in fp32 (parallel.precision sets the compute dtype), or use fsdp"
        )
    if type(optimizer).__name__ == "Adagrad":
        problems.append("DeepSpeed rebuilds Adagrad without its parameter groups; use AdamW or SGD, or fsdp")
    if problems:
        raise ModelError(*problems)


def _trained_only(optimizer: Optimizer) -> Optimizer:
    """Remove frozen parameters and groups without trained ones; DeepSpeed requires that."""
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _groups(module: nn.Module, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
    """Return the parameter names of each optimizer group."""
    names = parameter_names(module)
    return tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)


def _originals(module: nn.Module, plan: Plan) -> Weights:
    """Copy rank 0's fp32 weights if DeepSpeed will round those of the module in place.

    Else empty.
    """
    if plan.precision == "fp32" or dist.get_rank() != 0:
        return {}
    return {clean_name(name): p.detach() for name, p in module.named_parameters()}


def _sent(original: torch.Tensor | None, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Broadcast one of rank 0's weights to every rank."""
    full = (
        torch.empty(shape, device=device)
        if original is None
        else original.to(device).clone(memory_format=torch.contiguous_format)
    )
    if dist.get_world_size() > 1:
        dist.broadcast(full, src=0)
    return full


def _partition(
    module: nn.Module, blocks: Sequence[nn.Module], plan: Plan, config: dict[str, Any], device: torch.device
) -> None:
    """Materialize and partition unit by unit, so that one unit is unsharded at a time."""
    from deepspeed import zero

    narrow, swapper = DTYPES[plan.precision], None
    for unit in (*blocks, module):
        materialize(unit, device, broadcast=False)
        make_contiguous(unit)
        for parameter in unit.parameters():
            if not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(narrow)
        made = zero.Init(module=unit, config_dict_or_path=config, param_swapper=swapper)  # the config has the dtype
        if swapper is None and made.param_swapper is not None:
            _swap_each_once(made.param_swapper)
        swapper = made.param_swapper  # its buffers are shared by all units


def _keep_gradients(zero: Any) -> None:
    """Make the update read gradients from memory, where DeepSpeed has them, not from the drive.

    A swapped gradient is read back wrongly (0.19.8: seen for parts that do not begin at a multiple of the drive's
    read size): the update is then silently wrong.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return

    def keep(parameter: Any, gradient_offsets: Sequence[int], gradient_tensors: Sequence[torch.Tensor]) -> None:
        info = swapper.swap_params_info.get(parameter.ds_id)
        if info is not None:
            info.unswapped_gradients |= dict(zip(gradient_offsets, gradient_tensors, strict=True))

    swapper.swap_out_gradients = keep


def _swap_each_once(swapper: Any) -> None:
    """Allow a parameter to be requested twice in one read call, at which DeepSpeed would stop.

    It prefetches in the order of use, where the parameter that ends the forward also begins the backward (0.19.8).
    """
    plain = swapper.swap_in

    def swap_in(params: Sequence[Any], *args: Any, **options: Any) -> Any:
        return plain(list({param.ds_id: param for param in params}.values()), *args, **options)

    swapper.swap_in = swap_in


class DeepSpeed:
    """DeepSpeed's engine behind the interface of a session; see `Engine`."""

    title = "DeepSpeed"

    def __init__(
        self,
        inner: Any,
        optimizer: Optimizer,
        plan: Plan,
        ranks: Ranks,
        groups: tuple[tuple[str, ...], ...],
        swap: SwapFolder | None = None,
    ) -> None:
        self.inner = inner
        self.swap = swap
        self.groups = groups  # parameter names of each optimizer group; the groups contain flat shards now
        self.plan = plan
        self.stage = zero_stage(plan)
        self.base = optimizer
        self._by_name = {clean_name(name): p for name, p in inner.module.named_parameters()}
        trained = {name: p for name, p in self._by_name.items() if p.requires_grad}
        self._untrained = {name: p for name, p in self._by_name.items() if name not in trained}
        self._order = GradientOrder(self.zero, list(trained), list(trained.values()), ranks)
        if self.stage == 3:
            SameModules(self.zero.parameter_offload.get_param_coordinator(), inner.module, plan.strategy, ranks)
        OwnBackward(inner, plan.strategy)
        self._versions = self._seen_versions()
        self._parts = {name: part_of(self.zero, p) for name, p in trained.items()}
        self._still = StandStill(optimizer, self._parts)

    @property
    def zero(self) -> Any:
        """Return DeepSpeed's own optimizer, which wraps the user's."""
        return self.inner.optimizer

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Map names to parameters as they are between forwards: empty shells under ZeRO-3."""
        return dict(self._by_name)

    def shape(self, name: str) -> torch.Size:
        """Return the unsharded shape of a parameter."""
        parameter = self._by_name[name]
        return getattr(parameter, "ds_shape", parameter.shape)

    @property
    def gathers(self) -> bool:
        """See `Engine`."""
        return self.stage == 3

    def live_stage(self) -> int:
        """Return the ZeRO stage from DeepSpeed's state: 3 for sharded parameters, 2 for gradients."""
        if all(hasattr(p, "ds_tensor") for p in self._by_name.values()):
            return 3
        return 2 if getattr(self.zero, "partition_gradients", False) else 1

    def places(self) -> tuple[Location, Location]:
        """Return where optimizer state and parameters are stored, from DeepSpeed's own settings."""
        zero = self.zero
        away = bool(getattr(zero, "offload_optimizer", False) or getattr(zero, "cpu_offload", False))
        state: Location = "nvme" if getattr(zero, "swap_optimizer", False) else "cpu" if away else "device"
        if not getattr(zero, "offload_param", False):
            return state, "device"
        return state, "nvme" if zero.params_in_nvme_and_cpu else "cpu"

    def begin_micro(self, *, last: bool) -> None:
        """See `Engine`."""
        self.inner.set_gradient_accumulation_boundary(last)
        if self.stage == 3:  # micro batches are counted where the model is called; a loop may call a part of it
            self.zero.clear_backward_seen_flag()

    def backward(self, loss: torch.Tensor) -> None:
        """See `Engine`. DeepSpeed would divide by the accumulation; the loss is already normalised."""
        self.inner.backward(loss, scale_wrt_gas=False)

    def update(self, clip_norm: float | None) -> float:
        """See `Engine`.

        Raises:
            ModelError: parameters that were frozen in `prepare` are not frozen any more.
        """
        unfrozen = [name for name, p in self._untrained.items() if p.requires_grad]
        missing, problem = self._order.agree(bool(unfrozen))
        if problem:
            more = f" and {len(unfrozen) - 3} more" if len(unfrozen) > 3 else ""
            raise ModelError(
                f"{', '.join(unfrozen[:3]) or 'a parameter of another rank'}{more} was frozen when the session was "
                f"prepared and is not any more, and {self.plan.strategy} has no place for its gradient: prepare it "
                "with requires_grad, and freeze it afterwards"
            )
        self._take_over()
        self._still.expect(missing)
        self._order.begin()
        self.zero.clip_grad = 0.0 if clip_norm is None else float(clip_norm)
        self.inner.step()
        skipped = bool(getattr(self.zero, "overflow", False))
        self._versions = self._seen_versions()
        norm = self.inner.get_global_grad_norm()
        return math.nan if skipped or norm is None else float(norm)

    def gradient(self, name: str) -> torch.Tensor | None:
        """See `Engine`."""
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor | None = safe_get_full_grad(self._by_name[name])
        return None if found is None else found.detach().float()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine`."""
        from deepspeed.utils import safe_get_full_fp32_param

        self._take_over()
        for name, parameter in self._by_name.items():
            if parameter.requires_grad:
                yield name, safe_get_full_fp32_param(parameter).detach().view(self.shape(name))
            else:
                yield name, self._frozen(parameter).float()

    def set_weights(self, new: Callable[[str], torch.Tensor]) -> None:
        """See `Engine`."""
        for name, parameter in self._by_name.items():
            full = new(name)
            if parameter.requires_grad:
                set_local(self.zero, parameter, full, None)
            self._set_computing(parameter, full)
        self._versions = self._seen_versions()

    def states(self, name: str) -> dict[str, torch.Tensor]:
        """Return a parameter's optimizer state, unsharded if it has its shape. Collective.

        Empty before its first update, and for a parameter that is not trained.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        parameter = self._by_name[name]
        found: dict[str, torch.Tensor] = {}
        if name in self._still.fresh:
            return found
        if self.stage < 3:
            link_states(self.zero)
        states = all_states(self.zero, parameter)
        for key in sorted(states):  # dictionaries may be ordered differently on other ranks
            value = states[key]
            if value is None:
                found[key] = safe_get_full_optimizer_state(parameter, key).detach().view(self.shape(name))
            else:
                found[key] = value
        return found | self._still.apart.get(name, {})

    def set_state(self, name: str, key: str, full: torch.Tensor) -> None:
        """Write an unsharded tensor into a parameter's optimizer state."""
        set_local(self.zero, self._by_name[name], full, key)

    def make_states(
        self, groups: list[dict[str, torch.Tensor | None]], apart: dict[str, dict[str, torch.Tensor] | None]
    ) -> None:
        """See `Engine`."""
        make_states(self.zero, groups)
        self._still.apart = {name: dict(numbers or {}) for name, numbers in apart.items()}
        self._still.fresh = {name for name, numbers in apart.items() if numbers is None}

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine`."""
        for name, part in self._parts.items():
            yield name, part.of(part.flat)

    def range_of(self, name: str) -> tuple[int, int]:
        """Return this rank's range of a flattened parameter in the optimizer: begin and end."""
        return own_range(self._by_name[name])

    def local_tensors(self) -> EngineTensors:
        """See `Engine`."""
        return find_local(self.zero, self.base, list(self._by_name.values()))

    def discard(self) -> None:
        """See `Engine`."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        if hasattr(zero, "clear_hp_grads"):  # ZeRO-1 in bf16
            zero.clear_hp_grads()
        if self.stage < 3:
            zero.micro_step_id = -1
            for kept in ("averaged_gradients", "all_grad_tensors"):
                getattr(zero, kept, {}).clear()
        for parameter in self._by_name.values():
            parameter.grad = None
        self._order.begin()

    def close(self) -> None:
        """See `Engine`."""
        note_engine(self.inner.module, None)
        self._order.remove()
        self._still.remove()
        self.inner.destroy()
        forget_groups()
        if self.swap is not None:
            if dist.is_initialized():
                dist.barrier()  # no rank removes files that another one still reads
            self.swap.close()

    def _seen_versions(self) -> dict[str, int]:
        """Return PyTorch's version counters of the parameters, which count in-place changes."""
        return {name: p._version for name, p in self._by_name.items()}

    def _take_over(self) -> None:
        """Copy in-place weight changes to the fp32 ones, from which an update recreates them.

        Raises:
            ModelError: under ZeRO-3, where a parameter is an empty shell between forwards.
        """
        changed = [name for name, p in self._by_name.items() if p._version != self._versions[name]]
        if changed and self.stage == 3:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ModelError(
                f"{', '.join(changed[:3])}{more} was changed in place, but {self.plan.strategy} keeps its weight "
                "elsewhere, in parts; change weights before session.prepare, or use deepspeed-zero2 or fsdp"
            )
        for parameter in (self._by_name[name] for name in changed):
            if parameter.requires_grad:
                set_local(self.zero, parameter, parameter, None)
        self._versions = self._seen_versions()

    def _frozen(self, parameter: nn.Parameter) -> torch.Tensor:
        if self.stage < 3:
            return parameter.detach().clone()
        from deepspeed import zero

        with zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _set_computing(self, parameter: nn.Parameter, full: torch.Tensor) -> None:
        """Write the compute parameter.

        Otherwise DeepSpeed would change it only after the next update.
        """
        with torch.no_grad():
            if self.stage < 3:
                parameter.copy_(full)
                return
            from deepspeed import zero

            with zero.GatheredParameters([parameter], modifier_rank=0):
                if dist.get_rank() == 0:
                    parameter.copy_(full)
