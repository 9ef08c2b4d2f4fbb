"""The page on fine-tuning, run as it stands: init, preview, train and the exported model, on a smaller base."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from shardwise.train.config import read_config
from tests.cli import configs
from tests.cli.test_readme import fits, masked
from tests.commands import shardwise

PAGE = (configs.ROOT / "docs" / "fine-tuning.md").read_text()
SESSIONS = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE)
SNIPPET = re.findall(r"```python\n((?:.*\n)*?)```", PAGE)[0]
SHORT = ["train.epochs=none", "train.steps=12", "train.eval_every=6", "data.seq_len=384", "checkpoint.every=0"]
NUMBER = re.compile(r"\d+(\.\d+)?(e-\d+)?( [kM])?")


def plain(text: str, names: dict[str, str]) -> list[str]:
    """Lines without numbers, and with the page's names for folders."""
    for name, shown in names.items():
        text = text.replace(name, shown)
    return [NUMBER.sub("#", line) for line in masked(text)]


@pytest.mark.turns(6)
def test_the_page_from_a_config_to_an_answer(
    small_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(configs.ROOT)
    config, output, adapted = (str(tmp_path / name) for name in ("chats.toml", "tuned", "adapted"))
    runs = {"runs/stdlib-tuned": output, "runs/stdlib-lora": adapted}
    names = {folder: name for name, folder in runs.items()}
    names |= {config: "chats.toml", str(small_base): "runs/stdlib", f"{configs.ROOT}/": ""}
    assert [shlex.split(command)[1] for command, _ in SESSIONS] == ["init", "data", "train", "train"]
    for command, expected in SESSIONS:
        words = shlex.split(command)
        words = [{"runs/stdlib": str(small_base), "chats.toml": config}.get(word, word) for word in words]
        given = [word.removeprefix("train.output=") for word in words if word.startswith("train.output=")]
        if words[1] != "init":  # what init writes goes to a folder below this one
            words += [f"train.output={runs[given[0]] if given else output}"]
        if words[1] == "train":
            words += SHORT
        done = shardwise(*words[1:])
        wrong = fits(plain(done.stdout + done.stderr, names), plain(expected, {}))
        assert not wrong, f"{command}: {wrong}\n{done.stdout}{done.stderr}"
    for folder in (output, adapted):  # trained in full, and merged
        assert (Path(folder) / "model" / "model.safetensors").is_file()
        capsys.readouterr()
        exec(SNIPPET.replace("runs/stdlib-tuned", folder), {})  # what the page shows
        assert capsys.readouterr().out.strip()
    again = shardwise("train", config, *SHORT, f"train.output={output}")
    assert "finished: all 12 steps" in again.stdout + again.stderr


def test_what_init_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(configs.ROOT)
    chats = ["--data", "examples/chats.jsonl", "-o", str(tmp_path / "c.toml")]
    for words, said in (
        (["init", "nobody/nothing-here", *chats], "download it with: hf download nobody/nothing-here"),
        (["init", "examples/llama-2m", *chats], "has no *.safetensors"),
        (["init", "no such folder", *chats], "does not exist; give a folder, or a name such as"),
    ):
        done = shardwise(*words, exit_code=2)
        assert said in done.stderr, done.stderr
    wrong = ["--column", "chat", "--column", "nonsense=a", "--column", "messages="]
    done = shardwise("init", "examples/llama-2m", *chats, *wrong, exit_code=2)
    assert "3 problems" in done.stderr and "--column 'nonsense=a' is not PART=NAME; parts are messages" in done.stderr
    (tmp_path / "c.toml").touch()
    assert "exists; give another name" in shardwise("init", "examples/llama-2m", *chats, exit_code=2).stderr


def test_init_takes_columns_and_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    (Path("base") / "config.json").write_bytes((configs.ROOT / "examples/llama-2m/config.json").read_bytes())
    (Path("base") / "model.safetensors").touch()
    rows = [{"ask": f"What is {i}?", "reply": str(i), "talk": [{"role": "user", "content": str(i)}]} for i in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["init", "base", "--data", "rows.jsonl", "--tokenizer", "bytes"]
    done = shardwise(*words, exit_code=2, cwd=tmp_path)
    assert "(for init: --column messages=chat)" in done.stderr
    done = shardwise(*words, "--column", "prompt=ask", "--column", "completion=reply", "-o", "pairs.toml", cwd=tmp_path)
    assert "prompts with completions in columns prompt = 'ask', completion = 'reply'" in done.stdout
    assert "chat template" not in done.stdout, "a prompt and its completion need none"
    data = read_config(Path("pairs.toml")).data
    assert data.columns == {"prompt": "ask", "completion": "reply"} and data.tokenizer == "bytes"
    for name, text in (("none", ""), ("bad", '{"messages": [{"role": "user", "content": 1}]}')):
        Path(f"{name}.jsonl").write_text(text)
        done = shardwise("init", "base", "--data", f"{name}.jsonl", "--tokenizer", "bytes", exit_code=2, cwd=tmp_path)
        assert f"--data '{name}.jsonl' has no row to train on" in done.stderr, done.stderr
    assert "line 1" in done.stderr, "and why"
    done = shardwise(*words, "--column", "messages=talk", "-o", "talk.toml", cwd=tmp_path)
    assert "the tokenizer 'bytes' has none, so data.chat_template is \"chatml\"" in done.stdout
    assert read_config(Path("talk.toml")).data.chat_template == "chatml"


def test_preview_as_a_page_and_for_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(configs.ROOT)
    config = tmp_path / "c.toml"
    config.write_text(
        '[model]\nconfig = "examples/llama-2m"\n[data]\npath = "examples/chats.jsonl"\nchat_template = "chatml"\n'
        f'seq_len = 100\n[train]\nsteps = 1\nglobal_batch = 2\noutput = "{tmp_path / "run"}"\n'
    )
    page = tmp_path / "page.html"
    done = shardwise("data", "preview", str(config), "--html", str(page), "--rows", "3", "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["packing"] == "isolated" and found["truncation"]["truncated"] > 0
    assert found["roles"]["assistant"][1] > 0
    assert len(found["documents_shown"]) == 3
    assert all(not part["trained"] for parts in found["documents_shown"] for part in parts if part["cut"])
    text = page.read_text()
    trained = [part["text"] for parts in found["documents_shown"] for part in parts if part["trained"]]
    assert text.count("<mark") == len(trained) > 0 and "<script" not in text and "http://" not in text
    done = shardwise("data", "preview", str(config), "--from", "999", exit_code=2)
    assert "--from 999: there are 385 training documents" in done.stderr
