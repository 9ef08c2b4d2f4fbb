"""List the files of a DeepSpeed checkpoint, and reject unsupported kinds with a fix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.readers.restricted import InertRecord
from shardwise.checkpoint.storage.local_storage import Folder, read_small
from shardwise.errors import CheckpointError, UserError

LATEST = "latest"
AGAIN = "copy the folder again, or take another checkpoint"
GATHER = "save the full weights with the script that trained them (model.state_dict()), and give those"
_MAX_RANKS = 1 << 16
_MODEL = re.compile(r"(zero_pp_rank_(\d+)_)?mp_rank_0+_model_states\.pt")
_OPTIMIZER = re.compile(r"(\w*)zero_pp_rank_(\d+)_mp_rank_0+_optim_states\.pt")
_OTHER_RANKS = r".*mp_rank_(?!0+_)\d+_\w+_states\.pt"
_LAYERS = r"layer_\d+(-model_\d+)?-model_states\.pt"
_EXPERTS = r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*_optim_states\.pt"
_SWAPPED = (
    "its optimizer state is in swap files of NVMe offload; load it with offload_optimizer.device 'cpu' and save again"
)


def tagged_folder(path: Folder) -> Folder:
    """Return the folder with the files: ``path``, or the one in it that ``latest`` names.

    Raises:
        UserError: neither exists.
        CheckpointError: ``latest`` names a missing folder.
    """
    names = sorted(item.name for item in path.iterdir()) if path.is_dir() else []
    if any(name.endswith(("_model_states.pt", "-model_states.pt", "_optim_states.pt")) for name in names):
        return path
    if LATEST in names:
        try:
            tag = read_small(path / LATEST, 1000).decode(errors="replace").strip()
        except OSError as error:
            raise CheckpointError(f"'{path / LATEST}' cannot be read: {error.strerror or error}; {AGAIN}") from None
        if not tag or tag.startswith("/") or ".." in PurePosixPath(tag).parts:
            raise CheckpointError(f"'{path / LATEST}' names '{tag}', which is not a folder beside it")
        if (path / tag).is_dir():
            return path / tag
        raise CheckpointError(f"'{path / LATEST}' names '{tag}', which is not there; give another folder by its path")
    tags = [name for name in names if name.startswith("global_step") and (path / name).is_dir()]
    if tags:
        raise UserError(f"'{path}' has no '{LATEST}'; give one of {', '.join(map(repr, tags[:8]))} in it")
    raise UserError(
        f"'{path}' contains no DeepSpeed checkpoint; give the folder with '{LATEST}', or a global_step folder"
    )


def refuse(folder: Folder, problems: Sequence[str]) -> None:
    """Raise a UserError where there are problems, all of them at once."""
    if problems:
        raise UserError(*(f"'{folder}' cannot be read: {problem}" for problem in problems))


def unread_kinds(names: Sequence[str]) -> list[str]:
    """Return why it cannot be read, judged by the file names."""

    def first(pattern: str) -> str | None:
        return next((name for name in names if re.fullmatch(pattern, name)), None)

    problems: list[str] = []
    if "zero" in names:
        problems.append("it is a universal checkpoint ('zero'); give the folder that it was made from")
    if name := first(_LAYERS):
        problems.append(f"it is of a pipeline ('{name}'), whose layers have numbers and no names; {GATHER}")
    if name := first(_EXPERTS):
        problems.append(f"it has experts in files of their own ('{name}'); {GATHER}")
    if not problems and (name := first(_OTHER_RANKS)):
        problems.append(
            f"it is of tensor-parallel ranks ('{name}'), and how their shards fit together is not recorded; {GATHER}"
        )
    if "offloaded_tensors" in names:
        problems.append(_SWAPPED)
    return problems


def unread_layouts(state: Mapping[str, Any]) -> list[str]:
    """Return why it cannot be read, judged by the model's file."""
    problems: list[str] = []
    dims = state.get("checkpoint_parallel_dimensions")
    degrees = [state.get("mp_world_size"), *(dims.values() if isinstance(dims, dict) else ())]
    if any(isinstance(degree, int) and degree > 1 for degree in degrees):
        problems.append(
            f"it is of tensor-parallel or pipeline ranks, and how their shards fit together is not recorded; {GATHER}"
        )
    if state.get("ds_autoep_layers") or state.get("autoep_layers"):
        problems.append(f"it has experts that are spread over ranks; {GATHER}")
    group = option(state, "zero_optimization", "mics_shard_size")
    if isinstance(group, int) and group > 0:
        problems.append(f"MiCS (mics_shard_size {group}) shards tensors within groups of ranks; {GATHER}")
    if option(state, "zero_optimization", "offload_optimizer", "device") == "nvme":
        problems.append(_SWAPPED)
    return problems


def option(state: Mapping[str, Any], *keys: str) -> Any:
    """Return an entry of the run's configuration; ``None`` where it had none."""
    value: Any = state.get("ds_config")
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value.args[0] if isinstance(value, InertRecord) and value.args else value


def model_files(folder: Folder, names: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether it is of stage 3 (one model file per rank), and its model files by rank.

    Raises:
        CheckpointError: there is no model file, or both forms exist.
    """
    found = {match[2] and int(match[2]): name for name in names if (match := _MODEL.fullmatch(name))}
    ranks = sorted(rank for rank in found if rank is not None)
    if (None in found) == bool(ranks):
        there = f"both '{found[None]}' and '{found[ranks[0]]}'; remove those of the earlier run" if ranks else ""
        raise CheckpointError(f"'{folder}' has {there or f'no …_model_states.pt of rank 0; {AGAIN}'}")
    return bool(ranks), [found[rank] for rank in ranks] or [found[None]]


def optimizer_files(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return the optimizer files by rank, for each prefix (``bf16_`` or empty)."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        if match := _OPTIMIZER.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2])] = name
    return found


def all_ranks(folder: Folder, form: str, world: int, there: Sequence[str]) -> list[str]:
    """Return the names of all ranks' files; ``form`` contains the placeholder of the rank.

    Raises:
        CheckpointError: files are missing, or there are more files than ranks; names them.
    """
    if world > _MAX_RANKS:
        raise CheckpointError(f"'{folder}' claims that it was saved by {world} ranks, which cannot be; {AGAIN}")
    wanted = [form.format(rank) for rank in range(world)]
    missing = [name for name in wanted if name not in there]
    extra = [name for name in there if name not in wanted]
    if missing:
        raise CheckpointError(
            f"'{folder}' was saved by {world} ranks, and files of them are missing: {short_list(missing)}; {AGAIN}"
        )
    if extra:
        raise CheckpointError(
            f"'{folder}' was saved by {world} ranks, and has files of more: {short_list(extra)}; remove them if they "
            "are left from an earlier run"
        )
    return wanted


def is_read(name: str) -> bool:
    """Return whether a file of this name is read."""
    return bool(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))
