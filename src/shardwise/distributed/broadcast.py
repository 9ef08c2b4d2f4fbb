"""Broadcast rank 0's values of a tensor, whatever its strides, layout and dtype."""

from __future__ import annotations

import torch
import torch.distributed as dist

_CSR = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED = (*_CSR, torch.sparse_csc, torch.sparse_bsc)
_BY_DDP = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
)


def send(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcast rank 0's values into ``tensor`` and return it; a sparse one is recreated.

    Collective.

    Sends bytes, as a backend need not support a dtype to copy it, and a contiguous copy where that is
    needed: a backend ignores strides, and would write a tensor made by ``expand`` past the end of its memory.
    """
    if tensor.layout is not torch.strided:
        return _sent_sparse(tensor)
    once = tensor.detach()
    for axis, stride in enumerate(once.stride()):
        if stride == 0 and once.shape[axis] > 1:
            once = once.narrow(axis, 0, 1)
    flat = once.resolve_conj().resolve_neg().contiguous()
    if flat.numel():
        dist.broadcast(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8), src=0)
    if flat is not once:
        once.copy_(flat)
    return tensor


def _sent_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcast a sparse tensor; ranks may have different numbers of elements in it."""
    if tensor.layout in _CSR:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in _COMPRESSED:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor._indices(), tensor._values()]
    sent = []
    for part in parts:
        shape = send(torch.tensor(part.shape, device=part.device)).tolist()
        same = list(part.shape) == shape  # always true on rank 0
        sent.append(send(part.detach().clone() if same else part.new_empty(shape)))
    if tensor.layout in _COMPRESSED:
        outer, inner, values = sent
        return torch.sparse_compressed_tensor(outer, inner, values, size=tensor.shape, layout=tensor.layout)
    indices, values = sent
    found = torch.sparse_coo_tensor(indices, values, size=tensor.shape, check_invariants=False)
    return found._coalesced_(bool(send(torch.tensor([tensor.is_coalesced()], device=tensor.device)).item()))


def is_sent_by_ddp(buffer: torch.Tensor) -> bool:
    """Return whether DDP, which flattens and copies buffers, can send ``buffer``."""
    strided = buffer.layout is torch.strided and buffer.dtype in _BY_DDP
    return strided and all(stride or size < 2 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
