"""``shardwise bench comm`` as a user runs it, and ``plan`` with the file that it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.bench.plots import draw_links
from shardwise.cli.bench_comm import read_size, run_bench_comm
from shardwise.cost.link_calibration import CalibrationFile, read_calibration
from shardwise.errors import UserError
from shardwise.measure.comm_facts import COLLECTIVES
from tests.cli.configs import ROOT, environment
from tests.commands import shardwise

WORDS = ["bench", "comm", "--max-size", "64KiB", "--seconds", "0.2"]


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    """The command as a script of torchrun's, on four ranks."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone", "-m", "shardwise"]
    done = subprocess.run([*start, *words], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder, the document and what was said of a small run."""
    folder = tmp_path_factory.mktemp("comm") / "out"
    done = shardwise(*WORDS, "--nproc", "2", "--json", "--output", str(folder))
    assert len(done.stdout.splitlines()) == 1, "with --json everything else is on stderr"
    return folder, json.loads(done.stdout), done.stderr


def test_it_leaves_samples_calibration_and_plot(found: tuple[Path, dict[str, Any], str]) -> None:
    folder, document, said = found
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".png", ".toml"]
    assert document["schema"] == 1 and document["kind"] == "links" and document["ranks"] == 2
    assert json.loads(Path(document["samples_file"]).read_text()) == document
    assert [item["collective"] for item in document["measured"]] == list(COLLECTIVES)
    for item in document["measured"]:
        rates = zip(item["sizes_bytes"], item["median_s"], item["algorithm_bytes_per_s"], strict=True)
        assert all(rate == pytest.approx(size / seconds) for size, seconds, rate in rates)
    assert document["links"][0]["text"].startswith("host memory (all_reduce on dp): expected unknown, got ")
    for words in ("2 ranks, gloo, CPU", "raw samples: ", "calibration: ", "plot: ", "measuring all_reduce on dp"):
        assert words in said


def test_the_calibration_has_what_was_measured_and_on_what(found: tuple[Path, dict[str, Any], str]) -> None:
    _, document, _ = found
    file = read_calibration(Path(document["calibration_file"]))
    assert (file.device, file.backend, file.nodes, file.ranks) == ("cpu", "gloo", 1, 2)
    assert file.versions["torch"] and file.cores_per_node and file.processor
    for link, item in zip(file.measured, document["measured"], strict=True):
        assert (link.collective, list(link.sizes_bytes)) == (item["collective"], item["sizes_bytes"])
        assert list(link.median_s) == pytest.approx(item["median_s"])


def as_gpus(folder: Path, file: Path) -> Path:
    """The same file as if two A100s had been measured, and its sizes had shown all."""
    gpus = {"device": "cuda", "device_name": "NVIDIA A100-SXM4-80GB", "backend": "nccl", "link": "nvlink"}
    return changed(folder / "gpus.toml", file, gpus | {"compute": None})


def changed(path: Path, file: Path, change: dict[str, Any]) -> Path:
    """The same file with other facts, as if its sizes had shown latency and bandwidth of each link, and kernels a rate.

    How far apart two predictions are depends on the rates, and a small measurement beside other work has any.
    """
    data = read_calibration(file).model_dump(mode="json", by_alias=True) | change
    for link in data["measured"]:
        link |= {"latency_s": 1e-3, "bus_bytes_per_s": 1e9}
    if compute := data["compute"]:
        compute |= {"launch_s": 2e-5, "comm_busy": 0.5}
        compute["products"] = [[m, k, n, 1e-5 + 2 * m * k * n / 5e10] for m, k, n, _ in compute["products"]]
        for curves in (compute["forward"], compute["backward"]):
            for kernel, rows in curves.items():
                curves[kernel] = [[size, 1e-5 + size / 5e9] for size, _ in rows]
    path.write_text(CalibrationFile.model_validate(data).to_toml())
    return path


def test_plan_and_explain_read_it(found: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    links, plan = as_gpus(tmp_path, Path(found[1]["calibration_file"])), tmp_path / "plan.toml"
    words = ["llama-3.2-1b", "--cluster", "8xA100-80GB", "--strategy", "ddp", "--global-batch", "8"]
    plain = json.loads(shardwise("plan", *words, "--json").stdout)
    done = shardwise("plan", *words, "--json", "--calibration", str(links), "-o", str(plan))
    over = json.loads(done.stdout)
    assert over["candidates"][0]["step_time_s"] > 2 * plain["candidates"][0]["step_time_s"], "gloo is no NVLink"
    assert "links measured" in done.stderr
    kept = shardwise("explain", str(plan)).stdout
    assert "links measured" in kept, "the question is kept with the links that it was asked with"
    assert shardwise("explain", str(plan), "--calibration", str(links)).stdout.endswith(kept)


def test_plan_predicts_seconds_of_the_ranks_that_were_measured(
    found: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    file = Path(found[1]["calibration_file"])
    words = ["plan", "examples/stdlib.toml", "--json", "--calibration"]
    timed = shardwise(*words, str(changed(tmp_path / "cpus.toml", file, {})))
    steps = [one["step_time_s"] for one in json.loads(timed.stdout)["candidates"]]
    assert all(steps) and len({round(step, 9) for step in steps}) > 4, "each plan has its own"
    assert "times are over links measured" in timed.stderr
    for change, words_said in (
        ({"devices_per_node": 4}, "measured with 4 ranks a node, and the plan has 2; measure this one with: "),
        ({"compute": None}, "made by an earlier version, which did not measure how fast a CPU computes"),
    ):
        untimed = shardwise(*words, str(changed(tmp_path / "other.toml", file, change)))
        assert not any(one["step_time_s"] for one in json.loads(untimed.stdout)["candidates"])
        assert words_said in untimed.stderr.replace("\n", " ")
    fsdp = next(one for one in json.loads(timed.stdout)["candidates"] if one["strategy"] == "fsdp")
    kept = tmp_path / "plan.toml"
    shardwise(*words, str(tmp_path / "cpus.toml"), "--strategy", "fsdp", "-o", str(kept))
    run = ("examples/stdlib.toml", "--dry-run", "--json", f"train.output={tmp_path / 'run'}")
    for chosen in (["parallel.strategy=fsdp"], ["--plan", str(kept)]):
        foreseen = shardwise("train", *run, *chosen, "--calibration", str(tmp_path / "cpus.toml"))
        step_s = json.loads(foreseen.stdout.splitlines()[-1])["step_time"]["step_s"]
        assert step_s == pytest.approx(fsdp["step_time_s"], rel=1e-9), "what a run is compared with is what plan says"
    config = tmp_path / "more-threads.toml"
    config.write_text((ROOT / "examples" / "stdlib.toml").read_text().replace("[parallel]", "[parallel]\nthreads = 7"))
    untimed = shardwise("plan", str(config), *words[2:], str(changed(tmp_path / "cpus.toml", file, {})))
    assert not any(one["step_time_s"] for one in json.loads(untimed.stdout)["candidates"])
    assert "a rank, and parallel.threads is 7" in untimed.stderr.replace("\n", " ")
    for not_measured in (["--precision", "bf16"], ["--compile"]):
        other = shardwise(*words, str(changed(tmp_path / "cpus.toml", file, {})), *not_measured)
        assert not any(one["step_time_s"] for one in json.loads(other.stdout)["candidates"]), not_measured


def test_what_was_measured_elsewhere_is_refused(found: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    here = found[1]["calibration_file"]
    done = shardwise("plan", "llama-3.2-1b", "--cluster", "8xA100-80GB", "--calibration", here, exit_code=2)
    assert "was measured on CPUs, and the plan is for GPUs; measure this one with" in done.stderr
    links = as_gpus(tmp_path, Path(here))
    other = shardwise(
        "plan", "llama-3.2-1b", "--cluster", "8xH100x", "--loss", "none", "--calibration", str(links), exit_code=2
    )
    assert "problems" in other.stderr, "with all else that is wrong"
    train = shardwise("train", "examples/stdlib.toml", f"train.output={tmp_path / 'run'}", "--calibration", str(links),
                      exit_code=2)  # fmt: skip
    assert "was measured on GPUs, and the plan is for CPUs" in train.stderr


@pytest.mark.turns(6)
def test_ranks_of_torchrun_measure_themselves(tmp_path: Path) -> None:
    done = launched(*WORDS, "--strategy", "fsdp+tp2", "--json", "--output", str(tmp_path))
    document = json.loads(done.stdout.splitlines()[-1])
    assert {item["axis"] for item in document["measured"]} == {"dp_shard", "tp"}
    assert document["ranks"] == 4 and document["measured"][0]["groups"] == [[0, 2], [1, 3]]


def words(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "strategy": "ddp",
        "nproc": 2,
        "device": "cpu",
        "smallest": "1KiB",
        "largest": "64KiB",
        "seconds": 1.0,
        "output": tmp_path,
        "as_json": False,
    }
    return usual | changes


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"strategy": "ddp+tp3"}, ["tp 3 = 3 does not divide the world size 2"]),
        ({"device": "tpu", "largest": "none"}, ["--device 'tpu' must be one of", "--max-size 'none' is no size"]),
        ({"smallest": "1MiB"}, ["--min-size 1MiB is above --max-size 64KiB"]),
        ({"seconds": float("inf")}, ["--seconds inf has no end"]),
        ({"smallest": "4"}, ["--min-size '4' is no size of 8 bytes or more"]),
        ({"cluster": "8xH100"}, ["is 1 × 8 × H100-SXM-80GB, and what runs is 1 × 2 × CPU"]),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(
    changes: dict[str, Any], problems: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        run_bench_comm(**words(tmp_path, **changes))
    assert len(refused.value.problems) == len(problems)
    for problem in problems:
        assert problem in str(refused.value)


def test_a_folder_that_cannot_be_written_is_said_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output .* cannot be written to"):
        run_bench_comm(**words(tmp_path, output=tmp_path / "file"))


def test_sizes_in_words() -> None:
    told = {"1KiB": 1024, "64MiB": 64 * 1024**2, "1e6": 10**6, "512 kB": 512_000, "1.5GiB": 3 * 2**29, "8": 8}
    assert {text: read_size("--max-size", text) for text in told} == told
    for text in ("", "MiB", "1TiB", "-4KiB", "1e", "1..5MiB", "1e400"):
        with pytest.raises(UserError, match="is no size"):
            read_size("--max-size", text)


def test_the_plot_shows_each_axis_and_what_was_expected(
    found: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    document = json.loads(json.dumps(found[1]))
    document["links"][0]["expected_bytes_per_s"] = 25e9
    again = [item | {"axis": "tp"} for item in document["measured"]]
    file = tmp_path / "plot.png"
    assert draw_links(document, file)
    one = file.stat().st_size
    assert draw_links(document | {"measured": document["measured"] + again}, file) and file.stat().st_size > one
