"""How soon a detached layer is named in a run of short steps, what its checks take, and healthy steps before that.

``python -m benchmarks.watch.lost_gradients --output benchmarks/watch``: two gloo ranks each, with checks as rare as in
every run. ``python benchmarks/attribution/overhead.py --of gradients`` has what one check costs, paired.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.receipts.lost_gradients import CHECKS, LostGradients
from shardwise.run.start import start
from tests.worlds import run_world

STRATEGIES = ("ddp", "zero1", "fsdp")
WIDTH, DEPTH = 64, 12


class Net(nn.Module):
    """Layers in a row; ``detached`` from one forward on, the sixth takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
        self.detached = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            out = layer(x)
            x = x + (out.detach() if self.detached and number == 5 else out)
        return x


def trained(strategy: str, healthy_s: float, limit_s: float) -> dict[str, Any]:
    """Train healthily for a while; then with the layer detached, until it is named."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage()) if "no gradient" in record.getMessage() else None
    logging.getLogger("shardwise").addHandler(handler)
    session = start(strategy, receipts=False)
    watch = LostGradients.attach(session)
    torch.manual_seed(0)
    plain = Net()
    model, optimizer = session.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1e-4))
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    begun, detached_at, alarms = time.perf_counter(), 0, 0
    number, detached_s, named_s = 0, 0.0, None
    for step in session.steps(batch for _ in iter(int, 1)):
        number = step.number
        step.run(model, lambda out, labels: (out - labels).square().sum())
        step.update(optimizer)
        now = time.perf_counter() - begun
        ends = bool(said) or (detached_at > 0 and now - detached_s > limit_s)
        flags = torch.tensor([float(now > healthy_s and watch.checks > CHECKS), float(ends)])
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        if flags[0] and not detached_at:
            detached_at, detached_s, alarms = number + 1, now, len(said)
            for part in model.modules():
                if isinstance(part, Net):
                    part.detached = True
        if flags[1] and detached_at:
            named_s = now - detached_s if said else None
            break
    seconds = time.perf_counter() - begun
    session.close()
    return {
        "strategy": strategy,
        "steps": number,
        "step_ms": round(1e3 * seconds / number, 2),
        "checks": watch.checks,
        "share": round(watch.spent_s / seconds, 6),
        "detached_in_step": detached_at,
        "false_alarms": alarms,
        "seconds_to_name": named_s,
        "said": said,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, default=Path("benchmarks/watch"))
    options.add_argument("--healthy-s", type=float, default=40.0)
    options.add_argument("--limit-s", type=float, default=200.0)
    options.add_argument("--strategy", action="append", choices=STRATEGIES)
    given = options.parse_args()
    results = []
    for strategy in given.strategy or STRATEGIES:
        results.append(
            run_world(
                trained, 2, strategy, given.healthy_s, given.limit_s, timeout_s=given.healthy_s + 3 * given.limit_s
            )[0]
        )
        print(results[-1], flush=True)
    document = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "results": results}
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "lost_gradients.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
