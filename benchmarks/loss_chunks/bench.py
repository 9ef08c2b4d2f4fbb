"""What ``loss_chunks`` saves and costs: peak memory and step time of one process, contenders turn by turn.

    python benchmarks/loss_chunks/bench.py --rounds 5 --output benchmarks/loss_chunks

Every contender of every round is a process of its own with one thread. Times are compared as CPU time, because what
else a machine does stretches the wall clock. Three others than the product's are there to choose by: ``again``
multiplies each chunk a second time in backward, ``checkpoint`` leaves that to ``torch.utils.checkpoint``, ``torch`` is
``torch.nn.functional.linear_cross_entropy`` (of torch 2.13) with chunks of the same size. ``--errors`` compares the
gradients of the product's and of torch's with those of all logits at once in float64.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VOCAB, WIDTH, LAYERS, LENGTH, MICRO_BATCH = 32000, 256, 4, 512, 4
CONTENDERS = ("1", "8", "16", "8 again", "8 checkpoint", "8 torch")
TOKENS, FEATURES, WORDS = 1024, 128, 8000  # of the comparison of gradients


def main() -> None:
    """Run all rounds and write every sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a contender in a round")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--strategy", default="ddp", help="of one rank")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/loss_chunks"))
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS, help="the first is '1'")
    parser.add_argument("--errors", action="store_true", help="compare gradients instead, and print the table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child, given.precision, given.strategy, given.steps)))
        return
    if given.errors:
        print(json.dumps(errors(), indent=1))
        return
    import torch

    samples: list[dict[str, Any]] = []
    for turn in range(given.rounds):
        for name in given.contenders if turn % 2 == 0 else given.contenders[::-1]:
            command = [sys.executable, __file__, "--child", name, "--precision", given.precision]
            command += ["--strategy", given.strategy, "--steps", str(given.steps)]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            samples.append({"contender": name, "round": turn, **json.loads(told)})
            print(name, told, flush=True)
    date = datetime.date.today().isoformat()
    document = {
        "date": date,
        "device": "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "threads": 1,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "precision": given.precision,
        "strategy": given.strategy,
        "model": {"vocab": VOCAB, "width": WIDTH, "layers": LAYERS, "tokens": LENGTH * MICRO_BATCH},
        "table": table(samples, given.contenders),
        "gradients": errors(),
        "samples": samples,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / f"loss_chunks_cpu_{given.strategy}_{given.precision}_{date}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["table"], indent=1))


def table(samples: list[dict[str, Any]], contenders: Sequence[str]) -> dict[str, dict[str, float]]:
    """Medians over rounds; a time is CPU time of the process, over that of one chunk in the same round."""
    plain = {row["round"]: statistics.median(row["steps_cpu_s"]) for row in samples if row["contender"] == "1"}
    found = {}
    for name in contenders:
        rows = [row for row in samples if row["contender"] == name]
        ratios = [statistics.median(row["steps_cpu_s"]) / plain[row["round"]] for row in rows]
        found[name] = {
            "step_s": statistics.median(statistics.median(row["steps_s"]) for row in rows),
            "step_cpu_s": statistics.median(statistics.median(row["steps_cpu_s"]) for row in rows),
            "time_ratio": statistics.median(ratios),
            "least_ratio": min(ratios),
            "most_ratio": max(ratios),
            "peak_bytes": statistics.median(row["peak_bytes"] for row in rows),
            "predicted_bytes": rows[0]["predicted_bytes"],
        }
    return found


def child(name: str, precision: Any, strategy: str, steps: int) -> dict[str, Any]:
    """One contender: two steps to warm up, one whose peak is looked at, then those that are timed."""
    import torch
    import transformers

    from shardwise.measure.peaks import peak_watch
    from shardwise.plan.plan import Plan
    from shardwise.run.start import start
    from shardwise.train.loss import token_loss_sum

    torch.set_num_threads(1)
    torch.manual_seed(0)
    number, _, how = name.partition(" ")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip
    plan = Plan(
        strategy=strategy, micro_batch=MICRO_BATCH, seq_len=LENGTH, precision=precision, loss_chunks=int(number)
    )
    predicted = foresee(model, plan) if not how else None
    session = start(plan, receipts=False)
    if how == "again":
        multiply_again()
    ids = torch.randint(VOCAB, (MICRO_BATCH, LENGTH))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), ids)
    loss_of = {"checkpoint": checkpointed, "torch": fused}.get(how, token_loss_sum)
    watch, peak, times = peak_watch(session.device), 0, list[tuple[float, float]]()
    for step in session.steps([(ids, ids)] * (3 + steps)):
        began = time.perf_counter(), time.process_time()
        if step.number == 3:
            watch.start(session)
        step.run(model, loss_of)
        step.update(optimizer)
        if step.number == 3:
            peak = max(watch.stop(session, step).allocated.values())
        if step.number > 3:
            times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    session.close()
    wall, cpu = zip(*times, strict=True)
    return {"steps_s": wall, "steps_cpu_s": cpu, "peak_bytes": peak, "predicted_bytes": predicted}


def foresee(model: Any, plan: Any) -> int | None:
    """The peak that the planner predicts for ``plan``."""
    import torch

    from shardwise.cost.memory.estimate_memory import estimate
    from shardwise.hardware.cluster import detect
    from shardwise.parallel.apply import parameter_names
    from shardwise.run.inspect_model import traced_profile
    from shardwise.train.optimizer import workload_of

    profile = traced_profile(model, LENGTH, VOCAB, precision=plan.precision, device="cpu")
    if profile is None:
        return None
    workload = workload_of(torch.optim.AdamW(model.parameters()), parameter_names(model))
    return estimate(profile, plan, workload, detect("cpu", 1)).allocated


def multiply_again() -> None:
    """What the product does in fp16, in every dtype: gradients are found in backward, from a second product."""
    import torch

    from shardwise.parallel import chunked_loss as loss_chunks

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any, how: Any) -> Any:
            ctx.how = how
            ctx.save_for_backward(hidden, weight, bias, labels)
            return loss_chunks._in_chunks((hidden, weight, bias), labels, how, (False,) * 3)[0]

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            *operands, labels = ctx.saved_tensors
            _, found = loss_chunks._in_chunks(operands, labels, ctx.how, ctx.needs_input_grad[:3], grad)
            return *(g if g is None else g.to(o.dtype) for g, o in zip(found, operands, strict=True)), None, None

    loss_chunks._ChunkedLoss = Again  # type: ignore[misc,assignment]


def checkpointed(outputs: Any, labels: Any) -> Any:
    """The same loss, each chunk under ``torch.utils.checkpoint``."""
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    late = outputs.logits
    head, flat, labels = late.head, late.hidden.flatten(0, -2), labels.flatten()
    rows = -(-len(flat) // head.chunks)

    def part(hidden: Any, weight: Any, wanted: Any) -> Any:
        logits = functional.linear(hidden.to(head.dtype), weight.to(head.dtype))
        return functional.cross_entropy(logits.float(), wanted, ignore_index=-100, reduction="sum")

    pairs = zip(flat.split(rows), labels.split(rows), strict=True)
    return sum(checkpoint(part, hidden, head.weight, wanted, use_reentrant=False) for hidden, wanted in pairs)


def fused(outputs: Any, labels: Any) -> Any:
    """The same loss by ``torch.nn.functional.linear_cross_entropy``, with chunks of the same size."""
    import torch
    from torch.nn import functional

    late = outputs.logits
    head, flat = late.head, late.hidden.flatten(0, -2)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=-(-len(flat) // head.chunks))
    with torch.autocast(flat.device.type, enabled=False):
        return functional.linear_cross_entropy(
            flat.to(head.dtype),
            head.weight.to(head.dtype),
            labels.flatten(),
            linear_bias=None if head.bias is None else head.bias.to(head.dtype),
            reduction="sum",
            ignore_index=-100,
            options=options,
        )


def errors() -> dict[str, dict[str, dict[str, float]]]:
    """Error of loss and gradients in each dtype, over the largest element of those of all logits in float64."""
    import torch
    from torch import nn
    from torch.nn import functional

    from shardwise.parallel.chunked_loss import LateLogits, _Head
    from shardwise.train.loss import token_loss_sum

    ways: dict[str, Callable[[Any, Any], Any]] = {"shardwise": token_loss_sum, "torch": fused}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        head = nn.Linear(FEATURES, WORDS, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        hidden = torch.randn(TOKENS, FEATURES).to(dtype)
        labels = torch.randint(WORDS, (TOKENS,)).masked_fill(torch.rand(TOKENS) < 0.1, -100)
        operands = [hidden, *(p.detach().to(dtype) for p in (head.weight, head.bias))]  # as each way computes with
        full = [one.double().requires_grad_() for one in operands]
        loss = functional.cross_entropy(functional.linear(*full), labels, ignore_index=-100, reduction="sum")
        expected = [loss.detach(), *torch.autograd.grad(loss, full)]
        for name, way in ways.items():
            own = hidden.detach().clone().requires_grad_()
            outputs = argparse.Namespace(logits=LateLogits(own, _Head(head, dtype, 8, strict=False)))
            result = way(outputs, labels)
            got = [result.detach(), *torch.autograd.grad(result, [own, head.weight, head.bias])]
            apart = [float((g.double() - e).abs().max() / e.abs().max()) for g, e in zip(got, expected, strict=True)]
            columns = ("loss", "hidden states", "weight", "bias")
            found.setdefault(str(dtype), {})[name] = dict(zip(columns, apart, strict=True))
    return found


if __name__ == "__main__":
    main()
