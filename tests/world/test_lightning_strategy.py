"""`ShardwiseStrategy` in Lightning's Trainer: gradients of one process, and checkpoints that resume."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.checkpoint.readers.detect import open_source
from tests.worlds import run_each, run_world

# tests.lightning_loop is imported inside of the functions: Lightning takes seconds
Weights = dict[str, torch.Tensor]
Found = tuple[Weights, list[torch.Tensor]]


def gradients(strategy: str) -> Found:
    from tests.lightning_loop import fit

    recorded = fit(strategy)
    return recorded.first, recorded.batches


def errors(ranks: list[Found], dp: int) -> list[float]:
    """Of each rank, against one process over the samples of all data-parallel ranks."""
    from tests.lightning_loop import ACCUM, Module

    batches = {str(batch): batch for _, own in ranks for batch in own}  # tensor-parallel ranks have the same ones
    assert len(batches) == dp * ACCUM
    rows = torch.cat(list(batches.values()))
    module = Module()
    module.training_step((rows[:, :7], rows[:, 7:]), 0).backward()
    reference = {name: p.grad for name, p in module.named_parameters()}
    assert all(found.keys() == reference.keys() for found, _ in ranks)
    return [max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in reference.items()) for found, _ in ranks]


def test_gradients_are_those_of_one_process() -> None:
    cases = [("ddp",), ("fsdp",), ("zero1",), ("zero2",), ("fsdp+offload",)]
    for (name,), ranks in zip(cases, run_each(gradients, 2, cases, timeout_s=170), strict=True):
        assert max(errors(ranks, 2)) < 1e-9, name


def low_precision(strategy: str, precision: str) -> None:
    """The receipt raises where the compute dtype or the recompute is not as planned."""
    from tests.lightning_loop import InFloat32, fit

    fit(strategy, module=InFloat32, precision=precision, recompute="full")


def test_precision_and_recompute_are_as_planned() -> None:
    cases = [("ddp", "bf16"), ("fsdp", "bf16"), ("zero1", "fp16")]
    run_each(low_precision, 2, cases, timeout_s=170)


def test_tensor_parallel_gradients_are_those_of_one_process() -> None:
    assert max(errors(run_world(gradients, 4, "fsdp+tp2", timeout_s=170), 2)) < 1e-9


def resumed() -> tuple[Weights, Weights, list[str], str]:
    from tests.lightning_loop import fit

    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    folder = Path(made[0])
    whole = fit("fsdp", epochs=2, folder=folder).weights
    place = folder / "epoch=0.ckpt"
    with open_source(str(place)) as source:
        kind, names = source.kind, sorted(source.tensors)
    again = fit("ddp", epochs=2, resume=place).weights
    return whole, again, names, kind


def test_a_checkpoint_in_our_format_resumes_under_another_strategy() -> None:
    for whole, again, names, kind in run_world(resumed, 2, timeout_s=170):
        assert "Shardwise" in kind
        assert "model/net.head.weight" in names
        assert "optimizer/net.head.weight/exp_avg" in names
        worst = max(float((whole[name] - again[name]).abs().max()) for name in whole)
        assert worst < 1e-9


@pytest.mark.parametrize("strategy", ["fsdp+pp2", "fsdp+cp2", "deepspeed-zero2", "fsdp+lora"])
def test_what_does_not_run_in_lightnings_loop_is_refused(strategy: str) -> None:
    from shardwise.integrations.lightning import ShardwiseStrategy

    with pytest.raises(shardwise.ShardwiseError, match="one micro batch at a time"):
        ShardwiseStrategy(strategy)
