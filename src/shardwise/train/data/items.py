"""Encode a sampler's items as text without loss, to send ranks their samples.

Plain integers are sent unchanged; anything that JSON would change (a tuple, ``np.float32(0.75)``, bytes) has a
tag. Unknown types are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.errors import DataError


def to_text(items: Sequence[Any]) -> str:
    """Encode ``items`` as JSON for `from_text`.

    Raises:
        DataError: an item, or something in it, has a type that cannot be encoded.
    """
    return json.dumps([_encode(item) for item in items])


def from_text(text: str) -> list[Any]:
    """Decode the items that `to_text` encoded, with the same types."""
    return [_decode(item) for item in json.loads(text)]


def _encode(item: Any) -> Any:
    kind = type(item)
    if item is None or kind in (int, bool, float, str):
        return item
    if kind is list:
        return item if all(type(one) is int for one in item) else [_encode(one) for one in item]
    if kind is tuple:
        return {"tuple": [_encode(one) for one in item]}
    if kind is dict:
        return {"dict": [[_encode(key), _encode(value)] for key, value in item.items()]}
    if kind is bytes:
        return {"bytes": item.hex()}
    if kind is range:
        return {"range": [item.start, item.stop, item.step]}
    if kind is slice:
        return {"slice": [_encode(item.start), _encode(item.stop), _encode(item.step)]}
    if isinstance(item, np.generic | np.ndarray) and item.dtype.kind in "biufcSUMm" and not item.dtype.metadata:
        scalar = isinstance(item, np.generic)
        return {"numpy": [item.dtype.str, list(item.shape), np.ascontiguousarray(item).tobytes().hex(), scalar]}
    if kind is torch.Tensor and item.layout == torch.strided:
        content = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(item.dtype).removeprefix("torch."), list(item.shape), content.hex()]}
    raise DataError(
        f"the loader's sampler yields a {kind.__module__}.{kind.__qualname__}, which cannot be sent to other ranks; "
        "yield integers, floats, strings, bytes, or tuples, lists and dicts of them"
    )


def _decode(item: Any) -> Any:
    if isinstance(item, list):
        return [_decode(one) for one in item]
    if not isinstance(item, dict):
        return item
    ((kind, value),) = item.items()
    if kind == "tuple":
        return tuple(_decode(one) for one in value)
    if kind == "dict":
        return {_decode(key): _decode(one) for key, one in value}
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind in ("range", "slice"):
        return (range if kind == "range" else slice)(*(_decode(one) for one in value))
    if kind == "numpy":
        name, shape, content, scalar = value
        array = np.frombuffer(bytes.fromhex(content), dtype=np.dtype(name)).reshape(shape).copy()
        return array[()] if scalar else array
    name, shape, content = value
    dtype = getattr(torch, name)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8).view(dtype).reshape(shape)
