"""The pages on export and import: their sessions are run, the script on the page is the one that is written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from shardwise.plan.plan import read_plan
from tests.cli import configs
from tests.cli.test_readme import fits, masked
from tests.commands import shardwise

PAGES = {name: (configs.ROOT / "docs" / f"{name}.md").read_text() for name in ("export", "import")}
SESSIONS = [
    (name, *found)
    for name, page in PAGES.items()
    for found in re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", page)
]
SCRIPT = re.findall(r"```python\n((?:.*\n)*?)```", PAGES["export"])[0]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
    for n in range(40)
]


@pytest.mark.parametrize(("page", "command", "expected"), SESSIONS, ids=lambda text: str(text)[:60])
def test_the_sessions(page: str, command: str, expected: str, tmp_path: Path) -> None:
    folder = f"runs/{page}"
    code = 2 if "problems" in expected else 1 if "lost:" in expected else 0
    done = shardwise(*shlex.split(command.replace(folder, str(tmp_path)))[1:], exit_code=code)
    found = (done.stdout + done.stderr).replace(str(tmp_path), folder)
    wrong = fits(masked(found), masked(expected))
    assert not wrong, f"{command}: {wrong}\n{found}"
    if "--to pytorch" in command:
        written = (tmp_path / "train.py").read_text().replace(str(tmp_path), folder)
        assert re.sub(r"TOKENS = \d+", "TOKENS", written) == re.sub(r"TOKENS = \d+", "TOKENS", SCRIPT)


def write_model(folder: Path) -> Path:
    """A tiny model with its tokenizer, as transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from shardwise.train.data.tokenizer import save_tokenizer

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng():
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=257, **sizes)).save_pretrained(folder)
    save_tokenizer("bytes", None, folder)
    return folder


@pytest.mark.parametrize("tool", ["axolotl", "llama-factory"])
def test_a_fine_tuning_file_is_trained_from(tool: str, tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model"))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    known = {"chats": {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(known))
    common = {
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": 1,
    }
    lora = {"lora_alpha": 8, "lora_dropout": 0.0}
    if tool == "axolotl":
        rows = [{"path": str(tmp_path / "chats.jsonl"), "type": "chat_template"}]
        keys = {"base_model": model, "datasets": rows, "chat_template": "chatml", "sequence_len": 64}
        keys |= {"adapter": "lora", "lora_r": 4, "lora_target_linear": True, "micro_batch_size": 2, "val_set_size": 0.1}
    else:
        keys = {"model_name_or_path": model, "stage": "sft", "dataset": "chats", "dataset_dir": str(tmp_path)}
        keys |= {"finetuning_type": "lora", "lora_rank": 4, "cutoff_len": 64, "per_device_train_batch_size": 2}
        keys |= {"disable_gradient_checkpointing": True, "val_size": 0.1}
    file, plan, config = tmp_path / "file.yaml", tmp_path / "plan.toml", tmp_path / "config.toml"
    file.write_text(json.dumps({**common, **lora, **keys}))  # JSON is YAML
    shardwise("import", str(file), "--tool", tool, "--nproc", "1", "-o", str(plan), "--config", str(config))
    assert read_plan(plan).strategy == "ddp+lora"
    more = [] if tool == "axolotl" else ["data.chat_template=chatml"]
    done = shardwise("train", str(config), "--plan", str(plan), *more)
    assert "done: 2 steps" in done.stdout
