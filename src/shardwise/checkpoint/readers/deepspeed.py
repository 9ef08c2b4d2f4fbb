"""Read DeepSpeed checkpoints (ZeRO stages 0 to 3) without DeepSpeed and without gathering.

The model's file has names and shapes, buffers, and weights in the training dtype; each rank's file of optimizer state
has its partitions of the fp32 masters and of the optimizer's state, see `deepspeed_zero`. Weights are read from the
masters, where there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self, TypeVar

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.readers.deepspeed_folder import (
    AGAIN,
    GATHER,
    all_ranks,
    is_read,
    model_files,
    optimizer_files,
    option,
    refuse,
    tagged_folder,
    unread_kinds,
    unread_layouts,
)
from shardwise.checkpoint.readers.deepspeed_zero import (
    Flat,
    Partition,
    PartitionRange,
    Shapes,
    flat_tensor,
    read_number,
    read_partition,
    spans_of,
    spans_of_parts,
)
from shardwise.checkpoint.readers.reader import TensorInfo
from shardwise.checkpoint.readers.restricted import InertRecord, StoredTensor
from shardwise.checkpoint.readers.state_names import clean_names
from shardwise.checkpoint.readers.torch_file import TorchFile
from shardwise.checkpoint.storage.local_storage import Folder, is_local
from shardwise.errors import CheckpointError

_AT_ONCE = 16  # files behind a URL that are open at the same time
_SAMPLE = 1024  # elements compared to match masters with weights
_SHOWN = 20  # names in a note
_LIGHTNINGS = "_forward_module."  # prefix of its older versions
_EXTRA_STATE = "_extra_state"
_KNOWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "sparse_tensor_module_names"),
    *("csr_tensor_module_names", "universal_checkpoint_info"),
}
_NO_OPTIONS = {"params", "param_names", "step"}
_T = TypeVar("_T")


class _Full:
    """Tensor stored contiguously in one file, or in memory."""

    def __init__(self, file: TorchFile, stored: StoredTensor | torch.Tensor) -> None:
        self.info = TensorInfo(stored.dtype, tuple(stored.shape))
        self._file, self._stored = file, stored

    def read(self, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        if isinstance(self._stored, torch.Tensor):
            return self._stored.clone()  # a number
        return self._file.read(self._stored, box)


class DeepSpeedSource:
    """Folder of DeepSpeed's ``save_checkpoint``, as a `Source`.

    Either with ``latest``, or one tag's folder.

    Attributes:
        folder: the tag's folder, where the files are.
        stage: ZeRO's stage, 0 to 3.
    """

    def __init__(self, path: Folder) -> None:
        """Open every rank's file and read everything except tensors.

        Raises:
            UserError: there is no such checkpoint, or it is of an unsupported kind, which the message names.
            CheckpointError: a file is missing or damaged, asks to run code, or belongs to another checkpoint.
        """
        self.place = str(path)
        self.folder = tagged_folder(path)
        names = sorted(item.name for item in self.folder.iterdir())
        refuse(self.folder, unread_kinds(names))
        self.stage = 0
        self.notes: list[str] = []
        self.aliases: dict[str, str] = {}
        self.optimizer: Mapping[str, Any] | None = None
        self._tensors: dict[str, Flat | _Full] = {}
        self._scalars: dict[str, dict[str, Any]] = {}
        self._files = ExitStack()
        try:
            self._read_all(names)
        except (TypeError, ValueError, AttributeError, LookupError) as error:  # damaged, or written by hand
            self._files.close()
            raise CheckpointError(f"'{self.folder}' is not as DeepSpeed writes it ({error}); {AGAIN}") from None
        except BaseException:
            self._files.close()
            raise
        self.kind = f"DeepSpeed folder, ZeRO stage {self.stage}"
        self.tensors: Mapping[str, TensorInfo] = {name: tensor.info for name, tensor in self._tensors.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        try:
            return self._tensors[name].read(box)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def _read_all(self, names: Sequence[str]) -> None:
        by_rank, models = model_files(self.folder, names)
        self._model = self._open(models[0])
        state = self._model.content
        if not isinstance(state, dict) or not isinstance(state.get("module"), dict):
            raise CheckpointError(f"'{self.folder / models[0]}' has no 'module'; DeepSpeed did not write it")
        refuse(self.folder, unread_layouts(state))
        self.step = _count(state.get("global_steps"))
        self._note_model(state, names)
        shapes = [_shapes(group) for group in _list(state.get("param_shapes"))]
        frozen = _shapes(state.get("frozen_param_shapes"))
        self._name_all([*state["module"], *frozen, *(name for group in shapes for name in group)])
        files = self._optimizer_files(state, names, needed=by_rank or bool(shapes))
        if by_rank:
            models = all_ranks(self.folder, "zero_pp_rank_{}_mp_rank_00_model_states.pt", len(files), models)
        if not files:
            self._weights(state, {})
            self._stage_0(state)
            self._check_aliases()
            return
        ranks = self._each(files, lambda name: read_partition(self._open(name), name))
        content = ranks[0].file.content["optimizer_state_dict"]
        self.stage = 3 if by_rank else (_count(content.get("zero_stage")) or 1)
        spans = spans_of(self.stage, shapes, content.get("param_alignment_paddings"), ranks)
        self._weights(state, self._masters(shapes, spans, ranks))
        if by_rank and frozen:
            self._frozen_parts(frozen, models)
        self._note_loss_scale(content)
        self._states(shapes, spans, ranks)
        self._groups(state, shapes, ranks[0])
        self._check_aliases()

    def _open(self, name: str) -> TorchFile:
        return self._files.enter_context(TorchFile(self.folder / name))

    def _each(self, names: Sequence[str], do: Callable[[str], _T]) -> list[_T]:
        if is_local(self.folder):
            return [do(name) for name in names]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(do, names))

    def _optimizer_files(self, state: Mapping[str, Any], names: Sequence[str], needed: bool) -> list[str]:
        """Return the optimizer files in rank order; none where the optimizer is not sharded."""
        found = optimizer_files(names)
        if len(found) > 1:
            both = short_list([min(files.values()) for files in found.values()])
            raise CheckpointError(f"'{self.folder}' has files of two runs: {both}; remove those of the earlier one")
        if not found and not needed:
            return []
        half = "bf16_" if option(state, "bf16", "enabled") else ""
        prefix, there = next(iter(found.items()), (half, dict[int, str]()))
        world = _count(state.get("dp_world_size")) or max(there, default=0) + 1
        form = prefix + "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
        return all_ranks(self.folder, form, world, list(there.values()))

    def _name_all(self, names: Iterable[Any]) -> None:
        """Map Shardwise's names to those in the files."""
        raw = list(dict.fromkeys(map(str, names)))
        full = all(name.startswith(_LIGHTNINGS) for name in raw)
        cleaned = clean_names([name.removeprefix(_LIGHTNINGS) for name in raw] if full else raw)
        self._name = dict(zip(raw, cleaned, strict=True))

    def _put(self, name: str, tensor: Flat | _Full) -> None:
        if name in self._tensors:
            raise CheckpointError(f"'{self.folder}' has {name} twice; {AGAIN}")
        self._tensors[name] = tensor

    # weights

    def _masters(
        self, shapes: Sequence[Shapes], spans: Mapping[str, Sequence[PartitionRange]], ranks: Sequence[Partition]
    ) -> dict[str, Flat]:
        found: dict[str, Flat] = {}
        for flat, parameters in enumerate(shapes):
            files = [(rank.file, rank.masters[flat]) for rank in ranks]
            for name, shape in parameters.items():
                tensor = flat_tensor(shape, spans[name], files)
                if tensor is None:
                    raise CheckpointError(f"{name}: the ranks of '{self.folder}' store it in different dtypes; {AGAIN}")
                found[name] = tensor
        return found

    def _weights(self, state: Mapping[str, Any], masters: Mapping[str, Flat]) -> None:
        """Register the masters, and stored buffers and parameters without a master."""
        partitioned = self.stage == 3  # where the model's file has no weights
        module = {name: value for name, value in state["module"].items() if isinstance(value, StoredTensor)}
        shared = _shared(state, module, masters, partitioned)
        frozen = _shapes(state.get("frozen_param_shapes"))
        for name, tensor in masters.items():
            self._put(f"model/{self._name[name]}", tensor)
        empty, extra = [], [str(name) for name in state["module"] if name not in module]
        for name, stored in module.items():
            if name in shared:
                self.aliases[f"model/{self._name[name]}"] = f"model/{self._name.get(shared[name], shared[name])}"
            elif name in masters or (partitioned and name in frozen):
                continue  # the stored one is a low-precision copy, or empty
            elif name.endswith(_EXTRA_STATE):
                extra.append(name)
            elif partitioned and stored.shape == (0,) and name not in _list(state.get("buffer_names")):
                empty.append(name)
            else:
                self._put(f"model/{self._name[name]}", _Full(self._model, stored))
        if empty:
            self.notes.append(f"these weights are not in the files: {short_list(empty)}")
        if extra:
            self.notes.append(f"extra state of modules is not carried over: {short_list(extra)}")

    def _frozen_parts(self, frozen: Shapes, models: Sequence[str]) -> None:
        """Register frozen parameters, which stage 3 shards evenly into the ranks' model files."""
        files = [self._model, *self._each(models[1:], self._open)]
        for name, shape in frozen.items():
            parts = [(file, (file.content.get("frozen_param_fragments") or {}).get(name)) for file in files]
            tensor = flat_tensor(shape, spans_of_parts(0, 0, math.prod(shape), len(files)), parts)
            if tensor is None or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                raise CheckpointError(
                    f"{name}: the ranks of '{self.folder}' do not store equal parts of it as floating-point numbers "
                    f"(quantised, or swapped to NVMe); {GATHER}"
                )
            self._put(f"model/{self._name[name]}", tensor)

    def _check_aliases(self) -> None:
        lost = [alias for alias, name in self.aliases.items() if name not in self._tensors]
        if lost:
            self.notes.append(f"these are tied to weights that are not in the files: {short_list(lost)}")
        self.aliases = {alias: name for alias, name in self.aliases.items() if alias not in lost}

    # the optimizer

    def _states(
        self, shapes: Sequence[Shapes], spans: Mapping[str, Sequence[PartitionRange]], ranks: Sequence[Partition]
    ) -> None:
        if len({rank.step for rank in ranks}) > 1:
            each = [f"'{rank.name}': {rank.step}" for rank in ranks]
            raise CheckpointError(
                f"'{self.folder}' has optimizer state of different steps, so of different saves: {short_list(each)}"
            )
        for flat, parameters in enumerate(shapes):
            keys = list(ranks[0].states[flat])
            other = [rank.name for rank in ranks if set(rank.states[flat]) != set(keys)]
            if other:
                raise CheckpointError(f"'{other[0]}' has other optimizer state than '{ranks[0].name}'; {AGAIN}")
            for key in keys:
                files = [(rank.file, rank.states[flat][key]) for rank in ranks]
                for name, shape in parameters.items():
                    self._state(name, str(key), shape, spans[name], files)

    def _state(
        self,
        name: str,
        key: str,
        shape: tuple[int, ...],
        spans: Sequence[PartitionRange],
        files: Sequence[tuple[TorchFile, Any]],
    ) -> None:
        """Register one parameter's range in one state of a flat partition."""
        file, value = files[0]
        if not isinstance(value, StoredTensor) or not value.shape:
            self._number(name, key, file, value)
            return
        tensor = flat_tensor(shape, spans, files)
        if tensor is None:
            self._refuse_state(key, value)
        else:
            self._tensor_of_state(name, key, value, tensor)

    def _number(self, name: str, key: str, file: TorchFile, value: Any) -> None:
        """Register state shared by all parameters of a partition."""
        if isinstance(value, StoredTensor):
            self._tensor_of_state(name, key, value, _Full(file, value))
        elif isinstance(value, int | float) and key == "step":
            self._put(f"optimizer/{self._name[name]}/step", _Full(file, torch.tensor(float(value))))
        elif isinstance(value, bool | int | float | str):
            self._scalars.setdefault(self._name[name], {})[key] = value
        elif value is not None:
            self._note_once(f"the optimizer's '{key}' is neither a tensor nor a number, and is not carried over")

    def _tensor_of_state(self, name: str, key: str, value: StoredTensor, tensor: Flat | _Full) -> None:
        if "/" in key or (value.shape and not value.dtype.is_floating_point):
            self._refuse_state(key, value)
        self._put(f"optimizer/{self._name[name]}/{key}", tensor)

    def _refuse_state(self, key: str, value: StoredTensor) -> None:
        problem = (
            f"it has quantised or factored optimizer state ('{key}', {value.dtype} of shape {tuple(value.shape)}), "
            "which is not one number for each weight; for the weights alone, run DeepSpeed's zero_to_fp32.py if you "
            "trust the folder, and give what it writes"
        )
        refuse(self.folder, [problem])

    def _groups(self, state: Mapping[str, Any], shapes: Sequence[Shapes], rank: Partition) -> None:
        members: list[list[str]] = []
        flat = 0
        for _, count in rank.groups:
            members.append([name for parameters in shapes[flat : flat + count] for name in parameters])
            flat += count
        self._finish(state, rank.file, [options for options, _ in rank.groups], members)
        if not any(options for options, _ in rank.groups):
            self.notes.append("the optimizer's options (lr, betas, weight_decay) are not in the files")

    def _finish(
        self, state: Mapping[str, Any], file: TorchFile, saved: Sequence[Mapping[str, Any]], members: list[list[str]]
    ) -> None:
        """Register the non-tensor state."""
        options = [self._options(file, group) for group in saved]
        name = _class_name(options, state)
        if not name:
            self.notes.append("the class of the optimizer is not in the files")
        groups = [
            {"params": [self._name[name] for name in called], "options": group}
            for called, group in zip(members, options, strict=True)
        ]
        self.optimizer = {"name": name, "groups": groups, "state": self._scalars}

    def _options(self, file: TorchFile, group: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a group's hyperparameters to JSON."""
        found: dict[str, Any] = {}
        for key, value in group.items():
            number = read_number(file, value)
            if key in _NO_OPTIONS:
                continue
            if number is None and not _is_json(value):
                self._note_once(f"the optimizer's option '{key}' is neither a number nor text, and is not carried over")
            elif isinstance(value, StoredTensor):
                found[str(key)] = number
            else:
                found[str(key)] = list(value) if isinstance(value, tuple) else value
        return found

    # stage 0, which stores state by number

    def _stage_0(self, state: Mapping[str, Any]) -> None:
        """Find the parameter names in the optimizer, or by matching fp32 masters with weights."""
        saved = state.get("optimizer")
        if not isinstance(saved, dict):
            return
        self._note_loss_scale(saved)
        base = saved.get("optimizer_state_dict", saved)
        groups = _list(base.get("param_groups"))
        numbers = [_list(group.get("params")) for group in groups]
        masters = [_list(group) for group in _list(saved.get("fp32_groups"))]
        names: list[list[str]] | None = [_list(group.get("param_names")) for group in groups]
        if masters and _lengths(masters) == _lengths(numbers):
            names = self._names_by_value(masters, state)
        if names is None or _lengths(names) != _lengths(numbers) or not set().union(*names) <= set(self._name):
            also = " and the fp32 masters are" if masters or "fp32_groups_flat" in saved else " is"
            self.notes.append(
                f"the optimizer's state{also} stored by number, without parameter names: not carried "
                "over; build the optimizer of model.named_parameters(), or save with ZeRO stage 1, to keep it"
            )
            return
        for group, called in zip(masters, names, strict=False):
            for master, name in zip(group, called, strict=True):
                self._tensors[f"model/{self._name[name]}"] = _Full(self._model, master)
        for group, called in zip(numbers, names, strict=True):
            for number, name in zip(group, called, strict=True):
                for key, value in (base["state"].get(number) or {}).items():
                    self._number(name, str(key), self._model, value)
        self._finish(state, self._model, groups, names)

    def _names_by_value(self, masters: list[list[Any]], state: Mapping[str, Any]) -> list[list[str]] | None:
        """Match masters with weights, assuming the model's order and equality after rounding.

        ``None`` where that is ambiguous.
        """
        buffers = _list(state.get("buffer_names"))
        rest = [iter(group) for group in masters]
        heads = [next(group, None) for group in rest]
        found: list[list[str]] = [[] for _ in masters]
        for name, stored in state["module"].items():
            if not isinstance(stored, StoredTensor) or name in buffers or f"model/{self._name[name]}" in self.aliases:
                continue
            fits = [index for index, head in enumerate(heads) if self._is_rounded(head, stored)]
            if not fits and not stored.numel:
                continue  # DeepSpeed omits empty parameters
            if len(fits) != 1:
                return None
            found[fits[0]].append(name)
            heads[fits[0]] = next(rest[fits[0]], None)
        return found if not any(heads) else None

    def _is_rounded(self, master: Any, stored: StoredTensor) -> bool:
        """Return whether the first elements of ``stored`` are ``master`` rounded."""
        if not isinstance(master, StoredTensor) or master.shape != stored.shape:
            return False
        lengths = (*(min(n, 1) for n in stored.shape[:-1]), *(min(n, _SAMPLE) for n in stored.shape[-1:]))
        box = Box((0,) * len(lengths), lengths)
        return torch.equal(self._model.read(master, box).to(stored.dtype), self._model.read(stored, box))

    # notes

    def _note_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _note_model(self, state: Mapping[str, Any], names: Iterable[str]) -> None:
        skipped = _count(state.get("skipped_steps"))
        if skipped:
            self.notes.append(f"{skipped} of the {self.step} steps did nothing, because gradients overflowed")
        rest = sorted(str(key) for key, value in state.items() if key not in _KNOWN_KEYS and value is not None)
        if rest:
            more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
            self.notes.append(f"saved beside the model and not carried over: {', '.join(rest[:_SHOWN])}{more}")
        others = [f"'{name}'" for name in names if not is_read(name)]
        if others:
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            self.notes.append(f"files that are not read: {', '.join(others[:_SHOWN])}{more}")

    def _note_loss_scale(self, content: Mapping[str, Any]) -> None:
        scaler = content.get("loss_scaler")
        scale = scaler.get("cur_scale") if isinstance(scaler, InertRecord) else content.get("cur_scale")
        if isinstance(scale, int | float) and scale != 1:
            self.notes.append(f"the loss scale ({scale:g}) is not carried over")


def _shared(
    state: Mapping[str, Any], module: Mapping[str, StoredTensor], masters: Mapping[str, Any], partitioned: bool
) -> dict[str, str]:
    """Find the other names of tied parameters, from the file's record and equal storage.

    ``partitioned``: tensors are empty because their values are elsewhere. The file marks empty parameters as tied
    to one another, which they are not.
    """
    message = state.get("shared_params") or {}
    owner: dict[StoredTensor, str] = {module[name]: name for name in module if name in masters}
    shared: dict[str, str] = {}
    for name, stored in module.items():
        if name in masters or not (partitioned or stored.numel):
            continue
        first = message.get(name, None if partitioned else owner.setdefault(stored, name))
        if first is not None and first != name:
            shared[name] = str(first)
    return shared


def _class_name(options: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> str:
    """Return the optimizer's class from its options or the configuration; empty where unknown."""
    keys = set().union(*options) if options else set()
    if "decoupled_weight_decay" in keys:
        return "AdamW" if all(group.get("decoupled_weight_decay") for group in options) else "Adam"
    if {"momentum", "nesterov"} <= keys:
        return "SGD"
    configured = option(state, "optimizer", "type")
    if not isinstance(configured, str):
        return ""
    decoupled = option(state, "optimizer", "params", "adam_w_mode") is not False  # DeepSpeed's "Adam" is AdamW
    return {"adamw": "AdamW", "adam": "AdamW" if decoupled else "Adam"}.get(configured.lower(), configured)


def _shapes(group: Any) -> dict[str, tuple[int, ...]]:
    shapes = {str(name): tuple(shape) for name, shape in group.items()} if isinstance(group, dict) else {}
    if any(_count(length) is None for shape in shapes.values() for length in shape):
        raise ValueError("a shape that is not made of lengths")
    return shapes


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _lengths(groups: Iterable[Sequence[Any]]) -> list[int]:
    return [len(group) for group in groups]


def _count(value: Any) -> int | None:
    """Return a count, also from an enumeration member; ``None`` for anything else."""
    number = value.args[0] if isinstance(value, InertRecord) and value.args else value
    return number if type(number) is int and number >= 0 else None


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)
