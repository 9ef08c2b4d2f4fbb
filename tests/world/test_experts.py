"""Mixtures of experts of transformers as they are: the gradient of one process, with the routers' own losses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract import LIMIT
from tests.experts import NONE, TERMS, against_one_process
from tests.worlds import run_world

SOFTMAX = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
CASES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    2: [
        *((name, strategy, {}) for name in SOFTMAX for strategy in ("fsdp",)),
        *(("mixtral", strategy, {}) for strategy in ("ddp", "zero1", "zero2", "hsdp")),
        *(("qwen3_moe", strategy, {"masked": False}) for strategy in ("ddp+tp2", "ddp+pp2", "ddp+cp2")),
        ("mixtral", "fsdp", {"recompute": "full"}),
        ("qwen3_moe", "fsdp", {"gradient_sync": "every"}),
        *(("deepseek_v3", strategy, {"terms": NONE}) for strategy in ("ddp", "fsdp")),
        ("deepseek_v3", "ddp+pp2", {"terms": NONE, "masked": False}),
        ("deepseek_v3", "ddp+cp2", {"terms": NONE, "masked": False}),
    ],
    4: [
        ("mixtral", "hsdp", {}),
        ("qwen3_moe", "fsdp+pp2", {"masked": False}),
        ("qwen3_moe", "fsdp+tp2", {"masked": False}),
        ("olmoe", "fsdp+cp2", {"masked": False}),
        ("mixtral", "fsdp+pp2", {"masked": False, "recompute": "full"}),
    ],
}


def each(world: int) -> dict[str, tuple[float, str]]:
    found = {}
    for name, strategy, options in CASES[world]:
        given = {"terms": TERMS, **options}
        try:
            found[f"{name} {strategy} {options}"] = against_one_process(name, strategy, **given)
        except Exception as error:
            import traceback
            traceback.print_exc()
            found[f"{name} {strategy} {options}"] = (float("inf"), repr(error))
            raise
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", CASES)
def test_the_gradient_is_that_of_one_process(world: int) -> None:
    ranks = run_world(each, world, world, timeout_s=380)
    wrong = {case: rows[case] for rows in ranks for case in rows if not rows[case][0] <= LIMIT}
    assert not wrong
