"""``shardwise bench scaling`` as a user runs it: on this machine, under torchrun, and what it refuses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.bench.scaling.scaling_sizes import FILE, stored
from shardwise.cli.bench import run_bench_scaling
from shardwise.errors import UserError
from tests.cli.configs import ROOT, environment, write_config
from tests.commands import shardwise

SMALL: dict[str, Any] = {
    "train": {"global_batch": None, "micro_batch": 2, "grad_accum": 2},
    "parallel": {"strategy": "ddp", "threads": 1},
    "checkpoint": {"every": None},
}


def bench(config: Path, output: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Run the verb; its document, and what it said."""
    done = shardwise("bench", "scaling", str(config), *words, "--json", "--output", str(output))
    assert len(done.stdout.splitlines()) == 1, "with --json everything else is on stderr"
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder, the document and what was said of a small run on one and on two ranks."""
    folder = tmp_path_factory.mktemp("scaling")
    config = write_config(folder, **SMALL)
    words = ["--size", "1", "--size", "2", "--steps", "4", "--beyond", "16", "--price", "1.5"]
    return folder / "out", *bench(config, folder / "out", *words)


def test_both_modes_at_both_sizes(found: tuple[Path, dict[str, Any], str]) -> None:
    folder, document, said = found
    assert document == json.loads((folder / FILE).read_text())
    assert [(one["mode"], one["devices"]) for one in document["samples"]] == [
        ("weak", 1), ("weak", 2), ("strong", 1), ("strong", 2),
    ]  # fmt: skip
    for one in document["samples"]:
        assert len(one["steps_s"]) == 4 and min(one["steps_s"]) > 0 and one["threads"] == 1
        assert one["timing"]["steps"] == 4
    batches = {(one["mode"], one["devices"]): one["plan"] for one in document["samples"]}
    assert batches["weak", 1]["grad_accum"] == 2 and batches["strong", 1]["grad_accum"] == 4
    assert batches["weak", 2] == batches["strong", 2], "at the config's own size both ask for the same"
    weak, strong = ([one for one in document["samples"] if one["mode"] == m][1] for m in ("weak", "strong"))
    assert weak["steps_s"] == strong["steps_s"], "and it is measured once"
    assert document["left_out"] == []
    assert (folder / "scaling.png").stat().st_size > 5_000
    for words in (
        "weak scaling",
        "strong scaling",
        "2 devices: ",
        "by formula",
        "plot: ",
        "1 CPU thread at every size",
    ):
        assert words in said


def test_rows_and_curves_follow_from_the_samples(found: tuple[Path, dict[str, Any], str]) -> None:
    _, document, _ = found
    for mode in ("weak", "strong"):
        first, second = (row for row in document["rows"] if row["mode"] == mode)
        assert first["efficiency"] == 1.0
        assert second["tokens_per_s"] == pytest.approx(2 * first["tokens_per_s"] * second["efficiency"])
        assert sum(one["seconds"] for one in second["losses"]) == pytest.approx(second["lost_s"])
        assert second["dollars_per_hour"] == 3.0
        curve = next(curve for curve in document["curves"] if curve["mode"] == mode)
        assert [point["devices"] for point in curve["points"]] == [1, 2, 4, 8, 16]
        assert curve["anchor"] == 2 and all(point["step_s"] for point in curve["points"][:3])
    assert document["curves"][1]["points"][-1]["reason"].startswith("a global batch of 8 has no sample")


@pytest.mark.turns(6)
def test_worlds_of_torchrun_come_together_in_the_file(found: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    """A world of two adds its size to what was measured here; another question is refused before anything runs."""
    document = found[1]
    file = tmp_path / "out" / FILE
    file.parent.mkdir()
    kept = [one for one in document["samples"] if one["devices"] == 1]
    file.write_text(json.dumps({**document, "samples": kept}))
    config = write_config(tmp_path, **SMALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), "-m", "shardwise"]
    words = ["bench", "scaling", str(config), "--steps", "4", "--mode", "weak", "--json", "--output", str(file.parent)]
    done = subprocess.run(
        [sys.executable, *argv, *words], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [(one["mode"], one["devices"]) for one in told["samples"]] == [("weak", 1), ("weak", 2), ("strong", 1)]
    assert [one["steps_s"] for one in told["samples"] if one["devices"] == 1] == [one["steps_s"] for one in kept]
    assert told["rows"][1]["efficiency"] > 0
    assert stored(file) is not None
    with pytest.raises(UserError, match=r"another question: this one has strategy fsdp \(not ddp\)"):
        run(config, file.parent, overrides=["parallel.strategy=fsdp"])


def run(config: Path, output: Path, *, overrides: list[str] | None = None, **changes: Any) -> None:
    """The verb in this process."""
    options: dict[str, Any] = {
        "sizes": [1], "mode": "both", "steps": 4, "beyond": 4, "calibration": None, "price": None, "as_json": False,
    }  # fmt: skip
    run_bench_scaling(config, overrides or [], output=output, **{**options, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "other"}, "--mode 'other' is none of weak, strong and both"),
        ({"price": float("nan")}, "--price nan is no amount"),
        ({"price": -1.0}, "--price -1.0 is below 0"),
        ({"sizes": [3], "mode": "strong"}, r"--size 3: 3 devices are 3 data-parallel ranks, and the global batch 8"),
        ({"sizes": [3], "overrides": ["parallel.strategy=ddp+tp2"]}, r"--size 3: ddp\+tp2"),
        ({"calibration": Path("nowhere.toml")}, "nowhere.toml"),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    model = {"model": {"config": "examples/llama-2m", "factory": None}}
    config = write_config(tmp_path, **{**SMALL, **model})
    with pytest.raises(UserError, match=says):
        run(config, tmp_path / "out", **changes)
    assert not (tmp_path / "out" / FILE).exists()
