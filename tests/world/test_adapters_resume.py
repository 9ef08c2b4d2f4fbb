"""Adapter runs that are stopped and go on: the same bits, on other ranks the same curve, and never on another base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.format import newest, read_manifest
from shardwise.errors import UserError
from shardwise.plan.lora_options import AdapterOptions
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.metrics import read_metrics
from tests.contract import ragged
from tests.families import family
from tests.models import ByteAttention
from tests.world.test_resume import train
from tests.worlds import WorldError, run_world

MODEL = ("model.factory=tests.models:ByteAttention", "model.kwargs.width=64", "train.global_batch=4")
RANK = 4


def run(folder: Path, strategy: str, world: int, *words: str, stop_after: int | None = None) -> str:
    options = (*MODEL, f"lora.rank={RANK}", *words)
    return train(folder, strategy, world, *options, stop_after=stop_after)[0]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


def saved(folder: Path) -> dict[str, Any]:
    path = newest(folder / "run" / "checkpoints")
    assert path is not None
    tensors: dict[str, Any] = json.loads((Path(str(path)) / "manifest.json").read_text())["tensors"]
    return tensors


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("strategy", "world", "words"),
    [
        ("ddp+lora", 2, ()),
        ("fsdp+qlora", 2, ("parallel.precision=bf16", "checkpoint.async_save=true")),
        ("zero1+lora", 2, ("lora.dora=true",)),
    ],
)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, strategy: str, world: int, words: tuple[str, ...]) -> None:
    """Dropout in the model and in the adapters draws the numbers of the run that was never stopped."""
    words = (*words, "lora.dropout=0.1", "train.steps=6")
    run(tmp_path / "whole", strategy, world, *words)
    assert "stopped after step 3" in run(tmp_path / "parts", strategy, world, *words, stop_after=3)
    assert "resuming after step 3" in run(tmp_path / "parts", strategy, world, *words)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    full, parts = (
        {name: [s["hash"] for s in entry["shards"]] for name, entry in saved(tmp_path / each).items()}
        for each in ("whole", "parts")
    )
    assert full == parts


@pytest.mark.turns(3)
def test_a_run_goes_on_under_any_plan_and_saves_adapters_only(tmp_path: Path) -> None:
    words = ("model.kwargs.dropout=0.0", "train.steps=6")
    run(tmp_path / "whole", "ddp+lora", 1, *words)
    run(tmp_path / "parts", "ddp+lora", 1, *words, stop_after=2)
    said = run(tmp_path / "parts", "fsdp+lora", 2, *words, stop_after=4)
    assert "ddp+lora on 1 rank → fsdp+lora on 2 ranks" in said
    assert "fsdp+lora on 2 ranks → zero2+lora on 4 ranks" in run(tmp_path / "parts", "zero2+lora", 4, *words)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=2e-6)
    tensors = saved(tmp_path / "parts")
    state = [name for name in tensors if not name.startswith("rng/")]
    assert not [name for name in state if ".lora_A.weight" not in name and ".lora_B.weight" not in name]
    model = ByteAttention(width=64)
    expected = sum(RANK * sum(m.weight.shape) for m in model.blocks.modules() if isinstance(m, torch.nn.Linear))
    held = sum(torch.Size(entry["shape"]).numel() for name, entry in tensors.items() if name.startswith("model/"))
    assert held == expected
    number = sum(name.startswith("model/") for name in tensors)
    elements = sum(torch.Size(tensors[name]["shape"]).numel() for name in state)
    assert elements == 3 * expected + number  # and two moments, and the step of each


@pytest.mark.turns(3)
def test_another_base_or_another_adapter_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    for seed in (1, 2):
        torch.manual_seed(seed)
        (tmp_path / str(seed)).mkdir()
        save_model(ByteAttention(width=64), str(tmp_path / str(seed) / "model.safetensors"))
    base = f"model.weights={tmp_path / '1'}"
    run(tmp_path, "fsdp+qlora", 1, base, "train.steps=1")
    cases = {
        ("fsdp+qlora", f"model.weights={tmp_path / '2'}"): f"its base was '{tmp_path / '1'}' with the digest",
        ("fsdp+qlora", "model.weights=none"): "is made under the seed",
        ("ddp+lora", base): "kind was qlora, is lora",
        ("fsdp+qlora", base, "lora.alpha=8"): "alpha was 32.0, is 8.0",
    }
    for (strategy, *words), text in cases.items():
        with pytest.raises(WorldError) as refused:
            run(tmp_path, strategy, 1, "train.steps=2", *words)
        assert "does not go with this run's adapters" in str(refused.value)
        assert text in str(refused.value)
    with pytest.raises(WorldError, match="it holds adapters only, and this run trains no adapters"):
        train(tmp_path, "fsdp", 1, *MODEL, base, "train.steps=2")
    run(tmp_path, "ddp+qlora", 1, base, "train.steps=2")


def custom_loop(folder: str, strategy: str, options: AdapterOptions | None, seed: int) -> Any:
    session = start(strategy, lora=options, receipts=False)
    model = family("wide-llama", seed=seed, dtype=torch.float32)
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    try:
        session.load(folder)
        found = []
        for step in session.steps(ragged(4 * session.ranks.world_size), limit=4 - session.steps_done):
            step.run(model, token_loss_sum)
            found.append(step.update(optimizer).loss)
            if step.number == 2 and session.ranks.world_size == 1:
                break
        session.save(folder)
    except UserError as error:
        return str(error)
    finally:
        session.close()
    return found


def in_turn(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [custom_loop(*case) for case in cases]


def test_a_loop_of_ones_own_knows_its_adapters_and_their_base(tmp_path: Path) -> None:
    options, folder = AdapterOptions(rank=4), str(tmp_path / "own")
    assert len(run_world(in_turn, 1, [(folder, "ddp+qlora", options, 0)])[0][0]) == 2
    manifest = read_manifest(newest(tmp_path / "own"))  # type: ignore[arg-type]
    assert manifest.model is not None
    assert manifest.model["adapter"]["options"]["rank"] == 4
    cases = [
        (folder, "fsdp+qlora", options, 1),
        (folder, "fsdp+qlora", AdapterOptions(rank=8), 0),
        (folder, "fsdp", None, 0),
        (folder, "fsdp+qlora", options, 0),
    ]
    for other_base, other_rank, none, same in run_world(in_turn, 2, cases):
        assert "its base was weights with the digest" in other_base
        assert "rank was 4, is 8" in other_rank
        assert "it holds adapters only, and this run trains no adapters" in none
        assert len(same) == 2
