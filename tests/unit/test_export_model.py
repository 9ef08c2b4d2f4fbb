"""What `train.export` writes beside the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.cli import export_model as module
from shardwise.train.config import Config

pytest.importorskip("tokenizers")


def folder_with_tokenizer(folder: Path, word: str) -> Path:
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True)
    Tokenizer(models.WordLevel({word: 0, "</s>": 1}, unk_token=word)).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(f"template of {word}")
    return folder


def test_the_trained_tokenizer_is_exported_and_another_kind_is_another_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, trained = (folder_with_tokenizer(tmp_path / name, name) for name in ("base", "tuned"))
    (trained / "chat_template.jinja").unlink()
    (trained / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "its own"}))
    written: list[str] = []

    def convert(source: str, target: str, *, to: str, model: str, as_json: bool) -> None:
        written.append(to)
        Path(target).mkdir()
        for file in own.iterdir():  # the model's folder has a tokenizer, which is copied
            (Path(target) / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(module, "run_convert", convert)
    monkeypatch.setattr(module, "newest", lambda folder: tmp_path / "step-00000001")
    for kind in ("peft", "hf", "hf"):
        config = Config.model_validate(
            {
                "model": {"config": str(own)},
                "data": {"path": "d", "tokenizer": str(trained), "seq_len": 8},
                "train": {"steps": 1, "output": str(tmp_path / "run"), "export": "hf"},
            }
        )
        config = config.model_copy(update={"train": config.train.model_copy(update={"export": kind})})
        (tmp_path / "run").mkdir(exist_ok=True)
        module.export_model(config, Console(quiet=True), as_json=False)
    assert written == ["peft", "hf"]
    target = tmp_path / "run" / "model"
    assert "tuned" in json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]
    assert not (target / "chat_template.jinja").exists()  # the base's
    assert json.loads((target / "tokenizer_config.json").read_text())["chat_template"] == "its own"
