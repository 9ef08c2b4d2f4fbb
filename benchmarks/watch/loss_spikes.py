"""False alarms of the rule for loss spikes on healthy runs, and spoilt batches that it finds.

``python -m benchmarks.watch.loss_spikes --output benchmarks/watch``; the losses are kept: another rule can be tried.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pkgutil
import random
from collections import deque
from pathlib import Path

import torch
from torch.nn import functional

from shardwise.train.loss_spikes import SPREADS, WINDOW, spike
from tests.models import byte_attention, byte_decoder

LENGTH, STEPS = 32, 1000
RUNS = [
    ("attention", "json", 1e-2, 8),
    ("attention", "wsgiref", 1e-3, 8),
    ("decoder", "json", 3e-3, 16),
    ("decoder", "wsgiref", 1e-2, 8),
]


def corpus(package: str) -> torch.Tensor:
    """The bytes of a package of Python's own."""
    spec = pkgutil.resolve_name(package).__path__[0]
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(Path(spec).glob("*.py")))))


def losses(model: str, package: str, rate: float, batch: int, spoilt: dict[int, float]) -> list[float]:
    """Losses of a run; of the steps in ``spoilt`` that share of the samples has random bytes."""
    torch.manual_seed(7)
    data, module = corpus(package), byte_attention(0.1) if model == "attention" else byte_decoder(0.1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
    found = []
    for step in range(STEPS):
        starts = torch.randint(len(data) - LENGTH - 1, (batch, 1))
        rows = data[starts + torch.arange(LENGTH + 1)]
        bad = round(spoilt.get(step, 0.0) * batch)
        rows[:bad] = torch.randint(256, (bad, LENGTH + 1))
        loss = functional.cross_entropy(module(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        found.append(round(loss.item(), 4))
    return found


def spikes(series: list[float]) -> list[int]:
    """Steps that the rule calls spikes."""
    before: deque[float] = deque(maxlen=WINDOW)
    found = []
    for step, loss in enumerate(series):
        if spike(before, loss) is not None:
            found.append(step)
        before.append(loss)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    folder = parser.parse_args().output
    torch.set_num_threads(1)
    draw, rows = random.Random(0), []
    for model, package, rate, batch in RUNS:
        shares = {step: draw.choice((0.25, 0.5, 1.0)) for step in range(300, STEPS, 100)}
        clean, spoilt = (losses(model, package, rate, batch, given) for given in ({}, shares))
        alarms, seen = spikes(clean), set(spikes(spoilt))
        facts = {"model": model, "data": package, "lr": rate, "batch": batch}
        by_share = {
            str(share): [step in seen for step, one in shares.items() if one == share] for share in (0.25, 0.5, 1.0)
        }
        rows.append({**facts, "false": alarms, "other": sorted(seen - set(shares)), "found": by_share, "losses": clean})
        print(facts, len(alarms), {share: f"{sum(one)}/{len(one)}" for share, one in by_share.items()}, flush=True)
    summary = {
        "date": datetime.date.today().isoformat(),
        "rule": {"spreads": SPREADS, "window": WINDOW},
        "clean_steps": STEPS * len(RUNS),
        "false_alarms": sum(len(row["false"]) for row in rows),
        "found": {
            share: [sum(sum(row["found"][share]) for row in rows), sum(len(row["found"][share]) for row in rows)]
            for share in ("0.25", "0.5", "1.0")
        },
        "runs": rows,
    }
    (folder / "spikes.json").write_text(json.dumps(summary) + "\n")
    print(summary["false_alarms"], "of", summary["clean_steps"], summary["found"])


if __name__ == "__main__":
    main()
