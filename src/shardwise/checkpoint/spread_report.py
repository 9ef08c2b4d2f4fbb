"""Reports of many ranks, merged by all of them: each merges what was written of some of the tensors.

Rank 0 then reads a line for each tensor, whatever the number of ranks, and the hashes stay in tables beside the files.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from torch.distributed import ProcessGroup

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import hash_bytes, table_name
from shardwise.checkpoint.grid import grid_of, runs_of
from shardwise.checkpoint.storage.local_storage import Folder, write_small
from shardwise.errors import CheckpointError

SPREAD = 32
"""Ranks from which on the manifest has grids: with 31 ranks a 70B model and AdamW have 11 MB of listed shards."""
LISTED = 4
"""Shards that a manifest lists with their hashes: small tensors, for which nobody reads a table."""


def is_spread(world: int) -> bool:
    """Return whether so many ranks write grids."""
    return world >= SPREAD


def write_table(working: Folder, file: str, hashes: dict[str, str]) -> str:
    """Write the hashes of the tensors in ``file`` beside it, durably; return the hash of that table."""
    raw = json.dumps(hashes, separators=(",", ":")).encode()
    write_small(working / table_name(file), raw)
    return hash_bytes(raw)


def spread_report(report: dict[str, Any], world: int, group: ProcessGroup | None) -> dict[str, Any]:
    """Replace what this rank wrote by the entries of the tensors that it merges, of all ``world`` ranks. Collective.

    ``merged`` has the entries, ``odd`` the first of them that differs between ranks, and ``order`` the names of this
    rank's own as the model has them, on rank 0, which sends them to nobody.
    """
    dealt: list[dict[str, Any]] = [{} for _ in range(world)]
    for kind in ("entries", "scalars"):
        for name, value in report[kind].items():
            dealt[zlib.crc32(name.encode()) % world].setdefault(kind, {})[name] = value
    rows = exchange.deal_json(dealt, group)
    merged = merge_rows([row.get("entries", {}) for row in rows])
    scalars: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, values in row.get("scalars", {}).items():
            scalars.setdefault(name, {}).update(values)
    order = [*report["entries"]] if report["rank"] == 0 else []
    return {**report, "entries": {}, "scalars": scalars, "order": order, **merged}


def merge_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge what each rank wrote of some tensors (name to dtype, shape, box and hash), files as their ranks."""
    tensors: dict[str, tuple[str, list[int], dict[tuple[Any, ...], tuple[Box, int, str]]]] = {}
    odd = ""
    for rank, row in enumerate(rows):
        for name, (dtype, shape, box, made) in row.items():
            known = tensors.setdefault(name, (dtype, shape, {}))
            if known[:2] != (dtype, shape):
                odd = odd or f"{name} has another shape or dtype on rank {rank} than on others"
            elif box:
                one = Box(tuple(box[0]), tuple(box[1]))
                known[2].setdefault((one.offsets, one.lengths), (one, rank, made))
    merged: dict[str, dict[str, Any]] = {}
    for name, (dtype, shape, found) in tensors.items():
        pieces = [*found.values()]
        grid = grid_of(tuple(shape), [(box, rank) for box, rank, _ in pieces]) if len(pieces) > LISTED else None
        merged[name] = {"dtype": dtype, "shape": shape}
        if grid is not None:
            merged[name]["grid"] = grid.model_dump()
        else:
            merged[name]["shards"] = [[rank, box.offsets, box.lengths, made] for box, rank, made in pieces]
    return {"merged": merged, "odd": odd}


def spread_tensors(reports: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the entries of all tensors, and the files with the hashes of their tables, from spread reports.

    Tensors that rank 0 has come first, in its order.

    Raises:
        CheckpointError: ranks have different tensors of one name.
    """
    if odd := next((report["odd"] for report in reports if report["odd"]), ""):
        raise CheckpointError(odd)
    files = {report["file"]: report["table"] for report in reports if report["file"]}
    number = {file: at for at, file in enumerate(files)}
    at_rank = [number.get(report["file"], -1) for report in reports]
    tensors: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, entry in report["merged"].items():
            if "grid" in entry:
                runs = entry["grid"]["files"]
                if at_rank != [*range(len(at_rank))]:  # a rank without tensors has no file
                    ranks = [start + step * at for start, step, count in runs for at in range(count)]
                    entry["grid"]["files"] = runs_of([at_rank[rank] for rank in ranks])
            else:
                entry["shards"] = [
                    {"file": reports[rank]["file"], "key": name, "offsets": offsets, "lengths": lengths, "hash": made}
                    for rank, offsets, lengths, made in entry["shards"]
                ]
            tensors[name] = entry
    order = {name: at for at, name in enumerate(reports[0]["order"])}
    return dict(sorted(tensors.items(), key=lambda one: order.get(one[0], len(order)))), files
