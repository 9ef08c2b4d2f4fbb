"""Two ranks over a link of known speed and delay, whose contenders step in turn in one process tree."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.netns import two_hosts

WARM_UP, VOCAB, LENGTH, BATCH = 3, 512, 256, 4
TIMEOUT_S = 400.0
ROOT = Path(__file__).parents[2]
Contender = tuple[nn.Module, torch.optim.Optimizer]


def run(module: str, doc: str, links: Sequence[str], ranks: Callable[[int], None]) -> None:
    """The command line of a benchmark: measure each link, print a line for each model, write every sample.

    A link is ``loopback``, or a rate and a delay of one way: ``1gbit``, ``1gbit-10ms``.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--links", nargs="+", default=list(links))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        ranks(words.steps)
        dist.barrier()
        dist.destroy_process_group()
        return
    rows = []
    for link in words.links:
        for row in _measure(module, link, words.steps):
            rows.append({"link": link, "load": os.getloadavg()[0], **row})
            print(f"{link}: {row['parameters'] / 1e6:.1f} M parameters, plain over ours {row['ratio']:.3f}", flush=True)
    if words.output is not None:
        name = f"{module.rpartition('.')[2]}_cpu_{time.strftime('%Y-%m-%d')}.json"
        (words.output / name).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def _measure(module: str, link: str, steps: int) -> list[dict[str, Any]]:
    words = ["-m", module, "--rank", "--steps", str(steps)]
    if link == "loopback":
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    else:
        rate, _, delay = link.partition("-")
        with two_hosts(rate, float(delay.removesuffix("ms") or 0) / 1e3) as hosts:
            done = hosts.torchrun(words, timeout_s=TIMEOUT_S, cwd=ROOT)[0]
    if done.returncode:
        raise SystemExit(f"{link}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def in_turn(contenders: Mapping[str, Contender], steps: int) -> None:
    """Step ``plain`` and ``ours``, which begin with the same weights, on the same batches, and print the samples.

    Raises:
        SystemExit: their losses differ in a step.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for turn in range(WARM_UP + steps):
        ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
        losses = set()
        for name in ("plain", "ours")[:: 1 if turn % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            losses.add(_step(*contenders[name], ids))
            times[name].append(time.perf_counter() - began)
        if len(losses) > 1:
            raise SystemExit(f"losses differ in step {turn}: {losses}")
    if dist.get_rank() == 0:
        kept = {name: found[WARM_UP:] for name, found in times.items()}
        ratio = statistics.median(a / b for a, b in zip(kept["plain"], kept["ours"], strict=True))
        size = sum(parameter.numel() for parameter in contenders["plain"][0].parameters())
        print(json.dumps({"parameters": size, "ratio": ratio, "samples_s": kept}), flush=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(ids, labels=ids).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def small_llama(width: int, blocks: int) -> nn.Module:
    """A Llama of transformers, with the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": blocks}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=4, **sizes))
