"""What `shardwise.observe` and `check_gradients` cost: paired trainings of one process group, in turn, CPU seconds.

Each pair trains the same model from the same seed with and without; which one goes first alternates. Step 1 has hooks
and checksums, step 2 every operator through Python and the receipt, and from step 3 on nothing is left. Weights are
compared bit by bit. Run from the repository: ``python benchmarks/observe/overhead.py --write``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise

HERE = Path(__file__).parent
RANKS, STEPS, VOCAB, LENGTH = 2, 6, 512, 64
KINDS = ("observe", "check_gradients")


def model_of(width: int) -> nn.Module:
    """A transformer of 4 layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.TransformerEncoder(layer, 4), nn.Linear(width, VOCAB))


def loss_of(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean over labels."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def training(kind: str, width: int, *, watched: bool) -> tuple[list[float], list[torch.Tensor]]:
    """CPU seconds of each step of this process, and the weights after them."""
    model = DistributedDataParallel(model_of(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss: Any = loss_of
    if watched and kind == "observe":
        shardwise.observe(model, optimizer, "ddp", on_receipt=lambda _: None)
    elif watched:
        loss = shardwise.check_gradients(model, optimizer, loss_of, step=2, on_report=lambda _: None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seconds = []
    for _ in range(STEPS):
        ids = torch.randint(VOCAB, (4, LENGTH + 1), generator=generator)
        dist.barrier()
        began = time.process_time()
        loss(model, (ids[:, :-1], ids[:, 1:])).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    return seconds, [p.detach().clone() for p in model.parameters()]


def rank_main(rank: int, folder: str, pairs: int, width: int) -> None:
    """Measure on one rank; rank 0 writes."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rows: dict[str, Any] = {}
    for kind in KINDS:
        training(kind, width, watched=True)  # imports, and the allocator's first blocks
        samples: list[dict[str, list[float]]] = []
        same = True
        for pair in range(pairs):
            found = {}
            for watched in (True, False) if pair % 2 else (False, True):
                found[watched] = training(kind, width, watched=watched)
            same &= all(map(torch.equal, found[True][1], found[False][1]))
            samples.append({"with": found[True][0], "without": found[False][0]})
        rows[kind] = {"bit_identical": same, "samples_s": samples}
    if rank == 0:
        parameters = sum(p.numel() for p in model_of(width).parameters())
        (Path(folder) / "rows.json").write_text(json.dumps({"parameters": parameters, "kinds": rows}))
    dist.barrier()
    os._exit(0)


def summary(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Medians over pairs: ratio of step 1, of step 2, and of the later ones."""
    made = {}
    for kind, row in rows["kinds"].items():
        parts = {"step 1": slice(0, 1), "step 2": slice(1, 2), "later steps": slice(2, None)}
        made[kind] = {
            name: statistics.median(sum(s["with"][part]) / sum(s["without"][part]) for s in row["samples_s"])
            for name, part in parts.items()
        }
    return made


def main() -> None:
    """Measure, print the ratios, and write them with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--write", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, words.pairs, words.width), nprocs=RANKS)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    document = {"date": date.today().isoformat(), "ranks": RANKS, **rows, "ratios": summary(rows)}
    json.dump({key: document[key] for key in ("parameters", "ratios")}, sys.stdout, indent=1)
    print()
    if words.write:
        (HERE / f"overhead_cpu_{document['date']}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
