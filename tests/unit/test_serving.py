"""Ways to serve: bytes of weights, degrees that can be, the choice, and times that follow the roofline."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from shardwise.cost.memory.serving_memory import served_weights
from shardwise.errors import PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.kv_cache import load_kv_cache
from shardwise.model.load_model import load_profile
from shardwise.search.serving_options import ServingRequest, find_fitting, find_serving
from tests.scripts import script


def request(model: str = "llama-3.1-8b", cluster: str = "1xA100-80GB", context: int = 4096, **more) -> ServingRequest:
    found = {"concurrency": 1} | more
    return ServingRequest(
        load_profile(model, seq_len=context), load_kv_cache(model), parse_cluster(cluster), context, **found
    )


def test_weights_are_two_bytes_a_parameter() -> None:
    for model in ("llama-3.1-8b", "gpt2", "deepseek-v2-lite"):
        profile = load_profile(model, seq_len=128)
        assert served_weights(profile, None, 1).held_bytes == 2 * profile.num_parameters


def test_quantized_files_are_as_large_as_published() -> None:
    llama = load_profile("llama-2-7b", seq_len=128)
    assert served_weights(llama, "int4", 1).held_bytes == pytest.approx(3.89e9, rel=0.01)  # TheBloke/Llama-2-7B-AWQ
    assert served_weights(llama, "int8", 1).held_bytes == pytest.approx(6.74e9 + 2 * 131e6, rel=0.002)


def test_ranks_hold_their_part_and_key_value_heads_are_repeated() -> None:
    dense = load_profile("llama-3.1-8b", seq_len=128)
    whole = served_weights(dense, None, 1).held_bytes
    assert served_weights(dense, None, 8).held_bytes == pytest.approx(whole / 8, rel=1e-3)
    grouped = load_profile("qwen3-30b-a3b", seq_len=128)  # four key-value heads of 128
    extra = served_weights(grouped, None, 8).held_bytes * 8 - served_weights(grouped, None, 4).held_bytes * 4
    repeated = 2 * 48 * (2 * 4 * 128 * 2048)  # bytes of keys' and values' projections once more
    norms = extra - repeated
    assert 0 <= norms < 0.002 * served_weights(grouped, None, 1).held_bytes * 8


def test_a_batch_reads_the_experts_that_it_takes() -> None:
    weights = served_weights(load_profile("qwen3-30b-a3b", seq_len=128), None, 1)  # 8 of 128
    assert weights.read_bytes(1) == pytest.approx(weights.always_read_bytes + weights.expert_bytes / 16)
    assert weights.read_bytes(512) == pytest.approx(weights.always_read_bytes + weights.expert_bytes)


def test_more_sequences_read_the_weights_together() -> None:
    one, many = (find_serving(request(concurrency=n)).options[0] for n in (1, 16))
    assert one.decode is not None and many.decode is not None
    assert many.decode.weights_s == one.decode.weights_s
    assert many.decode.cache_s == pytest.approx(16 * one.decode.cache_s)
    assert many.tokens_per_s > 8 * one.tokens_per_s


def test_the_most_that_fit_do_and_one_more_does_not() -> None:
    most = find_serving(request()).options[0].most
    assert most is not None
    assert find_serving(request(concurrency=most)).recommended == 0
    assert find_serving(request(concurrency=most + 1)).recommended is None
    far = find_serving(request(concurrency=2**20))
    assert far.options[0].most == most and f"--concurrency {most} with tp=1" in far.advice


def test_what_is_advised_fits() -> None:
    asked = request("llama-3.1-70b", "2xA100-80GB", 32768, concurrency=16)
    advice = find_serving(asked).advice
    assert "--context 2048 with tp=2" in advice and "--quant int4 --kv-cache fp8 with tp=2" in advice
    assert find_fitting(replace(asked, context=2048)) is not None
    assert find_fitting(replace(asked, context=2048 + 256)) is None
    assert find_fitting(replace(asked, quant="int4", kv_type="fp8")) is not None
    assert find_fitting(replace(asked, quant="int4")) is None


def test_too_large_for_any_of_it() -> None:
    found = find_serving(request("deepseek-v3", "1xA100-80GB"))
    assert found.recommended is None
    assert "the weights alone are 1.22 TiB" in found.advice[0]


@pytest.mark.parametrize(
    ("model", "cluster", "tp", "why"),
    [
        ("qwen2.5-7b", "8xA100-80GB", 8, "does not divide the 28 attention heads"),
        ("llama-3.1-8b", "4xA100-80GB", 8, "a node of 4"),
        ("phi-4", "5xA100-80GB", 5, None),  # 40 heads, 10 of keys and values
        ("llama-2-13b", "8xA100-80GB", 8, None),
        ("phi-3-medium", "8xA100-80GB", 4, "10 key-value heads"),
    ],
)
def test_degrees_that_cannot_be(model: str, cluster: str, tp: int, why: str | None) -> None:
    asked = request(model, cluster, 2048, tp=tp)
    if why is None:
        assert find_serving(asked).options[0].tp == tp
        return
    with pytest.raises(PlanError, match=why):
        find_serving(asked)


def test_an_unknown_speed_is_unknown() -> None:
    option = find_serving(request("gpt2", "1xP100", 512)).options[0]
    assert option.fits and option.tokens_per_s is None and option.bottleneck is None


def test_what_limits_is_named() -> None:
    short = find_serving(request()).options[0].bottleneck
    long = find_serving(request(context=131072, concurrency=3)).options[0].bottleneck
    assert short is not None and short[0] == "reading the weights"
    assert long is not None and long[0] == "reading the KV cache"


@pytest.fixture(scope="module")
def inference() -> ModuleType:
    return script("inference_run", "inference/run.py")


def test_the_page_of_errors_is_that_of_the_model(inference: ModuleType) -> None:
    """After a change of the cost model: python benchmarks/inference/run.py --write"""
    assert inference.page() == inference.PAGE.read_text()


def test_the_constants_are_those_of_the_fit(inference: ModuleType) -> None:
    rows = [row for row in inference.read_rows() if row["kind"] in inference.TIMED]
    shipped = tuple(getattr(inference.serving_time, name) for name in inference.CONSTANTS)
    try:
        assert inference.fit(rows) == shipped
    finally:
        inference.with_constants(shipped)


def test_the_range_covers_the_published_rows(inference: ModuleType) -> None:
    rows = [row for row in inference.read_rows() if row["kind"] in (*inference.TIMED, "saturated")]
    low, high = inference.serving_time.SPREAD
    inside = [low <= inference.slower(row, inference.predicted(row)) <= high for row in rows]
    assert sum(inside) / len(inside) >= 0.8
