"""A tiny model and a little data for each task, as `shardwise train` reads both from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"model_type": "bert", **SIZE, **STILL, "vocab_size": 258, "max_position_embeddings": 32, "pad_token_id": 0}
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 258,
    "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "is_encoder_decoder": True,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZE, "vocab_size": 258, "max_position_embeddings": 32, "pad_token_id": 0}
VIT = {"model_type": "vit", **SIZE, **STILL, "image_size": 8, "patch_size": 4, "num_channels": 1}
MODELS: dict[str, dict[str, Any]] = {
    "bert sequences": {**BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 3},
    "llama sequences": {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": 3},
    "bert tokens": {**BERT, "architectures": ["BertForTokenClassification"], "num_labels": 4},
    "bert masked": {**BERT, "architectures": ["BertForMaskedLM"], "tie_word_embeddings": True},
    "t5": {**T5, "architectures": ["T5ForConditionalGeneration"]},
    "vit": {**VIT, "architectures": ["ViTForImageClassification"], "num_labels": 4},
}
"""Configurations by a name for tests."""
WORDS = ["red", "green", "blue", "one", "two", "three", "sun", "moon", "star"]


def sentences(number: int, seed: int = 5) -> list[list[str]]:
    """Lists of one to five words."""
    draw = np.random.default_rng(seed)
    return [[WORDS[i] for i in draw.integers(0, len(WORDS), draw.integers(1, 6))] for _ in range(number)]


def rows_of(kind: str, number: int) -> list[dict[str, Any]]:
    """Rows of JSON lines for a model of `MODELS`."""
    texts = sentences(number)
    if kind == "bert tokens":
        return [{"tokens": words, "tags": [WORDS.index(word) % 4 for word in words]} for words in texts]
    if kind == "t5":
        return [{"source": " ".join(words), "target": " ".join(reversed(words))[:12]} for words in texts]
    if kind == "bert masked":
        return [{"text": " ".join(words)} for words in texts]
    return [{"text": " ".join(words), "label": len(words) % 3} for words in texts]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_task(folder: Path, kind: str, *, number: int = 24, **changes: Any) -> dict[str, dict[str, Any]]:
    """Write the model and the data of a task to ``folder``, and return the tables of a config."""
    config = folder / "config.json"
    config.write_text(json.dumps({**MODELS[kind], **changes}))
    if kind == "vit":
        draw = np.random.default_rng(3)
        images = draw.integers(0, 256, (number, 8, 8)).astype(np.uint8)
        np.savez(folder / "images.npz", images=images, labels=draw.integers(0, 4, number))
        data: dict[str, Any] = {"path": str(folder / "images.npz")}
    else:
        data = {"path": str(write_rows(folder / "rows.jsonl", rows_of(kind, number))), "seq_len": 24}
    return {
        "model": {"config": str(config)},
        "data": {**data, "heldout_fraction": 0.0},
        "train": {"steps": 2, "global_batch": 4, "output": str(folder / "run")},
    }


QUIET: Callable[[str], None] = lambda text: None  # noqa: E731  # a log that nobody reads


def write_tokenizer(path: Path) -> Path:
    """Write a tokenizer of `WORDS` with the special tokens of BERT."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    vocab = {word: number for number, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.add_special_tokens(special)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.save(str(path))
    return path


def flat_mlp(classes: int = 4) -> nn.Module:
    """A factory's own classifier of 8 × 8 images: two layers, and no name for its input."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes)
    )


def smoothed(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A factory's own loss: cross-entropy with smoothed labels, as sum and count."""
    loss = nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="sum", ignore_index=-100)
    return loss, int((labels != -100).sum())
