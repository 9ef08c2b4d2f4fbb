"""Keep what the repeated blocks save for the backward in host memory between their forward and their backward.

The way is autograd's own: hooks that pack and unpack saved tensors (``torch.autograd.graph.saved_tensors_hooks``).
PyTorch's ``save_on_cpu`` moves every saved tensor, also weights, which are on the device anyway, and a tensor that
three operations save three times. Here a storage moves once, whatever views of it are saved and by whatever number of
operations and blocks, and comes back once, for as long as one of them waits for it; weights, casts and views of them,
and storages under `LEAST_BYTES` stay.

Outside of a recomputed block only its inputs are saved, so those are moved. Copies are made on the stream that
computes: the device waits for them, the host does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

LEAST_BYTES = 1024  # smaller storages stay: torchtune's ``min_offload_size``
# Nodes between a weight and what is saved of it: autocast's cast, and the views of linear layers
_OF_WEIGHTS = {
    *("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"),
    "_ToTorchTensorBackward",
}


class _HostCopy:
    """Bytes of a storage in host memory; ``back`` are those on the device again, while the backward needs them.

    It lives as long as the saved tensors that are views of it, and so does the weak reference to the storage, which
    keeps its address from being that of another.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = _bytes_of(tensor)
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.version, self.device = tensor._version, tensor.device
        self.back: torch.Tensor | None = None
        self.host = to_host(flat)
        self.moved = self.host.device.type == "cpu" and self.host.untyped_storage()._cdata != self.storage.cdata

    def on_device(self) -> torch.Tensor:
        """Return the bytes on the device."""
        if self.back is None:
            self.back = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self.back.copy_(self.host, non_blocking=True)
        return self.back


@dataclass(frozen=True)
class _View:
    copy: _HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept:
    """A saved tensor that stays, and its version then."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else tensor.detach()  # itself would keep its own node alive
        self._version = tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._tensor.dtype} {[*self._tensor.shape]} is at version {self._tensor._version}; expected version "
                f"{self._version} instead"
            )
        return self._tensor


class _Weights:
    """What a block holds, to tell it from what it computes."""

    def __init__(self, block: nn.Module) -> None:
        held = [*block.parameters(), *block.buffers()]
        self._storages = {_storage(one)._cdata for one in held}
        self._shapes = {tuple(sorted(one.shape)) for one in held if one.ndim > 1}

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a weight or a buffer, cast or seen otherwise: autocast saves such.

        A cast of a frozen weight has no history: what needs no gradient and has a weight's shape is taken for one.
        """
        if isinstance(tensor, nn.Parameter) or tensor.untyped_storage()._cdata in self._storages:
            return True
        if tensor.grad_fn is None:
            return not tensor.requires_grad and tuple(sorted(tensor.shape)) in self._shapes
        node: Any = tensor.grad_fn
        while node is not None and node.name() in _OF_WEIGHTS:
            node = node.next_functions[0][0]
        return isinstance(getattr(node, "variable", None), nn.Parameter)


class _Forward:
    """In the place of a block's ``forward``; a copy of the block gets one of its own, as attributes are copied."""

    def __init__(self, block: nn.Module, hooks: SavedOnHost) -> None:
        self.block, self.hooks, self.inner = block, hooks, block.forward
        functools.update_wrapper(self, self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = _Weights(self.block)
        self.hooks.forwards += 1
        with saved_tensors_hooks(functools.partial(self.hooks.pack, own), self.hooks.unpack):
            return self.inner(*args, **kwargs)


class SavedOnHost:
    """Hooks of a model's blocks on ``device``, and the bytes since they were made, each storage once for each copy.

    ``saved`` of tensors that blocks saved and that are to move, ``moved`` of copies in host memory, ``returned`` of
    copies back. ``forwards`` ran under the hooks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.saved = self.moved = self.returned = self.forwards = 0
        self._live: WeakValueDictionary[int, _HostCopy] = WeakValueDictionary()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Bytes saved, moved and returned so far."""
        return self.saved, self.moved, self.returned

    def attach(self, block: nn.Module) -> None:
        """Run the block's forward under the hooks from now on."""
        block.forward = _Forward(block, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedOnHost:
        return self  # copies of the model, such as averages, count here, too

    def pack(self, own: _Weights, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps in the place of ``tensor``."""
        elsewhere = tensor.device.type != self.device.type or is_traceable_wrapper_subclass(tensor)
        if elsewhere or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return _Kept(tensor)
        key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if size < LEAST_BYTES or own.has(tensor):
            return _Kept(tensor)
        copy = self._live.get(key)
        if copy is None or copy.version != tensor._version:
            copy = self._live[key] = _HostCopy(tensor)
            self.saved += size
            self.moved += size if copy.moved else 0
        return _View(copy, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that `pack` was given.

        Raises:
            RuntimeError: it stayed, and was changed since: autograd itself does not look at what hooks return.
        """
        if isinstance(packed, _Kept):
            return packed.tensor()
        self.returned += packed.copy.host.nbytes if packed.copy.back is None else 0
        flat = packed.copy.on_device().view(packed.dtype)
        return flat.as_strided(packed.size, packed.stride, packed.offset)


def save_on_host(blocks: Iterable[nn.Module], device: torch.device) -> SavedOnHost:
    """Run the forwards of ``blocks`` under hooks; call it once they are complete, with their weights sharded."""
    hooks = SavedOnHost(device)
    for block in blocks:
        hooks.attach(block)
    return hooks


def to_host(flat: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``flat`` in host memory, pinned where it comes from a GPU."""
    host = torch.empty_like(flat, device="cpu", pin_memory=flat.device.type == "cuda")
    return host.copy_(flat, non_blocking=True)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage as one row of bytes."""
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
