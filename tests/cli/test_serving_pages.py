"""The pages of inference and of where to run: each ``$`` command prints what stands under it, figures included."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from shardwise.model.kv_cache import load_kv_cache
from tests.cli.configs import ROOT
from tests.cli.test_role_pages import check, sessions, snippet
from tests.commands import shardwise
from tests.unit.test_kv_cache import HYBRID


@pytest.mark.parametrize("page", ["serving.md", "where-to-run.md"])
def test_the_sessions_of_the_page(page: str, tmp_path: Path) -> None:
    if page == "where-to-run.md":
        for kind, name in (("text", "mine.csv"), ("toml", "mine.toml")):
            (tmp_path / name).write_text(snippet(page, kind))
    found = sessions(page)
    assert len(found) >= 3
    for words, expected in found:
        done = shardwise(*words[1:], cwd=tmp_path, exit_code=None)
        check(done.stdout + done.stderr, expected, exact=True)


def test_the_page_has_the_errors_that_were_found() -> None:
    page, errors = (ROOT / "docs" / "serving.md").read_text(), (ROOT / "benchmarks/inference/README.md").read_text()
    for name in ("all, without the row's source in the fit", "maximum load, not used in any fit"):
        found = re.search(rf"\*\*{re.escape(name)}\*\* \| (\d+) \| (\d+)% \| (\d+)% \| (\d+)%", errors)
        assert found is not None
        number, median, _, null = found.groups()
        words = " ".join(page.split())
        assert re.search(rf"{number} (published measurements|rows).*? is {median} %.*?{null} %", words), name


def test_the_document_says_what_the_table_says() -> None:
    done = shardwise(
        *("plan", "llama-3.1-8b", "--cluster", "2xH100-SXM", "--serve", "--context", "8k"),
        *("--concurrency", "64", "--quant", "fp8", "--json"),
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    best = answer["options"][answer["recommended"]]
    assert [option["tp"] for option in answer["options"]] == [1, 2]
    assert best["most_sequences"] >= 64 and best["fits"]
    assert sum(best["step_parts_s"].values()) == pytest.approx(best["step_s"])
    assert best["tokens_per_s_low"] < best["tokens_per_s"] < best["tokens_per_s_high"]
    assert answer["cache_bytes_of_a_sequence"] == 8192 * 128 * 1024
    assert f"tp={best['tp']}" in answer["answer"][0] and answer["answer"][0] in done.stderr


def test_a_hybrid_model_of_transformers_is_served(tmp_path: Path) -> None:
    family, values = HYBRID[0]
    transformers.AutoConfig.for_model(family, **values).save_pretrained(tmp_path)
    words = ("--cluster", "1xL4", "--serve", "--context", "64", "--concurrency", "2", "--json")
    done = shardwise("plan", str(tmp_path), *words)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["cache_origin"] == "transformers" and answer["options"][0]["fits"]
    assert answer["cache_bytes_of_a_sequence"] == load_kv_cache(str(tmp_path)).sequence_bytes(64)
    assert "3 of 4 layers keep a state of fixed size" in done.stderr
    assert "longer than the 64 positions" in shardwise("plan", str(tmp_path), *words[:4], "65", exit_code=2).stderr


@pytest.mark.turns(6)
def test_the_prices_that_ship_are_ranked() -> None:
    words = ("plan", "gpt2-xl", "--where", "--seq-len", "1024", "--deadline", "2d", "--budget", "100", "--json")
    done = shardwise(*words)
    answer = json.loads(done.stdout.splitlines()[-1])
    good = [offer for offer in answer["offers"] if not offer["why_not"]]
    assert answer["offers"][: len(good)] == good and len(good) > 10
    assert [offer["dollars"] for offer in good] == sorted(offer["dollars"] for offer in good)
    assert all(offer["hours"] <= 48 and offer["dollars"] <= 100 for offer in good)
    assert answer["answer"][0] in done.stderr and "read on 2026-11-24 to 2026-11-27" in answer["prices"]


def test_several_clusters_are_documents_of_their_own() -> None:
    words = ("plan", "gpt2", "--cluster", "2xA100-80GB", "--cluster", "1xT4", "--seq-len", "512", "--json")
    answer = json.loads(shardwise(*words).stdout.splitlines()[-1])
    assert [one["cluster"]["device_name"] for one in answer["clusters"]] == ["A100-SXM-80GB", "T4"]
    assert all(one["recommended"] is not None and one["workload"]["global_batch"] == 64 for one in answer["clusters"])
