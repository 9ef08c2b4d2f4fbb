"""Step time of plain FSDP2 over that of FSDP2 as `shardwise` runs it over gloo: exchanged, behind the backward.

    python -m benchmarks.links.overlap --output benchmarks/links/results

Two ranks, on loopback and over links of known speed between two network namespaces. Both models have the same weights
and batches, and step in turn in one process tree; a loss that differs stops the benchmark. Needs root for the links,
and a machine with nothing else to do: the load average is kept beside each row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.parallel.data_parallel.fsdp import overlap_over_gloo
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from tests.netns import two_hosts

LINKS = ("loopback", "1gbit")
WIDTHS = ((192, 4), (256, 6))  # hidden size, blocks
WARM_UP, VOCAB, LENGTH, BATCH = 3, 512, 256, 4
TIMEOUT_S = 400.0
ROOT = Path(__file__).parents[2]


def main() -> None:
    """Measure each link, print a line for each model, write every sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", nargs="+", default=list(LINKS))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank:
        _rank(words.steps)
        return
    rows = []
    for link in words.links:
        for row in _measure(link, words.steps):
            rows.append({"link": link, "load": os.getloadavg()[0], **row})
            print(f"{link}: {row['parameters'] / 1e6:.1f} M parameters, plain over ours {row['ratio']:.3f}", flush=True)
    if words.output is not None:
        path = words.output / f"overlap_cpu_{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def _measure(link: str, steps: int) -> list[dict[str, Any]]:
    words = ["-m", "benchmarks.links.overlap", "--rank", "--steps", str(steps)]
    if link == "loopback":
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    else:
        with two_hosts(link) as hosts:
            done = hosts.torchrun(words, timeout_s=TIMEOUT_S, cwd=ROOT)[0]
    if done.returncode:
        raise SystemExit(f"{link}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _rank(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for width, blocks in WIDTHS:
        models = {name: _build(width, blocks, mesh, ours=name == "ours") for name in ("plain", "ours")}
        optimizers = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        generator = torch.Generator().manual_seed(dist.get_rank())
        for turn in range(WARM_UP + steps):
            ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
            losses = set()
            for name in ("plain", "ours")[:: 1 if turn % 2 else -1]:
                dist.barrier()
                began = time.perf_counter()
                losses.add(_step(models[name], optimizers[name], ids))
                times[name].append(time.perf_counter() - began)
            if len(losses) > 1:
                raise SystemExit(f"losses differ in step {turn}: {losses}")
        if dist.get_rank() == 0:
            kept = {name: found[WARM_UP:] for name, found in times.items()}
            ratio = statistics.median(a / b for a, b in zip(kept["plain"], kept["ours"], strict=True))
            size = sum(parameter.numel() for parameter in models["plain"].parameters())
            print(json.dumps({"parameters": size, "ratio": ratio, "samples_s": kept}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(ids, labels=ids).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _build(width: int, blocks: int, mesh: DeviceMesh, *, ours: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": blocks}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=4, **sizes))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if ours:
        plan = Plan(strategy="fsdp", dims=dims_for(parse_strategy("fsdp"), mesh.size()), device="cpu")
        overlap_over_gloo(model, plan, mesh)
    return model


if __name__ == "__main__":
    main()
