"""Record one optimizer step of any loop: hooks on the model and the optimizer, and the collective recorder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from shardwise.measure import state
from shardwise.measure.collectives import OTHER, CollectiveRecorder
from shardwise.model.read import dtype_name
from shardwise.observation.step_clock import StepClock
from shardwise.receipts.expected_part import never_reduced
from shardwise.receipts.lines.sample_lines import tensor_bytes

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"}
_REDUCTIONS = {"all_reduce", "reduce_scatter"}
_ORDINARY: dict[Any, bool] = {}  # by operator: whether nothing but its phase matters


class _Dispatches(CollectiveRecorder):
    """Collective recorder that also calls ``on_operator`` before each operator, with its phase, and tells ``clock``."""

    def __init__(
        self, phase: Callable[[], str], on_operator: Callable[[str, str], None], clock: StepClock | None
    ) -> None:
        super().__init__(phase, lambda name, ranks: OTHER)
        self._on_operator, self._clock = on_operator, clock
        self._seen = ""  # phase of the operator before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ordinary = _ORDINARY.get(func)
        if ordinary is None:
            packet = getattr(func, "_overloadpacket", None)
            if packet is None:
                return super().__torch_dispatch__(func, types, args, kwargs)
            ordinary = _ORDINARY[func] = func.namespace == "aten" and packet.__name__ not in _PRODUCTS
        clock, phase = self._clock, self._phase()
        if clock is not None:
            clock.count()
        if ordinary and phase == self._seen and (clock is None or clock.part == phase):
            return func(*args, **(kwargs or {}))
        self._seen, name = phase, func._overloadpacket.__name__
        if clock is not None:
            return self._timed(clock, name, func, types, args, kwargs)
        self._on_operator(phase, name)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _timed(self, clock: StepClock, name: str, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with clock.own:
            phase, recorded = self._phase(), len(self.collectives)
            self._on_operator(phase, name)
            clock.see_operator(phase, name, args)
        began = perf_counter()
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.collectives) > recorded:
            with clock.own:
                clock.launch(self.collectives[-1], began, made)
        return made


class LoopTrace:
    """Records of one step, from the end of the previous one; `start` and `stop` bound it.

    Phases: ``forward`` (of the model, with gradients), ``backward``, ``optimizer``, and ``other``, the loop's own code.
    """

    def __init__(
        self,
        root: nn.Module,
        wrapper: nn.Module | None,
        optimizers: Sequence[Optimizer],
        clock: StepClock | None = None,
    ) -> None:
        self.root, self.wrapper, self.optimizers, self.clock = root, wrapper, optimizers, clock
        self._own: contextlib.AbstractContextManager[None] = contextlib.nullcontext() if clock is None else clock.own
        self.samples: list[str] = []
        self.marks: list[int] = []  # per backward: how many collectives were recorded before it
        self.ends: list[int] = []  # and after it
        self.forwards = self.bypassed = self.sync_refused = self.products = self.recomputed = 0
        self.training: bool | None = None
        self.quiet: tuple[str, ...] = ()
        self.norms: dict[int, float] = {}  # at the step, by the id of the parameter
        self.norm_backward: float | None = None
        self.gradient_dtypes: set[str] = set()
        self._recorder: _Dispatches | None = None
        self._recording = self._in_backward = self._stepping = self._refused = self._times_only = False
        self._running: list[bool] = []  # with gradients, per nested forward
        self._hooks: list[Any] = []

    @property
    def recorder(self) -> _Dispatches:
        """Recorder of collectives and products."""
        assert self._recorder is not None
        return self._recorder

    def attach(self) -> None:
        """Register the hooks; records begin with `start`."""
        inside = self.wrapper is not None and getattr(self.wrapper, "module", None) is self.root
        modules = [self.wrapper, self.root] if self.wrapper is not None and inside else [self.root]
        for module in modules:
            enter = self._enter_root if module is self.root else self._enter
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def start(self, *, times_only: bool = False) -> None:
        """Begin to record every operator; ``times_only`` leaves gradients alone."""
        self._times_only = times_only
        self.marks, self.ends, self._in_backward = [], [], False
        self._recorder = _Dispatches(self._phase, self._on_operator, self.clock)
        self._recorder.__enter__()
        self._recording = True
        self.samples = []
        if self.clock is not None:
            self.clock.start()

    def pause(self) -> None:
        """Remove the recorder; the records and the hooks stay."""
        if self.clock is not None:
            self.clock.stop()
        if self._recording:
            _remove_mode(self.recorder)
        self._recording = False

    def stop(self, running: Any = None) -> None:
        """Remove every hook, too. ``running`` is the optimizer's hook that calls this."""
        self.pause()
        remove_hooks(self._hooks, self.root, running)
        self._hooks = []

    def backward_elements(self) -> list[int]:
        """Count the gradient elements reduced in each backward."""
        return [self._reduced(first, end) for first, end in zip(self.marks, self.ends, strict=False)]

    def after_elements(self) -> int:
        """Count the elements that the loop reduced by itself after the last backward."""
        return self._reduced(self.ends[-1], None, "other") if self.ends else 0

    def _reduced(self, first: int, end: int | None, phase: str = "backward") -> int:
        sums = dict.fromkeys(_REDUCTIONS, 0)
        for item in self.recorder.collectives[first:end]:
            dtype = getattr(torch, item.dtype)
            if item.phase == phase and item.name in _REDUCTIONS and dtype.is_floating_point:
                sums[item.name] += item.num_bytes // dtype.itemsize
        return sums["reduce_scatter"] or sums["all_reduce"]  # HSDP reduces the scattered part again

    def _phase(self) -> str:
        if self._stepping:
            return "optimizer"
        if self._running and self._running[-1]:
            return "forward"  # also of `autograd.grad` in it
        return "backward" if torch._C._current_graph_task_id() != -1 else "other"

    def _mark(self) -> None:
        if self.clock is not None:
            self.clock.at(self._phase())

    def _on_operator(self, phase: str, name: str) -> None:
        if phase == "backward":
            if not self._in_backward:
                self._begin_backward()
            if name in _PRODUCTS and torch.is_grad_enabled():  # operators of a backward itself run without
                self.recomputed += 1
            wrapper = self.wrapper
            if isinstance(wrapper, DistributedDataParallel) and name == "allreduce_" and not self._refused:
                self._refused = not wrapper.require_backward_grad_sync
                self.sync_refused += self._refused
            return
        if self._in_backward:
            self._finish_backward()
        if phase == "forward" and name in _PRODUCTS:
            self.products += 1

    def _begin_backward(self) -> None:
        self._in_backward, self._refused = True, False
        self.marks.append(len(self.recorder.collectives))
        if self.clock is not None:
            self.clock.begin_backward()

    def _finish_backward(self) -> None:
        self._in_backward = False
        self.ends.append(len(self.recorder.collectives))
        if self._times_only:
            return
        with _disable_current_modes(), torch.no_grad():
            self.norm_backward = _total(list(gradient_norms(self.root).values()))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        recomputes = torch._C._current_graph_task_id() != -1
        self._running.append(torch.is_grad_enabled() and not recomputes)
        self._mark()

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter(module, args, kwargs)
        if self.clock is not None:
            self.clock.enter_model()
        with self._own:
            self._see_inputs(module, args, kwargs)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running[-1] or not self._trains(module):
            return
        active = DistributedDataParallel._get_active_ddp_module()
        if self.wrapper is None and active is not None and active.module is module:  # a callback gets the module alone
            self.wrapper = active
        if self._recorder is not None and self.ends and not self._has_gradient():
            self._forget()  # fp16's scaler has skipped a step: this one begins anew
        self.forwards += 1
        if isinstance(self.wrapper, DistributedDataParallel) and self.wrapper.module is module:
            self.bypassed += active is not self.wrapper
        with _disable_current_modes():
            digests = _digests(args, kwargs)
            self.samples += digests
            if self.clock is not None:
                self.clock.see_inputs(digests, args, kwargs)
        if self.training is None:
            self.training = module.training
            self.quiet = tuple(name for name, part in random_modules(module) if not part.training)

    def _trains(self, module: nn.Module) -> bool:
        """Return whether a forward counts: one in evaluation mode does not beside one in training mode."""
        if module.training and self.training is False:
            self.samples, self.training = [], None
            self.forwards = self.bypassed = 0
        return module.training or not self.training

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
            self._mark()

    def _has_gradient(self) -> bool:
        """Return whether a gradient of this step exists; FSDP2 and engines keep unreduced ones elsewhere."""
        kept = not all(isinstance(one, Optimizer) for one in self.optimizers)
        kept = kept or any(p.grad is not None for p in self.root.parameters())
        return kept or any(True for _ in never_reduced(self.root))

    def _forget(self) -> None:
        self.recorder.collectives.clear()
        self.samples, self.marks, self.ends, self.norms = [], [], [], {}
        self.forwards = self.bypassed = self.sync_refused = self.products = self.recomputed = 0
        if self.clock is not None:
            self.clock.start(again=True)
            self._mark()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Record the gradients; those of a closure after it has run, within the step."""
        return before_update(args, kwargs, lambda: self._see_gradients(optimizer), self._set_stepping)

    def _set_stepping(self, stepping: bool) -> None:
        self._stepping = stepping
        self._mark()

    def _see_gradients(self, optimizer: Optimizer) -> None:
        if self._recorder is None or self._times_only:
            return
        with self._own, _disable_current_modes(), torch.no_grad():
            if self._in_backward:
                self._finish_backward()
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its own step
            factor = 1.0 if scale is None else float(scale)
            self.norms |= {key: norm / factor for key, norm in gradient_norms(self.root).items()}
            self.gradient_dtypes |= {dtype_name(g.dtype) for g in state.gradients(self.root)}

    def _after_step(self, *_: Any) -> None:
        self._set_stepping(False)

    @property
    def norm_step(self) -> float | None:
        """Norm of this rank's gradients just before the step."""
        return _total(list(self.norms.values()))


def remove_hooks(hooks: Sequence[Any], root: nn.Module, running: Any = None) -> None:
    """Remove ``hooks``; with the next forward of ``root`` where ``running``, one of an optimizer's, runs before others.

    Optimizers iterate over their hooks themselves, and not over a copy as modules do.
    """
    reference = getattr(running, "hooks_dict_ref", None)
    siblings = None if reference is None else reference()
    if siblings is None or running.id not in siblings or next(reversed(siblings)) == running.id:
        for hook in hooks:
            hook.remove()
        return

    def remove(*_: Any) -> None:
        for hook in (*hooks, later):
            hook.remove()

    later = root.register_forward_pre_hook(remove)


def before_update(
    args: Any, kwargs: Any, act: Callable[[], None], stepping: Callable[[bool], None] = lambda _: None
) -> Any:
    """Call ``act`` when a step has its gradients: now, or after its closure; for an optimizer's pre-hook to return."""
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if closure is None:
        act()
        stepping(True)
        return None

    def observed() -> Any:
        stepping(False)
        result = closure()
        act()
        stepping(True)
        return result

    return args[:1], {**kwargs, "closure": observed}


def is_skipped(optimizer: Any) -> bool:
    """Return whether a fused optimizer's step has changed nothing, as fp16's scaler has told it."""
    found = getattr(optimizer, "found_inf", None)
    with _disable_current_modes():
        return found is not None and bool(found)


def gradient_norms(root: nn.Module) -> dict[int, float]:
    """Return the norm of each parameter's local gradient in float64, by the parameter's id; one wait for the device."""
    found = [(id(p), state.local(p.grad)) for p in root.parameters() if p.grad is not None]
    norms = [
        torch.linalg.vector_norm(g, dtype=torch.complex128 if g.is_complex() else torch.float64)
        for _, g in found
        if g.layout == torch.strided
    ]
    keys = [key for key, g in found if g.layout == torch.strided]
    values = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist() if norms else []
    return dict(zip(keys, values, strict=True))


def random_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return modules whose output depends on training mode: dropout above 0, and batch norm."""
    return [(name, part) for name, part in root.named_modules() if _is_random(part)]


def _is_random(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.batchnorm._NormBase):
        return bool(part.track_running_stats)
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    rates = (value for key, value in vars(part).items() if "dropout" in key)
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _total(norms: Sequence[float]) -> float | None:
    return float(sum(norm * norm for norm in norms) ** 0.5) if norms else None


def _digests(args: Any, kwargs: Any) -> list[str]:
    """Hash the input tensors of one forward; none if there are none, or one has no plain values."""
    leaves = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    parts = [state.local(leaf) for leaf in leaves]
    plain = [part for part in parts if part.layout == torch.strided and part.device.type != "meta"]
    if not plain or len(plain) < len(parts):
        return []
    found = hashlib.blake2b(digest_size=8)
    for full in plain:
        found.update(f"{tuple(full.shape)}{full.dtype}".encode() + tensor_bytes(full))
    return [found.hexdigest()]


def _remove_mode(mode: CollectiveRecorder) -> None:
    """Leave ``mode``, also where the loop has entered others since, which stay in their order."""
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    _push_mode(top)
    mode.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)
