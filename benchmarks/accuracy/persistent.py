"""Parameters, gradients and optimizer state: predicted by closed formulas against tensors counted on real gloo ranks.

    .venv/bin/python -m benchmarks.accuracy.persistent

Six models × {ddp, zero1, zero2, fsdp, hsdp, zero2+offload, fsdp+offload, hsdp+offload} × 2 to 4 ranks, and five models
× strategies that cut the model × 2 to 8 ranks. On each rank two steps are trained; then the bytes of live tensors are
counted by `shardwise.measure.state`, and the largest over the ranks is what
`shardwise.cost.memory.estimate_memory.estimate_memory` must have said, to the byte. Where the model is cut, what is
said from its profile alone (as `shardwise plan` does) must be the same. Writes results/persistent.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.accuracy.cpu_peak import Transformer
from torch import nn

from shardwise.cost.memory.estimate_memory import ShardPlacement, estimate, estimate_memory
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.read import read_model
from shardwise.model.trace import trace_module
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.config import OptimizerTable
from shardwise.train.optimizer import build_optimizer, workload_of
from tests.families import VOCAB, family
from tests.worlds import run_world

RESULTS = Path(__file__).parent / "results" / "persistent.json"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "zero2+offload", "fsdp+offload", "hsdp+offload")
WORLDS = (2, 3, 4)
CATEGORIES = ("parameters", "gradients", "optimizer")
LENGTH = 16
CUT = (
    ("ddp+tp2", 2),
    ("ddp+pp2", 2),
    ("ddp+cp2", 2),
    ("zero1+cp2", 2),
    ("fsdp+tp2", 4),
    ("fsdp+pp2", 4),
    ("fsdp+cp2", 4),
    ("ddp+tp2", 4),
    ("zero2+tp2+offload", 4),
    ("hsdp+tp2", 8),
    ("fsdp+tp2+pp2", 8),
)


def transformer() -> nn.Module:
    """A decoder whose dims all divide evenly."""
    return Transformer(vocab=256, width=64, heads=4, blocks=3)


def tied() -> nn.Module:
    """The head is the embedding."""
    model = Transformer(vocab=256, width=64, heads=4, blocks=3)
    model.head.weight = model.embed.weight
    return model


def frozen() -> nn.Module:
    """The embedding, one block and parts of another are not trained."""
    model = Transformer(vocab=256, width=64, heads=4, blocks=3)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].qkv.requires_grad_(False)
    return model


def uneven() -> nn.Module:
    """Dims that no number of ranks divides."""
    return Transformer(vocab=257, width=35, heads=5, blocks=3)


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank update."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank() -> nn.Module:
    """Adapters as LoRA's; all else is frozen."""
    model = Transformer(vocab=256, width=64, heads=4, blocks=3).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LowRank(block.qkv, 6), LowRank(block.out, 6)
    return model


class ConvNet(nn.Module):
    """Residual convolutions over an image; the classes stand for tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 20, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(20, 20, 3, padding=1), nn.GroupNorm(4, 20), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(20, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))


def of_family(name: str) -> Callable[[], nn.Module]:
    """A tiny model of a family that can be cut: grouped heads, tied heads, fused projections, plain parameters."""
    return lambda: family(name, dtype=torch.float32)


FAMILIES = ("llama", "qwen3", "gpt2", "gemma", "own")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "tied": tied,
    "frozen": frozen,
    "conv net": ConvNet,
    "uneven dims": uneven,
    "LoRA-like": low_rank,
    **{name: of_family(name) for name in FAMILIES},
}


def counted(document: str, model: str, optimizer: str) -> dict[str, int]:
    """On one rank: two steps, then the bytes of its tensors."""
    from shardwise.distributed.process_group import join
    from shardwise.measure.state import measure_state
    from shardwise.parallel.materialize import build
    from shardwise.train.loss import token_loss_sum
    from shardwise.train.session import Session

    plan, ranks = Plan.model_validate_json(document), join("cpu")
    session = Session(ranks=ranks, planner=lambda *_: plan)
    module = build(MODELS[model], 0, real=ranks.is_main)
    outer, made = session.prepare(module, build_optimizer(module.parameters(), OptimizerTable(name=optimizer)))
    found: dict[str, int] = {}

    class Counter:
        """Counts while gradients are there."""

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

        def on_step_end(self, session: Any, step: Any) -> None:
            state = measure_state(session.module, session.optimizer)
            found.update({name: getattr(state, name) for name in CATEGORIES})

    session.observers.append(Counter())
    generator = torch.Generator().manual_seed(plan.dims.place(ranks.rank).dp)
    if model == "conv net":
        batch = (torch.randn(2, 3, 8, 8, generator=generator), torch.randint(10, (2,), generator=generator))
    else:
        ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        batch = (ids, ids.clone())
    for step in session.run_windows([[batch], [batch]]):
        step.run(outer, token_loss_sum)
        step.update(made, clip_norm=1.0)
    session.close()
    return found


def cut_parts(module: nn.Module, plan: Plan) -> ShardPlacement:
    """How those who cut live models would cut this one."""
    from shardwise.parallel.decide import decide, parts_of

    spec = read_model(module)
    sample = torch.zeros(plan.micro_batch or 1, LENGTH, dtype=torch.int64)
    return parts_of(decide(module, spec, plan, sample), spec, plan) if plan.dims.splits_model else ShardPlacement()


def main() -> None:
    """Run all, write, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configurations whose text holds this; writes nothing")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    plain = itertools.product([name for name in MODELS if name not in FAMILIES], STRATEGIES, WORLDS)
    every = [(m, s, w) for m, s, w in plain if not (s.startswith("hsdp") and w % 2)]
    every += [(model, strategy, world) for model in FAMILIES for strategy, world in CUT]
    for model, strategy, world in every:
        if options.only not in f"{model} {strategy} {world}":
            continue
        optimizer = "sgd" if (len(rows) % 4) == 3 else "adamw"
        parsed = parse_strategy(strategy)
        plan = Plan(
            strategy=strategy,
            dims=dims_for(parsed, world),
            micro_batch=2,
            seq_len=LENGTH,
            loss_parallel=parsed.tp > 1,
        )
        module = MODELS[model]()
        made = build_optimizer(module.parameters(), OptimizerTable(name=optimizer))
        names = {id(p): name for name, p in module.named_parameters()}
        workload = workload_of(made, names)
        said = estimate_memory(read_model(module), plan, workload, cut_parts(module, plan))
        real = run_world(counted, world, plan.to_json(), model, optimizer)
        predicted = {name: getattr(said, name) for name in CATEGORIES}
        measured = {name: max(rank[name] for rank in real) for name in CATEGORIES}
        if parsed.splits_model:
            profile = trace_module(MODELS[model], seq_len=LENGTH, vocab_size=VOCAB, precision="fp32", device="cpu")
            cluster = ClusterSpec(device="cpu", device_name="CPU", devices_per_node=world)
            planned = estimate(profile, plan, workload, cluster)
            if any(getattr(planned, name) != predicted[name] for name in CATEGORIES):
                print(f"PROFILE DIFFERS {model} {strategy} {world} {planned} {predicted}", file=sys.stderr)
                predicted = {name: getattr(planned, name) for name in CATEGORIES}
        facts = {"model": model, "strategy": strategy, "world": world, "optimizer": optimizer}
        rows.append({**facts, "predicted": predicted, "measured": measured, "equal": predicted == measured})
        if predicted != measured:
            print(f"DIFFERS {facts} {predicted} {measured}", file=sys.stderr)
    equal = sum(row["equal"] for row in rows)
    print(json.dumps({"configurations": len(rows), "equal_to_the_byte": equal}))
    if options.only:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    document = {"schema": 1, "torch": torch.__version__, "configurations": len(rows), "equal": equal, "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
