"""A small checkpoint of several ranks, written without any rank."""

from __future__ import annotations

import torch

from shardwise.checkpoint import spread_report
from shardwise.checkpoint.format import LATEST, MANIFEST, Manifest, OptimizerEntry, ParamGroup, step_folder
from shardwise.checkpoint.shard_files import TensorFile, code_of
from shardwise.checkpoint.storage.local_storage import Folder, write_small
from shardwise.plan.plan import Plan

PARAMETERS = {"embed.weight": (7, 4), "blocks.0.weight": (4, 6), "blocks.1.weight": (4, 6), "scale": ()}


def save_as_many(many: bool) -> None:
    """Let this rank save as 32 ranks and more do (schema 3), every tensor as a grid; or again as few."""
    spread_report.SPREAD, spread_report.LISTED = (1, 0) if many else (32, 4)


def full_tensors() -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint but the generators' states, whole."""
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(5)
    for name, shape in PARAMETERS.items():
        made[f"model/{name}"] = torch.randn(shape, generator=generator)
        made[f"optimizer/{name}/exp_avg"] = torch.randn(shape, generator=generator)
        made[f"optimizer/{name}/step"] = torch.tensor(20.0)
    return made | {"model/half": torch.ones(3, dtype=torch.bfloat16), "model/none": torch.zeros(0, 3)}


def boxes(shape: tuple[int, ...], ranks: int) -> list[tuple[int, list[int], list[int]]]:
    """Rank, offsets, lengths: the last dimension is cut, so that ranks hold columns; small tensors are rank 0's."""
    if not shape or shape[-1] < ranks:
        return [(0, [0] * len(shape), list(shape))] if 0 not in shape else []
    edges = [shape[-1] * rank // ranks for rank in range(ranks + 1)]
    ahead = list(shape[:-1])
    return [
        (rank, [0] * len(ahead) + [edges[rank]], [*ahead, edges[rank + 1] - edges[rank]])
        for rank in range(ranks)
        if 0 not in shape
    ]


def write_checkpoint(folder: Folder, step: int = 20, ranks: int = 2, **changes) -> Folder:
    """``folder/step-00000020`` and ``latest``; ``changes`` are fields of the manifest."""
    path = folder / step_folder(step)
    path.mkdir(parents=True, exist_ok=True)
    full = full_tensors()
    full |= {
        f"rng/{rank}/{name}": torch.arange(9, dtype=torch.uint8) for rank in range(ranks) for name in ("cpu", "numpy")
    }
    entries = {name: {"dtype": code_of(t), "shape": list(t.shape), "shards": []} for name, t in full.items()}
    for rank in range(ranks):
        mine = {}
        for name, tensor in full.items():
            places = boxes(tuple(tensor.shape), ranks) if name[:3] != "rng" else [(int(name.split("/")[1]), [0], [9])]
            for owner, offsets, lengths in places:
                if owner == rank:
                    cut = tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
                    mine[name] = (tensor[cut].contiguous(), offsets, lengths)
        file = f"rank-{rank:05d}.safetensors"
        held = {name: (code_of(part), tuple(part.shape)) for name, (part, _, _) in mine.items()}
        with TensorFile(path / file, held) as out:
            for name in out.order:
                part, offsets, lengths = mine[name]
                made = out.put(name, [part])
                shard = {"file": file, "key": name, "offsets": offsets, "lengths": lengths, "hash": made}
                entries[name]["shards"].append(shard)
    plan = Plan(strategy="fsdp", precision="bf16")
    document = {
        "step": step,
        "plan": plan.model_dump(mode="json", by_alias=True),
        "plan_fingerprint": plan.fingerprint,
        "versions": {"shardwise": "0.1.0", "torch": "2.13.0"},
        "ranks": ranks,
        "tensors": entries,
        "aliases": {"model/head.weight": "model/embed.weight"},
        "optimizer": OptimizerEntry(
            name="AdamW", groups=(ParamGroup(params=tuple(PARAMETERS), options={"lr": 0.001, "betas": [0.9, 0.99]}),)
        ),
        "state": {"position": 160, "tokens": 5120, "loss": 2.25},
        "model": {"kind": "factory", "factory": "package.module:build", "kwargs": {"width": 4}},
        "created": "2026-01-02T03:04:05+00:00",
    }
    write_small(path / MANIFEST, Manifest.model_validate(document | changes).to_json().encode())
    write_small(folder / LATEST, f"{path.name}\n".encode())
    return path
