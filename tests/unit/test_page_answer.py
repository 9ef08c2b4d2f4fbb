"""What the planner page gets: the command line's document, its numbers as text, and nothing that a browser lacks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from shardwise.report.plan_json import PlanDocument
from shardwise.web.answer import answer, lists, reply, texts
from shardwise.web.build_site import pack_engine
from tests.commands import shardwise

QUESTION = {"model": "gpt2", "cluster": "2xA100-80GB", "seq_len": "1k", "global_batch": "8", "tokens": "1B"}
ALONE = """
import sys
for name in ("torch", "numpy", "typer", "rich", "transformers", "psutil", "pynvml"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
from shardwise.web import answer
assert answer.__file__.startswith(sys.argv[1])
print(answer.reply("ask", sys.argv[2]))
"""


def command_lines(*words: str) -> dict:
    return json.loads(shardwise("plan", *words, "--json", exit_code=None).stdout.splitlines()[-1])


def test_an_answer_is_the_command_lines():
    found = answer(QUESTION)
    words = ("gpt2", "--cluster", "2xA100-80GB", "--seq-len", "1k", "--global-batch", "8", "--tokens", "1B")
    assert found["document"] == command_lines(*words)
    PlanDocument.model_validate(found["document"])
    assert (
        found["command"] == "shardwise plan gpt2 --cluster 2xA100-80GB --seq-len 1024 --global-batch 8 --tokens 1e+09"
    )
    assert found["document"] == command_lines(*found["command"].split()[2:])
    printed = shardwise("plan", *words).stdout
    assert all(sentence in printed for sentence in found["sentences"])


def test_a_plan_file_is_the_command_lines(tmp_path):
    shardwise(
        "plan",
        "gpt2",
        "--cluster",
        "2xA100-80GB",
        "--seq-len",
        "1024",
        "--global-batch",
        "8",
        "-o",
        str(tmp_path / "plan.toml"),
    )
    found = answer({**QUESTION, "seq_len": "1024", "tokens": ""})
    assert found["plan"] == (tmp_path / "plan.toml").read_text()


def test_an_answer_about_serving_is_the_command_lines():
    question = {"model": "llama-3.1-70b", "cluster": "4xA100-80GB", "serve": "on", "context": "32k"}
    question |= {"concurrency": "12", "kv_cache": "fp8", "quant": "int8", "tp": "4"}
    found = answer(question)
    words = found["command"].split()[2:]
    assert found["document"] == command_lines(*words)
    assert words[:4] == ["llama-3.1-70b", "--cluster", "4xA100-80GB", "--serve"] and len(words) == 14
    told, best = found["texts"], found["document"]["options"][0]
    assert f"generates {told['options.0.tokens_per_s']} tokens/s" in found["document"]["answer"][1]
    assert f"{told['options.0.first_token_s']} to its first token" in found["document"]["answer"][1]
    assert best["most_sequences"] and told["options.0.weight_bytes"].endswith("GiB")


def test_rare_options_are_the_command_lines():
    changes = {"program": "torchtitan", "weights": "compute", "loss_chunks": "8", "optimizer_in_backward": "on"}
    found = answer(QUESTION | changes)
    words = ("--program", "torchtitan", "--weights", "compute", "--loss-chunks", "8", "--optimizer-in-backward")
    assert all(word in found["command"].split() for word in words)
    assert found["document"] == command_lines(*found["command"].split()[2:])


def test_the_engine_needs_no_torch(tmp_path):
    pack_engine(tmp_path / "engine.zip", [])
    shutil.unpack_archive(tmp_path / "engine.zip", tmp_path / "engine")  # as the page does
    command = [sys.executable, "-c", ALONE, str(tmp_path / "engine"), json.dumps(QUESTION)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["document"]["candidates"]
    command[-1] = json.dumps({"model": "gpt2", "cluster": "2xA100-80GB", "serve": "on"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["document"]["options"], done.stderr


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "os:getcwd"}, "shardwise plan os:getcwd"),
        ({"model": "/etc/passwd"}, "names of the catalogue"),
        ({"model": "a.toml"}, "names of the catalogue"),
        ({"cluster": "auto"}, "sees neither this machine"),
        ({"cluster": "2xcpu"}, "sees neither this machine"),
        ({"global_batch": "0"}, "--global-batch '0' must be an integer from 1 to 16,777,216"),
        ({"global_batch": "1e9"}, "--global-batch '1e9' must be"),
        ({"strange": "1"}, "'strange': the page has no such field"),
        ({"optimizer": "adamx"}, "--optimizer 'adamx' must be one of"),
        ({"model": ""}, "needs a model and a cluster"),
        ({"program": "torchtan"}, "--program 'torchtan' must be one of"),
        ({"serve": "on"}, "'global_batch': the page has no such field for serving"),
    ],
)
def test_a_wrong_question_has_problems(changes, says):
    assert says in "\n".join(answer(QUESTION | changes)["problems"])


def test_numbers_are_written_as_on_the_terminal():
    data = {
        "memory_bytes": {"device": 1.125 * 1024**3, "host": None},
        "step_time_s": 0.25,
        "mfu": 0.425,
        "cost": None,
        "hours": 30.0,
        "fits": True,
        "tp": 2000,
    }
    assert texts(data) == {
        "memory_bytes.device": "1.12 GiB", "memory_bytes.host": "unknown", "step_time_s": "250 ms", "mfu": "42%",
        "cost": "unknown", "hours": "30 hours (1.2 days)", "tp": "2,000",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 5000, "nested more than 64 deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 deep"),
        (json.dumps({"model_type": "[" * 5000, "hidden_size": '"{' * 100}), "model_type '[[["),
        ('"' + "\\" * 99, "cannot be read as JSON"),
    ],
)
def test_a_deep_configuration_is_refused_before_it_is_parsed(tmp_path, monkeypatch, text, says):
    monkeypatch.chdir(tmp_path)
    reply("config", text)
    if "nested" in says:
        monkeypatch.setattr("shardwise.model.configuration.read_json", None)
    assert says in answer(QUESTION | {"model": "config.json"})["problems"][0]


def test_a_fault_is_a_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(reply("config", "{}")) == {"problems": []}
    assert "the engine failed" in json.loads(reply("ask", "[1]"))["problems"][0]
    found = lists()
    assert {"llama-3.1-8b", "gpt2"} <= {one["name"] for one in found["models"]} and "adamw" in found["optimizers"]
