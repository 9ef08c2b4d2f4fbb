"""What explains a wrong gradient: each cause that can be named, made by hand from gradients and degrees alone."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.gradcheck.causes import (
    CauseContext,
    candidates,
    explain,
    explain_loss,
    explain_norm,
    explain_weights,
    name_factor,
    pattern_of,
)
from shardwise.gradcheck.compare import Gradients, GradientVerdict, compare, judge
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan

TOLERANCE = 1e-9


def plan_of(**degrees: int) -> Plan:
    accumulation = degrees.pop("grad_accum", 1)
    return Plan(strategy="ddp", dims=ParallelDims(**degrees), grad_accum=accumulation)


def made(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (12, 4),
        "blocks.0.q_norm.weight": (4,),
        "blocks.0.k_proj.weight": (8, 4),
        "blocks.1.q_norm.weight": (4,),
        "blocks.1.k_proj.weight": (8, 4),
    }
    return {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}


def told(reference: Gradients, found: Gradients, plan: Plan, **more: object) -> str:
    differences = compare(reference, found)
    setting = CauseContext(plan, key_value_heads=2, head_dim=4)
    return "\n".join(explain(reference, found, differences, setting, tolerance=TOLERANCE, **more))  # type: ignore[arg-type]


def scaled(reference: dict[str, torch.Tensor], factor: float, only: str = "") -> dict[str, torch.Tensor]:
    return {name: g * factor if only in name else g for name, g in reference.items()}


def test_equal_gradients_need_no_explanation() -> None:
    reference = made()
    assert not told(reference, {n: g + 1e-14 for n, g in reference.items()}, plan_of(tp=2))
    assert all(d.error < TOLERANCE for d in compare(reference, reference))


@pytest.mark.parametrize(
    ("degrees", "factor", "words"),
    [
        ({"tp": 2}, 2.0, "2 × too large: tp 2: the loss (or its gradient) is counted once for each rank of tp"),
        ({"tp": 4}, 0.25, "4 × too small: tp 4: the loss (or its gradient) is averaged over tp"),
        ({"dp_replicate": 3}, 3.0, "3 × too large: dp 3: gradients are added up over dp"),
        ({"dp_shard": 2}, 0.5, "2 × too small: dp 2: the mean over dp"),
        ({"cp": 2}, 0.5, "2 × too small: cp 2: the mean over cp"),
        ({"cp": 2}, 2.0, "2 × too large: cp 2: gradients are added up over cp"),
        ({"pp": 2}, 2.0, "2 × too large: pp 2: the loss (or its gradient) is counted once for each stage"),
        ({"pp": 2, "grad_accum": 5}, 5.0, "5 × too large: micro batches of the pipeline 5"),
        ({"grad_accum": 3}, 1 / 3, "3 × too small: accumulation 3"),
        ({"tp": 2, "dp_replicate": 2}, 2.0, "2 × too large, the degree of tp 2 and of dp 2: either"),
        ({"tp": 2, "cp": 3}, 6.0, "6 × too large: cp × tp 6"),
        ({"tp": 2}, 1.7, "1.7 × too large: no degree of the plan explains that (tp 2)"),
        ({"tp": 2}, -1.0, "the sign is wrong"),
    ],
)
def test_a_factor_over_everything_is_named(degrees: dict[str, int], factor: float, words: str) -> None:
    reference = made()
    text = told(reference, scaled(reference, factor), plan_of(**degrees))
    assert words in text
    assert text.count("\n") == 0


def test_a_zero_gradient_is_called_zero() -> None:
    reference = made()
    assert "zero" in told(reference, scaled(reference, 0.0), plan_of(tp=2))


def test_every_degree_has_candidates_both_ways() -> None:
    found = candidates(plan_of(dp_replicate=2, dp_shard=2, tp=3, pp=5, cp=7, grad_accum=11))
    factors = {round(c.factor, 9) for c in found}
    for degree in (4, 3, 5, 7, 11):
        assert degree in factors
        assert round(1 / degree, 9) in factors
    assert not candidates(plan_of())


def test_a_factor_on_some_parameters_has_their_names() -> None:
    reference = made()
    text = told(reference, scaled(reference, 2.0, only="q_norm"), plan_of(tp=2))
    assert "the gradient of blocks.*.q_norm.weight (2 parameters) is 2 × too large: tp 2" in text


def test_parts_that_were_never_summed_have_their_axis() -> None:
    reference = made()
    share = made(1)
    first = {n: share[n] if "norm" in n else g for n, g in reference.items()}
    second = {n: reference[n] - share[n] if "norm" in n else g for n, g in reference.items()}
    text = told(reference, first, plan_of(tp=2), parts=[first, second])
    assert text == (
        "the gradient of blocks.*.q_norm.weight (2 parameters) is not summed over tp: each rank has a part of it"
    )
    text = told(reference, first, plan_of(pp=2), parts=[first, second])
    assert "is not summed over pp: each stage has a part of it" in text


def test_gradients_that_were_never_averaged_have_their_axis() -> None:
    reference, change = made(), made(2)
    first = {n: g + change[n] for n, g in reference.items()}
    second = {n: g - change[n] for n, g in reference.items()}
    text = told(reference, first, plan_of(dp_replicate=2), parts=[first, second])
    assert "is not averaged over dp: each rank has that of its own samples or tokens alone" in text


def test_only_the_ranks_of_one_group_are_put_together() -> None:
    """On dp 2 × tp 2, ranks 0 and 1 are neighbours along tp, 0 and 2 along dp."""
    reference, share = made(), made(3)
    rest = {n: reference[n] - share[n] for n in reference}
    parts = [share, rest, share, rest]
    assert "not summed over tp" in told(reference, share, plan_of(dp_replicate=2, tp=2), parts=parts)
    parts = [share, share, rest, rest]
    assert "not summed over dp" in told(reference, share, plan_of(dp_replicate=2, tp=2), parts=parts)


def weighed(weights: dict[tuple[int, int], float], tokens: dict[tuple[int, int], int]) -> str:
    parts = {key: made(10 + i) for i, key in enumerate(tokens)}
    total = sum(tokens.values())
    reference = {n: sum(parts[key][n] for key in parts) / total for n in made()}
    found = {n: sum(weights[key] * parts[key][n] for key in parts) for n in made()}
    return told(reference, found, plan_of(dp_replicate=2), contributions=parts, tokens=tokens)


TOKENS = {(0, 0): 7, (0, 1): 5, (1, 0): 2, (1, 1): 10}


def test_micro_batches_averaged_alone() -> None:
    text = weighed({key: 1 / (4 * n) for key, n in TOKENS.items()}, TOKENS)
    assert "each micro batch is averaged over its own tokens (a mean of means)" in text
    assert "(24)" in text


def test_ranks_that_divide_by_their_own_tokens() -> None:
    text = weighed({key: 1 / (2 * 12) if key[0] == 0 else 1 / (2 * 11) for key in TOKENS}, TOKENS | {(1, 1): 9})
    assert "each rank divides by its own tokens (12, 11) where the tokens of the global batch (23)" in text


def test_lost_samples_and_lost_micro_batches() -> None:
    assert "samples of data-parallel rank 1 do not count" in weighed(
        {key: 1 / 24 if key[0] == 0 else 0.0 for key in TOKENS}, TOKENS
    )
    assert "micro batch 0 (of 2) does not count" in weighed(
        {key: 1 / 24 if key[1] == 1 else 0.0 for key in TOKENS}, TOKENS
    )
    assert "micro batches are not weighted by their tokens: rank 0 micro batch 0: 2 ×" in weighed(
        {key: (2.0 if key == (0, 0) else 1.0) / 24 for key in TOKENS}, TOKENS
    )


def test_parameters_without_a_gradient() -> None:
    reference: dict[str, torch.Tensor | None] = dict(made())
    found = {n: None if "embed" in n else g for n, g in reference.items()}
    assert told(reference, found, plan_of(tp=2)).startswith("no gradient: embed.weight (1 of 5 parameters)")
    assert "no parameter has a gradient" in told(reference, dict.fromkeys(reference), plan_of(tp=2))
    unused = {**reference, "idle.weight": None}
    assert not told(unused, {**reference, "idle.weight": None}, plan_of(tp=2))
    assert not told(unused, {**reference, "idle.weight": torch.zeros(3)}, plan_of(tp=2))
    assert told(unused, {**reference, "idle.weight": torch.ones(3)}, plan_of(tp=2))


def test_rows_that_differ_are_said_with_the_heads_that_they_are() -> None:
    reference = made()
    found = dict(reference)
    name = "blocks.1.k_proj.weight"
    found[name] = reference[name].clone()
    found[name][4:] *= torch.arange(1, 5)[:, None]
    text = told(reference, found, plan_of(tp=2))
    assert f"{name}: rows 5 to 7 of 8 differ, the others are right" in text
    assert "key/value heads 1 of 2" in text


def test_rows_in_the_wrong_place_are_told_from_wrong_rows() -> None:
    reference = made()
    name = "blocks.0.k_proj.weight"
    swapped = {**reference, name: reference[name].roll(4, 0)}
    assert "rows from 0 on contain what belongs to rows from 4 on" in told(reference, swapped, plan_of(tp=2))
    lines = explain_weights(reference, swapped, compare(reference, swapped), CauseContext(plan_of(tp=2), 2, 4))
    assert lines[0].startswith(f"the weights on the ranks are not the model's: {name}: all 8 rows differ")


@pytest.mark.parametrize(
    ("factor", "degrees", "words"),
    [
        (math.sqrt(2), {"tp": 2}, "the root of tp"),
        (1 / math.sqrt(2), {"dp_shard": 2}, "1 / the root of dp"),
        (1.2, {"tp": 2}, "some parameters count once for each rank of tp"),
        (0.9, {"tp": 2}, "parameters are missing"),
    ],
)
def test_a_wrong_norm_over_right_gradients(factor: float, degrees: dict[str, int], words: str) -> None:
    assert words in explain_norm(3.0 * factor, 3.0, plan_of(**degrees))


def test_a_wrong_loss_names_what_cuts_the_forward() -> None:
    text = explain_loss(2.5, 2.0, plan_of(cp=2, tp=2, dp_shard=2))
    assert "the loss is 2.5 where one process has 2" in text
    assert "tp 2 (heads" in text
    assert "cp 2 (tokens" in text
    assert "pp" not in text.split("differs")[1]


def test_a_verdict_counts_all_that_was_measured() -> None:
    reference = made()
    right = compare(reference, reference)
    ok = {"norm": (1.0, 1.0), "loss": (2.0, 2.0), "clipped_error": 0.0, "tolerance": TOLERANCE}
    assert judge(right, **ok).ok  # type: ignore[arg-type]
    for wrong in ({"norm": (1.1, 1.0)}, {"loss": (2.1, 2.0)}, {"clipped_error": 1e-3}, {"norm": (math.nan, 1.0)}):
        assert not judge(right, **(ok | wrong)).ok  # type: ignore[arg-type]
    verdict = judge(compare(reference, scaled(reference, 2.0, only="k_proj")), **ok)  # type: ignore[arg-type]
    assert not verdict.ok
    assert verdict.first is not None
    assert (verdict.first.name, verdict.differing) == ("blocks.0.k_proj.weight", 2)
    assert verdict.first.factor == pytest.approx(2.0)


def test_a_gradient_that_is_not_a_number_is_wrong() -> None:
    reference = made()
    found = {n: g * math.nan if "embed" in n else g for n, g in reference.items()}
    assert compare(reference, found)[0].error == math.inf


def test_what_is_zero_but_for_rounding_is_measured_by_the_rest() -> None:
    """The bias of a key has no gradient in exact arithmetic."""
    reference = {**made(), "k.bias": torch.full((4,), 1e-18, dtype=torch.float64)}
    found = {**reference, "k.bias": torch.full((4,), -3e-18, dtype=torch.float64)}
    assert compare(reference, found)[-1].error < TOLERANCE


def test_names_of_blocks_are_put_together() -> None:
    names = [f"model.layers.{i}.{part}.weight" for i in range(9) for part in ("q", "k")]
    assert pattern_of(names) == "model.layers.*.q.weight, model.layers.*.k.weight"
    assert name_factor(2.0, plan_of()).endswith("no degree of the plan explains that (none above 1)")


def test_a_verdict_crosses_a_process_border_with_an_infinite_error() -> None:
    reference = made()
    found = {n: None if "embed" in n else g for n, g in reference.items()}
    verdict = judge(compare(reference, found), norm=(1, 1), loss=(1, 1), clipped_error=0.0, tolerance=TOLERANCE)
    assert verdict.error == math.inf
    assert GradientVerdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_one_parameter_that_is_multiplied_is_no_matter_of_tokens() -> None:
    parts = {(rank, 0): made(rank) for rank in range(2)}
    reference = {name: (parts[0, 0][name] + parts[1, 0][name]) / 8 for name in made()}
    found = scaled(reference, 2.0, only="embed")
    text = told(reference, found, plan_of(dp_shard=2), contributions=parts, tokens=dict.fromkeys(parts, 4))
    assert "the gradient of embed.weight (1 parameters) is 2 × too large: dp 2" in text
    assert "averaged" not in text and "tokens" not in text.replace("global tokens", "")
