"""``shardwise plan`` and ``shardwise explain`` as a user runs them; no GPU, no ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.plan.plan import read_plan
from tests.cli.configs import ROOT, environment, write_config
from tests.commands import shardwise

LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
KEPT = ["parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries", "context"]
MEMORY = [*KEPT, "allocated", "reserved", "device", "offloaded", "offloaded_activations", "host"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    return str(file)


def command(capsys: pytest.CaptureFixture[str], *words: str, exit_code: int = 0) -> tuple[str, str]:
    """The command in this process; returns stdout and stderr."""
    code = 0
    with mock.patch.object(sys, "argv", ["shardwise", *words]):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    out, err = capsys.readouterr()
    assert code == exit_code, f"exit code {code}\n{out}\n{err}"
    return out, err


def answer(capsys: pytest.CaptureFixture[str], *words: str, exit_code: int = 0) -> dict[str, Any]:
    out, _ = command(capsys, "plan", *words, "--json", exit_code=exit_code)
    document: dict[str, Any] = json.loads(out.splitlines()[-1])
    return document


def test_a_large_model_in_a_process_of_its_own(llama: str) -> None:
    """No torch for a known configuration: the answer comes in about a second."""
    code = "import sys\nfrom shardwise.cli.main import main\ntry:\n    main()\nfinally:\n    print(*sys.modules)"
    words = ["plan", llama, "--cluster", "4x8xH100-SXM", "--seq-len", "4096", "--global-batch", "32", "--tokens", "1B"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    text, _, modules = done.stdout.rstrip().rpartition("\n")
    assert not {"torch", "transformers", "numpy", "shardwise.report.plan_json"} & set(modules.split())
    assert "plans considered" in text and "▶" in text
    assert "global batch 32 = micro batch" in text and "32 × 4096 = 131,072 tokens a step" in text
    assert "The full run takes" in text and " hours for $" in text
    assert all(len(line) <= 100 for line in text.splitlines() if "█" in line)


def test_the_json_document(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    document = answer(capsys, llama, "--cluster", "4x8xH100-SXM", "--seq-len", "4096", "--global-batch", "32")
    assert document["schema"] == 1 and document["model"]["parameters"] == 70_553_706_496
    best = document["candidates"][document["recommended"]]
    assert best["fits"] and best["reason"] == "" and document["recommendation"]
    assert best["micro_batch"] * best["grad_accum"] * best["dims"]["dp_shard"] * best["dims"]["dp_replicate"] == 32
    for entry in document["candidates"]:
        assert list(entry["memory_bytes"]) == MEMORY
        assert entry["fits"] == (entry["memory_bytes"]["device"] <= document["cluster"]["usable_bytes"])
        assert entry["fits"] or entry["reason"].startswith("needs ")
        assert sum(entry["time_parts_s"].values()) == pytest.approx(entry["step_time_s"], rel=0.02)
        assert entry["hours"] is None and entry["cost"] is None
    times = [entry["step_time_s"] for entry in document["candidates"] if entry["fits"]]
    assert best["step_time_s"] <= times[1] * 1.02 and times[1:] == sorted(times[1:])
    names = {entry["strategy"] for entry in document["candidates"]}
    assert {"ddp", "zero1", "zero2", "fsdp", "hsdp"} <= names


def test_the_schema_describes_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = command(capsys, "plan", "--schema")
    schema = json.loads(out)
    document = answer(capsys, "tests.models:byte_decoder", "--cluster", "2xA100-80GB", "--seq-len", "32")
    assert set(document) == set(schema["properties"])
    entry = schema["$defs"]["CandidateEntry"]["properties"]
    assert all(set(candidate) == set(entry) for candidate in document["candidates"])
    told = (ROOT / "docs" / "plan-json.md").read_text()
    missing = [key for key in [*schema["properties"], *entry, *MEMORY] if f'"{key}"' not in told]
    assert not missing


def test_any_module_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from torch import nn\n\n\ndef make():\n"
        "    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]\n"
        "    return nn.Sequential(nn.Embedding(100, 64), *blocks, nn.Linear(64, 100))\n"
    )
    words = ["--cluster", "8xA100-80GB", "--seq-len", "128", "--global-batch", "64"]
    out, _ = command(capsys, "plan", f"{file}:make", *words)
    assert "▶  ddp" in out and "Use ddp" in out


def test_what_is_pinned_is_costed_fitting_or_not(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    words = [llama, "--cluster", "8xA100-80GB", "--seq-len", "4096", "--global-batch", "64"]
    pins = ["--strategy", "fsdp", "--micro-batch", "2", "--recompute", "full", "--precision", "fp32"]
    document = answer(capsys, *words, *pins, exit_code=1)
    assert document["recommended"] is None and len(document["candidates"]) == 1
    (only,) = document["candidates"]
    facts = {key: only[key] for key in ("strategy", "micro_batch", "grad_accum", "recompute", "precision", "fits")}
    assert facts == {
        "strategy": "fsdp",
        "micro_batch": 2,
        "grad_accum": 4,
        "recompute": "full",
        "precision": "fp32",
        "fits": False,
    }
    assert any("would do: " in line for line in document["advice"])


def test_adapters_chunks_and_the_optimizer_are_pinned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["llama-3.1-8b", "--cluster", "2xRTX4090", "--seq-len", "1024", "--global-batch", "2"]
    pins = ["--strategy", "fsdp+qlora", "--lora-rank", "8", "--lora-targets", "q_proj, v_proj", "--loss-chunks", "4"]
    file = tmp_path / "plan.toml"
    document = answer(capsys, *words, *pins, "--optimizer-in-backward", "--optimizer", "adamw8bit", "-o", str(file))
    best = document["candidates"][document["recommended"]]
    assert (best["loss_chunks"], best["optimizer_in_backward"], best["grad_accum"]) == (4, True, 1)
    assert (best["adapter"]["rank"], best["adapter"]["targets"]) == (8, ["q_proj", "v_proj"])
    assert document["workload"]["optimizer"] == "adamw8bit" and document["cluster"]["nvme_bytes_per_s"] is None
    plan = read_plan(file)
    assert plan.adapter is not None and (plan.adapter.rank, plan.loss_chunks) == (8, 4)
    out, _ = command(capsys, "explain", str(file))
    assert "with adapters of rank 8 beside q_proj, v_proj; the loss in 4 chunks; the optimizer in the backward" in out
    pinned = [*words, "--strategy", "ddp", "--lora-rank", "4", "--loss-chunks", "4"]
    out, _ = command(capsys, "plan", *pinned, exit_code=1)
    assert "--lora-rank 4 counts only where adapters are proposed; pin --strategy fsdp+lora" in out
    assert "with: the loss in 4 chunks" in out
    again = "shardwise plan llama-3.1-8b --cluster 2xRTX4090 --seq-len 1024 --global-batch 2"
    assert f"{again} --strategy ddp+qlora --lora-rank 4 --loss-chunks 4" in out


def test_adapters_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-8b", "--cluster", "8xZ100", "--strategy", "fsdp+lora", "--lora-targets", "q_prj"]
    _, err = command(capsys, *words, exit_code=2)
    assert "LoRA target 'q_prj' is not a linear layer" in err and "Z100" in err


def test_a_plan_file_explains_itself(capsys: pytest.CaptureFixture[str], llama: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    words = ["--cluster", "4x8xH100-SXM", "--seq-len", "4096", "--global-batch", "32"]
    out, _ = command(capsys, "plan", llama, *words, "--strategy", "fsdp", "-o", str(file))
    assert f"plan: {file}" in out
    plan = read_plan(file)
    assert plan.strategy == "fsdp" and plan.global_batch == 32
    out, _ = command(capsys, "explain", str(file), "--why-not", "ddp")
    formula = "70.6 B × bytes at rest / dp_shard 32"
    for word in ("asked for by name", formula, "not ddp: needs ", "calibration: ", "sent in"):
        assert word in out, out
    again, _ = command(capsys, "explain", str(file), "--why-not", "fsdp+tp3", "--json")
    document = json.loads(again.splitlines()[-1])
    assert document["why_not"] == [
        "fsdp+tp3 cannot be: tp 3 does not divide 64 heads; use one of 2, 4, 8, 16, 32, 64",
        "fsdp+tp3 cannot be: tp 3 shards samples along their length, which is 4096; use 4095 or 4098, or turn "
        "sequence_parallel off",
        "fsdp+tp3 cannot be: tp 3 does not divide the 32 devices; use degrees whose product divides 32",
    ]


def test_own_prices(capsys: pytest.CaptureFixture[str], llama: str, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("H100-SXM = 3\n[buy]\nH100-SXM = 30000\n")
    words = [llama, "--cluster", "4x8xH100-SXM", "--seq-len", "4096", "--global-batch", "32", "--tokens", "1e9"]
    out, _ = command(capsys, "plan", *words, "--price", str(prices), "--json")
    document = json.loads(out.splitlines()[-1])
    best = document["candidates"][0]
    assert document["cluster"]["price_per_device_hour"] == 3
    assert best["cost"] == pytest.approx(best["hours"] * 32 * 3)
    assert best["dollars_per_million_tokens"] == pytest.approx(best["cost"] / 1000, rel=1e-6)


def test_this_machine_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("shardwise.hardware.cluster._nvml_devices", list):
        out, _ = command(capsys, "plan", "tests.models:byte_decoder", "--seq-len", "32")
    assert "CPU" in out and "▶  ddp" in out and "its speed is unknown, so simplicity decided" in out
    assert "--global-batch was not given: " in out


def test_the_choice_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = write_config(tmp_path, model={"kwargs": {"dropout": 0.0}}, checkpoint={"every": 0})
    words = [
        "bench",
        "choice",
        str(config),
        "--nproc",
        "1",
        "--steps",
        "4",
        "--output",
        str(tmp_path / "out"),
        "--json",
    ]
    out, _ = command(capsys, *words)
    document = json.loads(out.splitlines()[-1])
    (case,) = document["cases"]
    assert case["chosen"] == "ddp" and set(case["seconds"]) == {"ddp", "zero1", "zero2", "fsdp", "hsdp"}
    assert all(len(times) == 4 and min(times) > 0 for times in case["seconds"].values())
    assert case["ratio"] == case["median_s"]["ddp"] / min(case["median_s"].values()) >= 1
    (raw,) = (tmp_path / "out").iterdir()
    assert json.loads(raw.read_text())["cases"] == document["cases"]


def test_only_the_document_is_on_stdout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Code of the user's that prints, when imported, when building and in its forward."""
    file = tmp_path / "noisy.py"
    file.write_text(
        "from torch import nn\nprint('imported')\n\n\nclass Noisy(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        print('built')\n"
        "        self.a, self.b = nn.Embedding(9, 8), nn.Linear(8, 9)\n"
        "\n    def forward(self, ids):\n        print('forward')\n        return self.b(self.a(ids))\n"
        "\n\ndef leave():\n    raise SystemExit(7)\n"
    )
    words = ["--cluster", "2xA100-80GB", "--seq-len", "16", "--json"]
    out, err = command(capsys, "plan", f"{file}:Noisy", *words)
    assert len(out.splitlines()) == 1 and json.loads(out)["schema"] == 1
    assert {"imported", "built", "forward"} <= set(err.split())
    _, err = command(capsys, "plan", f"{file}:leave", *words, exit_code=2)
    assert "its code ended the program (exit 7)" in err


def test_what_was_filled_in_or_has_no_effect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = answer(
        capsys, "resnet-50", "--cluster", "4xT4", "--seq-len", "77", "--tokens", "1B", "--precision", "fp8"
    )
    assert document["notes"] == [
        "--seq-len 77 has no effect: resnet-50 does not read tokens",
        "--tokens 1B has no effect: resnet-50 does not read tokens",
        "--precision fp8: T4 has no units for it, so speed is unknown; it has fp32, fp16",
        "--global-batch was not given: 4, 1 for each device",
    ]
    best = document["candidates"][0]
    assert best["precision"] == "fp8" and best["step_time_s"] is None and best["hours"] is None
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA_70B, "num_hidden_layers": 2, "max_position_embeddings": 2048}))
    document = answer(capsys, str(file), "--cluster", "2x4xA100-80GB", "--global-batch", "8")
    assert document["workload"]["seq_len"] == 2048, "no longer than what the model was made for"
    assert answer(capsys, "gpt2", "--cluster", "4xT4")["candidates"][0]["precision"] == "fp16"
    document = answer(capsys, "gpt2", "--cluster", "2x4xRTX4090@pcie4", "--global-batch", "8")
    assert any(line.startswith("the speed of the network is unknown") for line in document["notes"])
    assert {entry["step_time_s"] for entry in document["candidates"]} == {None}


def test_a_fused_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["llama-3.1-8b", "--cluster", "8xA100-80GB", "--seq-len", "4096", "--global-batch", "8"]
    words += ["--strategy", "fsdp"]
    plain, fused = (answer(capsys, *words, "--loss", loss) for loss in ("plain", "fused"))
    assert (plain["workload"]["fused_loss"], fused["workload"]["fused_loss"]) == (False, True)
    logits = [document["candidates"][0]["memory_bytes"]["logits"] for document in (plain, fused)]
    assert logits[1] < logits[0] / 2
    file = tmp_path / "plan.toml"
    command(capsys, "plan", *words, "--loss", "fused", "-o", str(file))
    told = [json.loads(command(capsys, "explain", str(file), *more, "--json")[0]) for more in ([], ["--loss", "plain"])]
    assert told[0]["chosen"]["memory"]["logits"] == logits[1]
    assert told[1]["chosen"]["memory"]["logits"] > 2 * logits[1]
    _, err = command(capsys, "explain", str(file), "--loss", "fuse", "--why-not", "fspd", exit_code=2)
    assert "2 problems" in err and "--loss 'fuse' must be one of plain, fused" in err and "--why-not: strategy" in err


def test_where_the_plan_file_goes(capsys: pytest.CaptureFixture[str], llama: str, tmp_path: Path) -> None:
    words = ["plan", llama, "--cluster", "1xT4", "--seq-len", "4096", "--global-batch", "1"]
    _, err = command(capsys, *words, "--recompute", "no", "-o", str(tmp_path / "none" / "plan.toml"), exit_code=2)
    assert "2 problems" in err and f"there is no folder '{tmp_path / 'none'}'" in err, "before the search"
    _, err = command(capsys, *words, "-o", str(tmp_path), exit_code=2)
    assert "it is a folder" in err
    file = tmp_path / "plan.toml"
    out, _ = command(capsys, *words, "-o", str(file), exit_code=1)
    assert not file.exists() and "not written, because nothing fits" in out
    command(capsys, *words, "--strategy", "ddp", "-o", str(file), exit_code=1)
    assert read_plan(file).strategy == "ddp"


def test_a_plan_that_is_no_answer_to_its_question(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    words = ["llama-3.1-8b", "--cluster", "2x8xH100-SXM", "--seq-len", "4096", "--global-batch", "64"]
    command(capsys, "plan", *words, "--strategy", "fsdp", "-o", str(file))
    full = file.read_text()
    for old, new, says in (
        ("dp_shard = 16", "dp_shard = 8", "have 8 ranks, and the question's cluster 16"),
        ("global_batch = 64", "global_batch = 65", "and the question's global batch is 65"),
        ("global_batch = 64", "", "table [question]: global_batch: is missing"),
        ("nodes = 2", "nodes = 0", "the question's cluster 0"),
    ):
        assert old in full
        file.write_text(full.replace(old, new, 1))
        _, err = command(capsys, "explain", str(file), exit_code=2)
        assert says in err and "make the file again with" in err
    file.write_text(full)
    out, _ = command(capsys, "explain", str(file), "--why-not", "FULL_SHARD", "--json")
    document = json.loads(out)
    assert document["why_not"] == ["fsdp is the plan"] and document["other"]["reason"] == ""


def test_a_narrow_terminal(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    from rich.console import Console

    narrow = Console(width=80, highlight=False)
    with mock.patch("shardwise.cli.plan.answer_console", lambda as_json: narrow):
        out, _ = command(capsys, "plan", llama, "--cluster", "8xA100-80GB", "--seq-len", "4096", "--global-batch", "64")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    header = next(line.split() for line in lines if "strategy" in line)
    assert header == ["strategy", "batch", "recompute", "memory", "step", "MFU"], "no name is cut"


def test_what_cannot_be_measured_is_said_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ["bench", "choice", str(tmp_path / "no.toml"), "--output", str(tmp_path / "file" / "out")]
    with mock.patch("benchmarks.choice.run._case", side_effect=AssertionError("measured")):
        _, err = command(capsys, *words, exit_code=2)
        assert "2 problems" in err and "does not exist" in err and "is a file; give a folder" in err
        command(capsys, *words, "--nproc", "0", exit_code=2)


class TestProof:
    def test_another_model_than_the_catalogues_is_not_proved(self) -> None:
        """OPT's configuration has other keys, so its shape builds OPT's default size."""
        from shardwise.cli.prove import source_of

        with pytest.raises(UserError, match=r"'opt-1.3b' from its shape alone: 812,318,720 parameters instead of"):
            source_of("opt-1.3b")
        with pytest.raises(UserError, match="cannot build 'falcon-7b' from its shape alone"):
            source_of("falcon-7b")
        assert source_of("llama-3.2-1b").config is not None

    @pytest.mark.parametrize("option", [("--compile",), ("--loss", "fused")])
    def test_what_the_program_does_not_have_is_not_proved(self, option: tuple[str, ...]) -> None:
        words = [
            "plan",
            "gpt2",
            "--cluster",
            "8xA100-80GB",
            "--seq-len",
            "512",
            "--global-batch",
            "8",
            "--strategy",
            "fsdp",
            "--prove",
        ]
        done = shardwise(*words, *option, exit_code=2)
        assert f"has no {' '.join(option)}; leave one of them out" in done.stderr


def test_another_program(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["llama-3.1-8b", "--cluster", "8xA100-80GB", "--seq-len", "4096", "--global-batch", "64", "--strategy"]
    (tmp_path / "mine.toml").write_text('base = "torchtune"\nloss = "fused"\n')
    found = answer(capsys, *asked, "fsdp", "--program", "mine.toml", "-o", "plan.toml")
    first = found["candidates"][0]
    assert (found["workload"]["program"], first["weights"], first["reduce"]) == ("mine", "compute", "compute")
    assert not first["runnable"] and "--program mine" in first["why_not_runnable"]
    assert first["memory_bytes"]["parameters"] == first["memory_bytes"]["gradients"]
    (tmp_path / "mine.toml").unlink()  # the question in the plan file has the traits
    assert "trained × 2 B / dp_shard 8" in command(capsys, "explain", "plan.toml")[0]
    compiled, fused = (
        answer(
            capsys,
            "llama-3.2-1b",
            *asked[1:],
            "zero1",
            "--micro-batch",
            "1",
            "--recompute",
            "none",
            "--program",
            name,
            *words,
            "-o",
            "fused.toml",
        )
        for name, words in (("megatron", ["--compile"]), ("megatron-bridge", []))
    )
    saved = [one["candidates"][0]["memory_bytes"]["activations"] for one in (compiled, fused)]
    assert saved[0] == saved[1], "kernels that are fused by hand save what compiled ones do"
    assert f"{fused['candidates'][0]['step_time_s'] * 1e3:.3g}"[:2] in command(capsys, "explain", "fused.toml")[0]
    whole, packed, longer = (
        answer(capsys, *asked, "fsdp", *words) for words in ([], ["--document-len", "256"], ["--document-len", "4096"])
    )
    steps = [one["candidates"][0]["step_time_s"] for one in (whole, packed, longer)]
    assert steps[1] < steps[0] == steps[2] and any("--document-len 4096 has no effect" in n for n in longer["notes"])
    refused = (
        (["fsdp+pp2", "--program", "torchtune"], ["torchtune has no pipeline parallelism (+pp2); it has +tp and +cp"]),
        (["fsdp+tp2", "--program", "deepspeed"], ["deepspeed has no tensor parallelism (+tp2)"]),
        (["deepspeed-zero3", "--program", "trl"], ["take --program deepspeed"]),
        (["fsdp", "--program", "torchtitn", "--virtual-stages", "2"], ["did you mean 'torchtitan'", "without +pp"]),
        (["fsdp", "--weights", "bf16", "--reduce", "fp8"], ["--weights 'bf16' must be", "--reduce 'fp8' must be"]),
        (["fsdp", "--weights", "compute", "--precision", "fp32"], ["take bf16"]),
        (["fsdp", "--rounding", "kahan"], ["is of weights = 'compute'"]),
        (["fsdp", "--program", "torchtitan", "--prove"], ["leave the options behind --program torchtitan out"]),
    )
    for words, parts in refused:
        text = " ".join(command(capsys, "plan", *asked, *words, exit_code=2)[1].split())
        assert all(part in text for part in parts), (words, text)
