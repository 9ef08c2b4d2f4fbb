"""The same-gradient contract over combinations of axes: whatever cuts the model, the gradient is that of one process.

Gradients are compared, in float64, before and after clipping, with ragged labels, accumulation and a partial window.
"""

from __future__ import annotations

import pytest

from tests.contract import LIMIT, Case, train
from tests.turns import by_turns
from tests.worlds import run_each

CASES = [
    Case(2, "ddp+tp2", "llama"),
    Case(2, "ddp+tp2", "qwen3", options={"loss_parallel": True}),
    Case(2, "fsdp+tp2", "gpt2", options={"sequence_parallel": False}),
    Case(2, "ddp+tp2", "bert", options={"loss_parallel": True, "recompute": "full"}),
    Case(2, "fsdp+tp2", "own", options={"recompute": "selective"}),
    Case(2, "ddp+pp2", "mistral"),
    Case(2, "fsdp+pp2", "gemma", accum=3),
    Case(2, "ddp+pp2", "own", accum=4, options={"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2}),
    Case(2, "zero1+cp2", "gpt2", accum=3),
    Case(2, "ddp+cp2", "qwen3"),
    Case(2, "zero2+cp2", "bert", options={"recompute": "full"}),
    Case(4, "fsdp+tp2", "qwen3", accum=3, options={"loss_parallel": True}),
    Case(4, "ddp+tp2", "gemma", options={"loss_parallel": True}),
    Case(4, "zero2+tp2", "mistral", options={"recompute": "full"}),
    Case(4, "ddp+tp4", "llama"),
    Case(4, "fsdp+offload+tp2", "llama", accum=1),
    Case(4, "fsdp+pp2", "qwen3", accum=3),
    Case(4, "ddp+pp2", "gpt2", options={"pipeline_schedule": "gpipe"}),
    Case(4, "ddp+pp4", "llama", accum=4),
    Case(4, "fsdp+cp2", "llama", options={"loss_parallel": False}),
    Case(4, "ddp+cp4", "gemma"),
    Case(4, "ddp+tp2+pp2", "gpt2", options={"loss_parallel": True}),
    Case(4, "ddp+tp2+cp2", "llama", options={"loss_parallel": True}),
    Case(4, "ddp+pp2+cp2", "bert"),
    Case(4, "hsdp+cp2", "own"),
    Case(8, "fsdp+tp2+pp2", "llama", accum=2, options={"loss_parallel": True}),
    Case(8, "fsdp+tp2+pp2", "qwen3", accum=3, options={"loss_parallel": True, "recompute": "full"}),
    Case(8, "ddp+tp2+pp2", "gemma", options={"sequence_parallel": False}),
    Case(8, "hsdp+tp2", "mistral", accum=1, options={"loss_parallel": True}),
    Case(8, "hsdp+pp2", "gpt2"),
    Case(8, "fsdp+tp2+cp2", "qwen3", accum=1, options={"loss_parallel": True, "recompute": "selective"}),
    Case(8, "ddp+tp2+pp2+cp2", "llama", options={"loss_parallel": True}),
    Case(8, "fsdp+tp2+pp2", "own", accum=4, options={"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2}),
    Case(8, "zero2+tp2+pp2", "bert", options={"loss_parallel": True}),
]


@pytest.mark.turns(1)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_gradient_is_that_of_one_process(world: int) -> None:
    cases = by_turns([case for case in CASES if case.world == world], 6 if world == 8 else 3, f"{world} ranks")
    wrong: dict[str, object] = {}
    for case, found in zip(cases, run_each(train, world, [(case,) for case in cases], timeout_s=300.0), strict=True):
        far = {rank: result["worst"] for rank, result in enumerate(found) if not result["worst"][0] <= LIMIT}
        held = {name for result in found for name in result["names"]} ^ set(found[0]["expected"])
        wrong |= {str(case): (far, held)} if far or held else {}
    assert not wrong, wrong


def test_there_are_enough_combinations() -> None:
    assert len({(case.world, case.strategy) for case in CASES}) >= 24
    assert {case.model for case in CASES} == {"llama", "qwen3", "gpt2", "mistral", "gemma", "bert", "own"}
    assert {case.world for case in CASES} == {2, 4, 8}
