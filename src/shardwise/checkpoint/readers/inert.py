"""Inert stand-ins for names in a pickle stream: plain values and pure builders.

A stream names functions and classes, and asks for calls. This is the complete list of known names, each with a function
of this module that builds a plain value. Nothing else is looked up, so nothing else can run.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import torch

FREE_ELEMENTS = 1 << 24  # an expanded tensor may be this much larger than its storage
KEY_PARTS = 256  # of a key that is a tuple; more would make hashing slow
Known = Any


class Unreadable(ValueError):
    """Value that is understood but not supported; the text gives the reason and the fix."""


@dataclass(eq=False)
class InertRecord:
    """Inert stand-in for an instance of a data class.

    ``name`` is the class, ``args`` and ``kwargs`` its constructor's arguments, ``state`` what was set afterwards
    (usually a dict of attributes), ``items`` the members of a kind of list, dict or set.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    items: Any = None

    def get(self, attribute: str, default: Any = None) -> Any:
        """Return an attribute that the stream set, or ``default``."""
        if isinstance(self.state, dict):
            return self.state.get(attribute, default)
        if isinstance(self.state, tuple) and len(self.state) == 2:  # plain attributes, and those in slots
            for part in self.state:
                if isinstance(part, dict) and attribute in part:
                    return part[attribute]
        return default


@dataclass(frozen=True)
class Maker:
    """Replacement of a call: ``make`` builds the value; ``None`` if the name is only mentioned."""

    name: str
    make: Callable[..., Any] | None = None


@dataclass(frozen=True)
class StorageKind:
    """A storage class; without a dtype it counts bytes."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class StoredStorage:
    """Storage in a torch file, by its key."""

    key: str
    dtype: torch.dtype | None
    num_bytes: int
    big_endian: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a torch file: ``offset`` and ``stride`` count elements in the storage ``key``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    key: str
    big_endian: bool = False

    @property
    def numel(self) -> int:
        """Elements, 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """End of the tensor in its storage, in elements (exclusive)."""
        if self.numel == 0:
            return 0
        steps = sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        return self.offset + steps + 1


def check_key(key: Any) -> Any:
    """Return ``key`` if it is a valid key of a dict or member of a set.

    Raises:
        Unreadable: it cannot be hashed, or not in bounded time.
    """
    todo, seen = [key], 0
    while todo:
        value = todo.pop()
        seen += 1
        if isinstance(value, tuple | frozenset) and seen + len(value) <= KEY_PARTS:
            todo += value
        elif not (value is None or isinstance(value, _KEY_TYPES)):
            raise Unreadable(f"a {type(value).__name__} is used as a key; numbers, text and short tuples can be")
    return key


_MAX_DIMENSIONS = 64
_KEY_TYPES = (str, int, float, complex, bytes, torch.dtype, InertRecord, Maker, StorageKind)
_QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}


def _pairs(items: Any) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items
    return {check_key(key): value for key, value in pairs}


def _ordered(items: Any = (), /) -> dict[Any, Any]:
    return _pairs(items)


def _default(_factory: Any = None, items: Any = (), /) -> dict[Any, Any]:
    return _pairs(items)


def _listed(items: Any = (), _limit: Any = None, /) -> list[Any]:
    return list(_walkable(items))


def _walkable(items: Any) -> Iterable[Any]:
    if not isinstance(items, list | tuple | set | frozenset | dict):
        raise TypeError(f"a {type(items).__name__} is not a list")
    return items


def _as_set(items: Any = (), /) -> set[Any]:
    return {check_key(item) for item in _walkable(items)}


def _as_frozenset(items: Any = (), /) -> frozenset[Any]:
    return frozenset(check_key(item) for item in _walkable(items))


def _as_size(items: Any = (), /) -> tuple[int, ...]:
    return _sizes(tuple(_walkable(items)))


def _as_bytes(value: Any = b"", encoding: Any = "latin1", /) -> bytes:
    """Decode bytes as old streams store them: text with latin1 as its encoding."""
    if isinstance(value, str) and encoding in ("latin1", "latin-1"):
        return value.encode("latin1")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise TypeError(f"bytes are made of a {type(value).__name__}")


def _as_bytearray(value: Any = b"", encoding: Any = "latin1", /) -> bytearray:
    return bytearray(_as_bytes(value, encoding))


def _as_complex(real: Any = 0.0, imaginary: Any = 0.0, /) -> complex:
    if not all(isinstance(part, int | float) for part in (real, imaginary)):
        raise TypeError("a complex number is made of two numbers")
    return complex(real, imaginary)


def _posix(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _windows(*parts: str) -> str:
    return str(PureWindowsPath(*parts))


def _reconstruct(kind: Any, base: Any, state: Any, /) -> InertRecord:
    """Build an instance as the two oldest protocols do."""
    record = _instance(kind)
    if not isinstance(base, Maker) or (base.name, state) != ("builtins.object", None):
        raise Unreadable(f"a {record.name} that is made from something else than an object")
    return record


def _instance(kind: Any) -> InertRecord:
    if isinstance(kind, Maker) and kind.make is not None and isinstance(record := kind.make(), InertRecord):
        return record
    raise Unreadable("an instance of an unknown data class")


def _sizes(values: tuple[Any, ...]) -> tuple[int, ...]:
    if len(values) > _MAX_DIMENSIONS or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise Unreadable("the shape, strides or offset of a tensor are not valid integers")
    return values


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_ignored: Any) -> StoredTensor:
    """Build a tensor, ignoring the arguments after the stride (requires_grad, hooks)."""
    metadata = _ignored[2] if len(_ignored) > 2 else None
    dtype = storage.dtype if isinstance(storage, StoredStorage) else None
    if dtype is None:
        raise Unreadable("a tensor without a storage of a known dtype")
    return _checked(dtype, storage, offset, size, stride, metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None, /
) -> StoredTensor:
    if not isinstance(dtype, torch.dtype) or not isinstance(storage, StoredStorage):
        raise Unreadable("a tensor without a dtype or a storage")
    return _checked(dtype, storage, offset, size, stride, metadata)


def _checked(
    dtype: torch.dtype, storage: StoredStorage, offset: Any, size: Any, stride: Any, metadata: Any
) -> StoredTensor:
    if isinstance(metadata, dict) and any(metadata.values()):
        raise Unreadable("a tensor that is stored conjugated or negated; save tensor.resolve_conj().resolve_neg()")
    if dtype in _QUANTIZED:
        raise Unreadable(f"a quantized tensor ({dtype}) cannot be taken over; save it dequantized")
    shape, strides = _sizes(tuple(_walkable(size))), _sizes(tuple(_walkable(stride)))
    _sizes((offset,))
    if len(shape) != len(strides):
        raise Unreadable(f"a tensor of shape {shape} with the strides {strides}")
    tensor = StoredTensor(dtype, shape, strides, offset, storage.key, storage.big_endian)
    capacity = storage.num_bytes // dtype.itemsize
    if tensor.end > capacity:
        raise Unreadable(
            f"a tensor of shape {shape} at element {offset} reaches outside of its storage '{storage.key}', which "
            f"holds {capacity} elements; the file is damaged or was made to mislead"
        )
    if tensor.numel > max(capacity, FREE_ELEMENTS):
        raise Unreadable(f"a tensor of shape {shape} repeats a storage of {capacity} elements; save it contiguous")
    return tensor


def _same(value: Any, *_ignored: Any) -> Any:
    return value


def _of_type(function: Any, kind: Any, args: Any, _state: Any = None, /) -> Any:
    """Build a tensor subclass; only torch's own, which have no extra data."""
    if not isinstance(kind, Maker) or kind.name not in _TENSOR_CLASSES:
        return _subclass(kind)
    if (
        not isinstance(function, Maker)
        or function.make is None
        or not function.name.startswith("torch._utils._rebuild_")
    ):
        raise Unreadable(f"a tensor that is made by {_title(function)}, which is not a function that creates tensors")
    return function.make(*args)


def _subclass(kind: Any = None, *_ignored: Any) -> Any:
    raise Unreadable(f"a tensor of the class {_title(kind)} cannot be taken over; {_PLAIN_TENSORS}")


def _title(value: Any) -> str:
    return value.name if isinstance(value, Maker) else f"a {type(value).__name__}"


def _not_taken(what: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise Unreadable(f"{what} cannot be taken over; {_PLAIN_TENSORS}")

    return refuse


_PLAIN_TENSORS = "save plain tensors (a DTensor: full_tensor(), or a PyTorch DCP folder; a sparse one: to_dense())"
_TENSOR_CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
_NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}
_NUMBERS |= {"u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


def _numpy_scalar(dtype: Any, data: Any = None, /) -> Any:
    """Convert a numpy scalar to a Python number; other dtypes stay a record of dtype and bytes."""
    if not isinstance(dtype, InertRecord) or dtype.name != "numpy.dtype":
        raise TypeError("a numpy scalar without a numpy dtype")
    letter = _NUMBERS.get(dtype.args[0]) if dtype.args and isinstance(dtype.args[0], str) else None
    if letter is None or not isinstance(data, bytes | bytearray):
        return InertRecord("numpy.scalar", (dtype, data))
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    return struct.unpack((">" if order == ">" else "<") + letter, data)[0]


def _numpy_array(kind: Any = None, *args: Any) -> InertRecord:
    if not isinstance(kind, Maker) or kind.name != "numpy.ndarray":
        raise Unreadable(f"a numpy array of the class {_title(kind)}")
    return InertRecord("numpy.ndarray", args)


def _numpy_from_buffer(data: Any, dtype: Any, shape: Any, order: Any, /) -> InertRecord:
    """Build an array of the newest protocol, in the form of the older ones."""
    return InertRecord("numpy.ndarray", (), {}, (1, shape, dtype, order == "F", data))


def _record(name: str) -> Maker:
    def make(*args: Any, **kwargs: Any) -> InertRecord:
        return InertRecord(name, args, kwargs)

    return Maker(name, make)


# classes of which only the attributes matter, by module
_DATA_CLASSES = {
    "torch": "device",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID SafeUUID",
    "builtins": "slice range",
    "numpy": "dtype",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix SerializationFormat",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING ShardedTensorMetadata",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed.remote_device": "_remote_device",
    "deepspeed.runtime.zero.config": "ZeroStageEnum DeepSpeedZeroConfig",
    "deepspeed.runtime.zero.offload_config": (
        "OffloadDeviceEnum DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig OffloadStateTypeEnum"
    ),
    "deepspeed.runtime.fp16.loss_scaler": (
        "LossScaler DynamicLossScaler LossScalerBase LossScaleConfig LossScaleProfile"
    ),
    "deepspeed.utils.tensor_fragment": "fragment_address tensor_fragment",
    "deepspeed.runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning.pytorch.utilities.parsing": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "lightning.pytorch.trainer.states": "TrainerFn TrainerStatus RunningStage TrainerState",
    "transformers.trainer_utils": "IntervalStrategy SchedulerType HubStrategy SaveStrategy EvaluationStrategy",
    "transformers.training_args": "OptimizerNames",
}
_NAMED_ONLY = {  # classes that are mentioned (default of a dict, type of a tensor) but never instantiated
    "builtins": "list dict int float str bool tuple object NoneType",
    "torch": "Tensor",
    "torch.nn.parameter": "Parameter Buffer",
    "numpy": "ndarray",
}
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "QInt8": torch.qint8,
    "QInt32": torch.qint32,
    "QUInt8": torch.quint8,
    "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _ordered,
    "collections.defaultdict": _default,
    "collections.deque": _listed,
    "builtins.set": _as_set,
    "builtins.frozenset": _as_frozenset,
    "builtins.complex": _as_complex,
    "builtins.bytes": _as_bytes,
    "builtins.bytearray": _as_bytearray,
    "_codecs.encode": _as_bytes,
    "copyreg._reconstructor": _reconstruct,
    "pathlib.PosixPath": _posix,
    "pathlib.PurePosixPath": _posix,
    "pathlib.WindowsPath": _windows,
    "pathlib.PureWindowsPath": _windows,
    "torch.Size": _as_size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _same,
    "torch._utils._rebuild_parameter_with_state": _same,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _same,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._tensor._rebuild_from_type": _of_type,
    "torch._utils._rebuild_wrapper_subclass": _subclass,
    "torch._utils._rebuild_qtensor": _not_taken("a quantized tensor"),
    "torch._utils._rebuild_sparse_tensor": _not_taken("a sparse tensor"),
    "torch._utils._rebuild_nested_tensor": _not_taken("a nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _not_taken("a tensor on the meta device, which has no values,"),
}
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib"}
_OLD_BUILTINS = {"unicode": "str", "long": "int", "xrange": "range"}


def _table() -> dict[str, Known]:
    table: dict[str, Known] = {name: Maker(name, make) for name, make in _CALLS.items()}
    for module, names in _DATA_CLASSES.items():
        table |= {f"{module}.{name}": _record(f"{module}.{name}") for name in names.split()}
    for module, names in _NAMED_ONLY.items():
        table |= {f"{module}.{name}": Maker(f"{module}.{name}") for name in names.split()}
    for module in _NUMPY_MODULES:
        table[f"{module}.scalar"] = Maker(f"{module}.scalar", _numpy_scalar)
        table[f"{module}._reconstruct"] = Maker(f"{module}._reconstruct", _numpy_array)
    for module in ("numpy.core.numeric", "numpy._core.numeric"):
        table[f"{module}._frombuffer"] = Maker(f"{module}._frombuffer", _numpy_from_buffer)
    for word, kind in _STORAGES.items():
        table[f"torch.{word}Storage"] = table[f"torch.cuda.{word}Storage"] = StorageKind(kind)
    table["torch.storage.UntypedStorage"] = table["torch.UntypedStorage"] = StorageKind(None)
    for name in dir(torch):
        if isinstance(value := getattr(torch, name), torch.dtype):
            table[f"torch.{name}"] = value
        elif isinstance(value, torch.memory_format | torch.layout | torch.qscheme):
            table[f"torch.{name}"] = str(value)
    return table


_TABLE = _table()


def look_up(module: str, name: str) -> Known | None:
    """Return the stand-in of ``module.name``; ``None`` if unknown.

    Nothing is imported.
    """
    module = _OLD_NAMES.get(module, module)
    if module == "builtins":
        name = _OLD_BUILTINS.get(name, name)
    return _TABLE.get(f"{module}.{name}")
