"""Trace a forward between blocks: parts before, after, and the tensors passed between them.

A pipeline stage runs the model's own forward and computes only its own blocks, so one condition must hold: only one
tensor, the hidden state, passes from block to block, and anything computed from parameters before the first block
reaches the rest of the model through the first block alone. One forward on fake tensors checks it.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import ModelError
from shardwise.model.expert_layers import dense_experts
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name, in_layer

SAMPLE_LENGTH = 16
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_BEFORE, _AFTER = -1, -2  # position of an operation, besides the number of a block
_ATEN = torch.ops.aten
_SHAPE_ONLY = {  # use a tensor's shape, dtype and device, not its values
    *(_ATEN.zeros_like, _ATEN.ones_like, _ATEN.empty_like, _ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like),
    *(_ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_empty, _ATEN.new_full, _ATEN.new_empty_strided),
}


@dataclass(frozen=True)
class BlockCall:
    """Call of a block: position of the hidden state among its arguments, and form of its output.

    ``argument`` is a position or a keyword; ``returns`` is the length of the tuple whose first element is the hidden
    state, 0 where the block returns it alone.
    """

    argument: int | str
    returns: int


@dataclass(frozen=True)
class Wiring:
    """Facts of one forward on fake tensors; parameters by module path, tied ones once per path.

    ``before`` and ``after`` are parameters used before and after the blocks. ``block_flops``,
    ``before_flops`` and ``after_flops`` are forward floating-point operations of one micro batch of the sample.
    """

    calls: Mapping[str, BlockCall]
    before: frozenset[str]
    after: frozenset[str]
    block_flops: tuple[float, ...] = ()
    before_flops: float = 0.0
    after_flops: float = 0.0


def read_wiring(module: nn.Module, spec: ModelSpec, pp: int, sample: Any = None, length: int | None = None) -> Wiring:
    """Run ``module`` once on fake tensors and trace its blocks; the module is not changed.

    ``sample`` is one micro batch of inputs; token ids [1, ``length`` or 16] by default. ``pp`` is the requested degree,
    for messages.


    Raises:
        ModelError: the model cannot be split between its blocks; lists all obstacles.
    """
    where = f"+pp{pp}"
    if len(spec.blocks) < 2:
        raise ModelError(
            f"{where} splits a model between its repeated blocks (two or more children of one type in a ModuleList, "
            f"ModuleDict or Sequential), and this one has {len(spec.blocks) or 'none'}; use a strategy without +pp"
        )
    if spec.batch_norms:
        raise ModelError(
            f"{where}: batch norm ('{spec.batch_norms[0]}' and {len(spec.batch_norms) - 1} more) computes its "
            "statistics over each micro batch of a pipeline, so gradients would depend on how the batch is split; use "
            "group norm or layer norm, or a strategy without +pp"
        )
    mode, error = _look(module, spec, sample, length or SAMPLE_LENGTH, None)
    if error is not None and not mode.problems:  # some operations have no shape rule except for bf16
        second, failed = _look(module, spec, sample, length or SAMPLE_LENGTH, torch.bfloat16)
        mode, error = (second, None) if failed is None else (mode, error)
    if error is not None and not mode.problems:
        reason = (" ".join(str(error).split())[:300] or type(error).__name__) + in_layer(error, module)
        raise ModelError(
            f"{where} looks at one forward under fake tensors (which have no values), and the model does not run "
            f"there: {reason}; pass session.prepare a sample of what it takes, keep values out of its control flow, "
            "or use a strategy without +pp"
        )
    mode.finish()
    if mode.problems:
        raise ModelError(*(f"{where}: {text}; use a strategy without +pp" for text in dict.fromkeys(mode.problems)))
    return mode.wiring()


def _look(
    module: nn.Module, spec: ModelSpec, sample: Any, length: int, dtype: torch.dtype | None
) -> tuple[_WiringMode, Exception | None]:
    """Trace one forward; return its record and its exception.

    Floating-point tensors are ``dtype`` unless that is ``None``.
    """
    mode, fake = _WiringMode(spec.blocks), FakeTensorMode(allow_non_fake_inputs=True)
    was = _TORCH_LOG.disabled
    _TORCH_LOG.disabled = True  # it prints the traceback of exceptions caught here
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), fake:
            warnings.simplefilter("ignore")
            with _faked(module, mode, dtype), _hooked(module, mode), dense_experts(module):
                args, kwargs = _arguments(sample, length, dtype)
                with torch.no_grad(), mode:
                    module(*args, **kwargs)
    except Exception as error:  # any exception of the model
        return mode, error
    finally:
        _TORCH_LOG.disabled = was
    return mode, None


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    narrow = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=narrow, device="cpu")


@dataclass
class _Call:
    argument: int | str | None
    arguments: tuple[tuple[int | str, Any], ...]
    returns: int = 0


@dataclass(frozen=True)
class _Origin:
    """Origin of a tensor: the block that computed it, or its parameter before the blocks."""

    block: int
    parameter: str = ""


class _WiringMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that sees every operation of the forward; hooks report calls of blocks."""

    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = blocks
        self.problems: list[str] = []
        self.slots: Any = WeakIdKeyDictionary()  # fake parameter -> its path
        self.origins: Any = WeakIdKeyDictionary()  # tensor -> _Origin
        self.uses: dict[str, set[int]] = {}
        self.flops: dict[int, float] = {}
        self.done: dict[int, _Call] = {}
        self.now, self.inside = _BEFORE, False
        self.hidden: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        packet = func._overloadpacket
        origin = _Origin(self.now) if self.inside else None
        if packet not in _SHAPE_ONLY:
            for tensor in inputs:
                origin = self._see(packet.__name__, tensor) or origin
        found = func(*args, **kwargs)
        if packet in flop_registry:
            count = flop_registry[packet](*args, **kwargs, out_val=found)
            self.flops[self.place] = self.flops.get(self.place, 0.0) + count
        if origin is not None:
            for leaf in _pytree.tree_leaves(found):
                if isinstance(leaf, torch.Tensor):
                    self.origins[leaf] = origin
        return found

    @property
    def place(self) -> int:
        """The running block, or before or after all of them; between two blocks the last one."""
        return _AFTER if not self.inside and len(self.done) == len(self.blocks) else self.now

    @property
    def between(self) -> bool:
        """Return True where some blocks have run, others have not, and none is running."""
        return not self.inside and 0 < len(self.done) < len(self.blocks)

    def _see(self, operation: str, tensor: torch.Tensor) -> _Origin | None:
        """Record an operation's input; return its result's origin if not the current place."""
        slot = self.slots.get(tensor)
        if slot is not None:
            self.uses.setdefault(slot, set()).add(self.place)
            if self.between:
                self.problems.append(f"'{slot}' is used between the blocks, outside of any")
            return _Origin(_BEFORE, slot) if self.place == _BEFORE else None
        of = self.origins.get(tensor)
        if of is None:
            return None
        user = f"block '{self.blocks[self.now]}'" if self.inside else "what comes after the last block"
        if of.block == _BEFORE:
            if self.place == _BEFORE or self.between:
                return of  # type: ignore[no-any-return]
            if not (self.inside and self.now == 0):
                self.problems.append(
                    f"{user} uses a tensor that is computed from '{of.parameter}' before the first block, which is on "
                    "another stage"
                )
        elif self.between:
            self.problems.append(
                f"the model computes with the hidden state ({operation}) between block '{self.blocks[max(self.done)]}' "
                "and the next one; move that into the block"
            )
            return of  # type: ignore[no-any-return]
        elif tensor is not self.hidden and not (self.inside and of.block == self.now):
            self.problems.append(
                f"{user} uses a tensor of block '{self.blocks[of.block]}' that is not the hidden state from block to "
                "block (a skip connection), and it may be on another stage"
            )
        return None

    def enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of a block."""
        name = self.blocks[index]
        if self.inside:
            self.problems.append(f"block '{name}' runs inside block '{self.blocks[self.now]}'")
        if index in self.done:
            self.problems.append(f"block '{name}' runs more than once in a forward")
        elif index and index - 1 not in self.done:
            missing = next(i for i in range(len(self.blocks)) if i not in self.done)
            self.problems.append(f"block '{name}' runs before block '{self.blocks[missing]}': not in their order")
        given: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        argument: int | str | None = None
        if index and self.hidden is not None:
            same = [key for key, value in given if value is self.hidden]
            argument = same[0] if len(same) == 1 else None
            if argument is None:
                before = self.blocks[index - 1]
                how = f"gets it {len(same)} times" if same else "does not get it unchanged as one of its arguments"
                self.problems.append(f"block '{name}' must take what block '{before}' returns, and {how}")
        self.done[index] = _Call(argument, given)
        self.now, self.inside = index, True

    def leave(self, index: int, found: Any) -> None:
        """Record the end of a block."""
        first = found[0] if isinstance(found, tuple | list) and found else found
        if not isinstance(first, torch.Tensor) or isinstance(found, list):
            self.problems.append(
                f"block '{self.blocks[index]}' returns a {type(found).__name__}; a stage can hand on a tensor, or a "
                "tuple that begins with it"
            )
            self.hidden = None
        else:
            self.hidden = first
        for leaf in _pytree.tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.origins[leaf] = _Origin(index)
        if index in self.done:
            self.done[index].returns = len(found) if isinstance(found, tuple) else 0
        self.inside = False

    def finish(self) -> None:
        """Add the problems that are known only after the forward."""
        idle = [name for index, name in enumerate(self.blocks) if index not in self.done]
        if idle and not self.problems:
            more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
            self.problems.append(f"block '{idle[0]}'{more} is not called in the forward (as a module, by its name)")
        if self.problems:
            return
        key = self.done[1].argument
        given = dict(self.done[0].arguments)
        if key not in given or not isinstance(given[key], torch.Tensor):
            self.problems.append(
                f"block '{self.blocks[0]}' does not take the hidden state as argument {key!r}, as the next block does"
            )
        self.done[0].argument = key
        for slot, places in self.uses.items():
            owners = [i for i, block in enumerate(self.blocks) if slot.startswith(f"{block}.")]
            strange = places - set(owners) if owners else {place for place in places if place >= 0}
            if strange:
                place = min(strange)
                user = f"block '{self.blocks[place]}'" if place >= 0 else "the model outside of its blocks"
                owner = f"block '{self.blocks[owners[0]]}'" if owners else "the model outside of its blocks"
                self.problems.append(f"'{slot}' is a parameter of {owner} and used by {user}, too")

    def wiring(self) -> Wiring:
        """Return the record of a forward without problems."""
        calls = {
            self.blocks[index]: BlockCall(0 if call.argument is None else call.argument, call.returns)
            for index, call in self.done.items()
        }
        return Wiring(
            calls=calls,
            before=frozenset(slot for slot, places in self.uses.items() if _BEFORE in places),
            after=frozenset(slot for slot, places in self.uses.items() if _AFTER in places),
            block_flops=tuple(self.flops.get(index, 0.0) for index in range(len(self.blocks))),
            before_flops=self.flops.get(_BEFORE, 0.0),
            after_flops=self.flops.get(_AFTER, 0.0),
        )


@contextlib.contextmanager
def _faked(module: nn.Module, mode: _WiringMode, dtype: torch.dtype | None) -> Iterator[None]:
    """Replace parameters and buffers by fake ones on the CPU.

    One for each path, also of tied parameters, to distinguish them.
    """
    before = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    names = {id(part): name for name, part in module.named_modules()}
    try:
        for part, parameters, buffers in before:
            for key, parameter in parameters.items():
                if parameter is not None:
                    fake = nn.Parameter(_fake(parameter, dtype), requires_grad=parameter.requires_grad)
                    part._parameters[key] = fake
                    mode.slots[fake] = clean_name(f"{names[id(part)]}.{key}".lstrip("."))
            for key, buffer in buffers.items():
                if buffer is not None:
                    part._buffers[key] = _fake(buffer, dtype)
        yield
    finally:
        for part, parameters, buffers in before:
            part._parameters.update(parameters)
            part._buffers.update(buffers)


@contextlib.contextmanager
def _hooked(module: nn.Module, mode: _WiringMode) -> Iterator[None]:
    """Add hooks to every block; removes them."""
    handles: list[RemovableHandle] = []
    named = {clean_name(name): part for name, part in module.named_modules()}

    def watch_block(index: int, block: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            mode.enter(index, args, kwargs)

        def after(_: nn.Module, args: Any, found: Any) -> None:
            mode.leave(index, found)

        handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.register_forward_hook(after))

    try:
        for index, name in enumerate(mode.blocks):
            watch_block(index, named[name])
        yield
    finally:
        for handle in handles:
            handle.remove()


def _arguments(sample: Any, length: int, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Build fake arguments of the model for one micro batch."""
    if sample is None:
        sample = torch.zeros(1, length, dtype=torch.int64)
    fake = _pytree.tree_map_only(torch.Tensor, lambda tensor: _fake(tensor, dtype), sample)
    if isinstance(fake, Mapping):
        return (), dict(fake)
    return (tuple(fake), {}) if isinstance(fake, list | tuple) else ((fake,), {})
