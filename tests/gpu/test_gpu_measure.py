"""What is measured of a GPU: FLOPs and their part of the peak, a trace with kernels, parts that add up to the step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.distributed.process_group import join
from shardwise.hardware.cluster import detect
from shardwise.measure.profiler.profile_steps import StepTrace
from shardwise.measure.profiler.trace_text import words
from shardwise.measure.step_flops import FlopsRecorder
from shardwise.measure.step_time.attribution import Attribution
from shardwise.measure.step_time.timing import PHASES
from shardwise.measure.utilisation import peak_of, utilisation
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.config import TrainTable
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false")
VOCAB, WIDTH, INNER, LAYERS, HEADS, LENGTH, BATCH, ACCUM, STEPS = 8192, 1024, 2816, 8, 16, 1024, 8, 2, 30
WARM = 10


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=LENGTH, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return module


def by_hand() -> tuple[float, float]:
    """Parameters, and model FLOPs of a step: 6 N + 12 L h s for each token."""
    products = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER) + VOCAB * WIDTH
    parameters = products + VOCAB * WIDTH + (2 * LAYERS + 1) * WIDTH
    return parameters, (6 * parameters + 12 * LAYERS * WIDTH * LENGTH) * BATCH * ACCUM * LENGTH


def train(folder: Path, recompute: str) -> tuple[Any, Any, Any, float]:
    """The counted work, the timing, the trace's summary, and a stopwatch's seconds of a step."""
    ranks = join("cuda")
    plan = Plan(
        strategy="ddp", dims=dims_for(parse_strategy("ddp"), 1), micro_batch=BATCH, grad_accum=ACCUM, precision="bf16",
        recompute=recompute, device="cuda",
    )  # type: ignore[arg-type]  # fmt: skip
    session = Session(ranks=ranks, planner=lambda *_: plan)
    table = TrainTable(steps=STEPS + 2, profile=f"{STEPS + 1}:2", output=str(folder))
    probe, trace = FlopsRecorder(), StepTrace(table, 0, 1)
    session.observers += [probe, trace]
    attribution = Attribution.attach(session)
    model: Any = llama()
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    windows = [[(ids, ids)] * ACCUM] * (STEPS + 2)
    since = elapsed = 0.0
    for step in session.run_windows(windows):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
        if step.number in (WARM, STEPS):
            torch.cuda.synchronize()
            since, elapsed = time.perf_counter(), time.perf_counter() - since
    summary = trace.write()
    attribution.finish()
    timing = attribution.timing()
    session.close()
    return probe.work, timing, summary, elapsed / (STEPS - WARM)


@needs_gpu
def test_flops_are_those_counted_by_hand_and_mfu_is_their_part_of_the_peak(tmp_path: Path) -> None:
    work, timing, _, step_s = train(tmp_path, "none")
    parameters, model = by_hand()
    assert work.parameters == parameters
    assert work.model_flops == pytest.approx(model, rel=0.03)
    assert work.executed_flops == pytest.approx(model, rel=0.15), "attention's backward is more, the embedding less"
    cluster = detect("cuda", 1)
    found = utilisation(work, timing.step_s, dims_for(parse_strategy("ddp"), 1), "bf16", cluster)
    peak, _ = peak_of(cluster.gpu, "bf16")
    if peak is None:
        pytest.skip(f"the peak of {cluster.device_name} is not in the hardware table")
    assert 0.02 < found.mfu < 1.0
    assert found.mfu == pytest.approx(model / step_s / peak, rel=0.25), "a stopwatch over other steps of the same run"


@needs_gpu
def test_parts_add_up_to_the_step(tmp_path: Path) -> None:
    _, timing, _, _ = train(tmp_path, "none")
    assert sum(timing.seconds(part) for part in PHASES) == pytest.approx(timing.step_s, rel=0.03)
    assert timing.seconds("backward") > timing.seconds("forward") > 0


@needs_gpu
def test_a_trace_has_kernels_and_who_launched_them(tmp_path: Path) -> None:
    _, _, summary, _ = train(tmp_path, "none")
    assert summary.device == "cuda" and summary.steps == 2
    assert summary.kinds["product"] > 0.2
    assert any(one.operator.startswith("aten::") and one.flops_per_s for one in summary.operations)
    assert 0 < summary.busy_s <= summary.window_s
    assert "the GPU was busy" in "\n".join(words(summary))


@needs_gpu
def test_recompute_is_executed_and_not_needed(tmp_path: Path) -> None:
    work, _, _, _ = train(tmp_path, "full")
    _, model = by_hand()
    assert work.model_flops == pytest.approx(model, rel=0.03)
    assert work.executed_flops > 1.15 * model
