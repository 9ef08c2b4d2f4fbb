"""Every line of the effects receipt under DeepSpeed turns false when its option did not take effect."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.errors import ReceiptError
from shardwise.parallel.engines import deepspeed_engine as under_test
from shardwise.plan.deepspeed_stages import deepspeed_config
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from tests.models import decoder, ragged_batches
from tests.worlds import run_world

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install 'shardwise[deepspeed]')",
)
Change = Callable[[dict[str, Any]], None]


def configured(change: Change) -> Any:
    """DeepSpeed is given another configuration than the plan's."""

    def changed(*args: Any, **options: Any) -> dict[str, Any]:
        config = deepspeed_config(*args, **options)
        change(config)
        return config

    return mock.patch.object(under_test, "deepspeed_config", changed)


def stage_2(config: dict[str, Any]) -> None:
    config["zero_optimization"]["stage"] = 2


def no_offload(config: dict[str, Any]) -> None:
    config["zero_optimization"].pop("offload_optimizer")


def no_parameter_offload(config: dict[str, Any]) -> None:
    config["zero_optimization"].pop("offload_param")


def no_bf16(config: dict[str, Any]) -> None:
    config.pop("bf16")


def narrow_reduction(config: dict[str, Any]) -> None:
    config["communication_data_type"] = "bf16"


def narrow_sums(config: dict[str, Any]) -> None:
    config["data_types"]["grad_accum_dtype"] = "bf16"


def never_clips() -> Any:
    plain = under_test.DeepSpeed.update
    return mock.patch.object(under_test.DeepSpeed, "update", lambda self, clip_norm: plain(self, None))


def reduces_early() -> Any:
    plain = under_test.DeepSpeed.begin_micro
    return mock.patch.object(under_test.DeepSpeed, "begin_micro", lambda self, *, last: plain(self, last=True))


def no_recompute() -> Any:
    plain = under_test.apply_recompute
    return mock.patch.object(
        under_test, "apply_recompute", lambda module, kind, blocks, **_: plain(module, "none", blocks)
    )


SABOTAGES: dict[str, tuple[str, dict[str, Any], Callable[[], Any], str]] = {
    "another stage": ("deepspeed-zero1", {}, lambda: configured(stage_2), "engine"),
    "no offload": ("deepspeed-zero2+offload", {}, lambda: configured(no_offload), "optimizer state rests in"),
    "no parameter offload": (
        "deepspeed-zero3+offload",
        {},
        lambda: configured(no_parameter_offload),
        "parameters rest in",
    ),
    "no bf16": ("deepspeed-zero2", {"precision": "bf16"}, lambda: configured(no_bf16), "compute dtype"),
    "narrow reduction": ("deepspeed-zero3", {}, lambda: configured(narrow_reduction), "reduction dtype"),
    "narrow sums": ("deepspeed-zero3", {"precision": "bf16"}, lambda: configured(narrow_sums), "gradient dtype"),
    "never clips": ("deepspeed-zero3", {}, never_clips, "gradient clipping"),
    "reduces early": ("deepspeed-zero1", {}, reduces_early, "gradients reduced per step"),
    "no recompute": ("deepspeed-zero3", {"recompute": "full"}, no_recompute, "block forwards per step"),
}


def sabotaged(names: list[str]) -> dict[str, str]:
    """The error of the receipt for each sabotage; empty where it held."""
    import torch.distributed as dist

    from shardwise.run.start import start

    found = {}
    for name in names:
        strategy, options, sabotage, _ = SABOTAGES[name]
        for broken in (False, True):
            dims = dims_for(parse_strategy(strategy), dist.get_world_size())
            session = start(Plan(strategy=strategy, dims=dims, grad_accum=2, **options))
            model = decoder(tied=True).float()
            with sabotage() if broken else mock.patch.object(under_test, "_MARK", under_test._MARK):
                model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
                said = ""
                try:
                    for step in session.steps(ragged_batches(8)):
                        step.run(
                            model,
                            lambda out, y: torch.nn.functional.cross_entropy(
                                out.float().flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
                            ),
                        )
                        step.update(optimizer, clip_norm=0.05)
                except ReceiptError as error:
                    said = str(error)
                session.close()
            if not broken and said:
                return {name: f"false without a sabotage: {said}"}
        found[name] = said
    return found


@pytest.mark.parametrize("part", [0, 1, 2])
def test_an_option_that_did_not_take_effect_turns_its_line_false(part: int) -> None:
    names = sorted(SABOTAGES)[part::3]
    found = run_world(sabotaged, 2, names)[0]
    for name, said in found.items():
        assert f"effects: {SABOTAGES[name][3]}: planned" in said, f"{name}: {said or 'every line held'}"
