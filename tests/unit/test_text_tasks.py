"""Rows of the tasks on text: ids and labels by hand, columns found, and what is refused with its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.errors import DataError, ModelError, UserError
from shardwise.train.config import Config
from shardwise.train.task_names import task_of_architecture
from shardwise.train.tasks.own_loss import loss_of
from shardwise.train.tasks.registry import order_of, prepare_data, samples_of
from tests.task_models import BERT, LLAMA, QUIET, WORDS, write_rows, write_task, write_tokenizer

CLS, SEP, MASK, RED = 1, 2, 3, 5


def tables(tmp_path: Path, kind: str, rows: list[dict[str, Any]] | None = None, **data: Any) -> dict[str, Any]:
    found = write_task(tmp_path, kind)
    if rows is not None:
        write_rows(tmp_path / "rows.jsonl", rows)
    found["data"] |= data
    return found


def of_words(tmp_path: Path) -> dict[str, Any]:
    return {"tokenizer": str(write_tokenizer(tmp_path / "words.json")), "seq_len": 6}


def batch(tmp_path: Path, found: dict[str, Any], ids: list[int]) -> tuple[Any, torch.Tensor]:
    config = Config.model_validate(found)
    data = prepare_data(config, tmp_path / "cache", QUIET)
    return samples_of(data, config).batch(np.array(ids))


class TestByHand:
    def test_a_text_and_its_class(self, tmp_path):
        rows = [{"text": "red green", "label": "b"}, {"text": "red red red red red red", "label": "a"}]
        inputs, labels = batch(tmp_path, tables(tmp_path, "bert sequences", rows, **of_words(tmp_path)), [0, 1, -1])
        assert inputs["input_ids"].tolist() == [[CLS, RED, RED + 1, SEP, 0, 0], [CLS, *[RED] * 4, SEP], [0] * 6]
        assert inputs["attention_mask"].tolist() == [[1] * 4 + [0] * 2, [1] * 6, [1] + [0] * 5]
        assert labels.tolist() == [1, 0, -100], "classes are in alphabetical order"

    def test_two_texts(self, tmp_path):
        rows = [{"sentence1": "red", "sentence2": "green", "label": 2}]
        inputs, labels = batch(tmp_path, tables(tmp_path, "bert sequences", rows, **of_words(tmp_path)), [0])
        assert inputs["input_ids"].tolist() == [[CLS, RED, SEP, RED + 1, SEP, 0]]
        assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 0]] and labels.tolist() == [2]

    def test_words_and_their_tags(self, tmp_path):
        rows = [{"tokens": ["red", "sun"], "ner_tags": [3, -100]}, {"tokens": ["ab", "c"], "ner_tags": [1, 2]}]
        inputs, labels = batch(tmp_path, tables(tmp_path, "bert tokens", rows[:1], **of_words(tmp_path)), [0])
        assert labels.tolist() == [[-100, 3, -100, -100, -100, -100]]
        inputs, labels = batch(tmp_path, tables(tmp_path, "bert tokens", rows, seq_len=8), [1])
        assert inputs["input_ids"].tolist() == [[*b"ab c ", 256, 0, 0]]
        assert labels.tolist() == [[1, -100, -100, 2, -100, -100, -100, -100]], "the first token of a word has its tag"

    def test_a_source_and_its_target(self, tmp_path):
        rows = [{"question": "ab", "answer": "xyz"}]
        inputs, labels = batch(tmp_path, tables(tmp_path, "t5", rows, seq_len=4, target_len=5), [0, -1])
        assert inputs["input_ids"].tolist() == [[*b"ab", 256, 0], [0] * 4]
        assert labels.tolist() == [[*b"xyz", 256, -100], [-100] * 5]
        assert inputs["decoder_input_ids"].tolist() == [[0, *b"xyz", 256], [0] * 5]

    def test_of_hidden_tokens_80_are_masks_10_random_and_10_as_they_were(self, tmp_path):
        rows = [{"text": " ".join(WORDS[(i + j) % 9] for j in range(60))} for i in range(60)]
        found = tables(tmp_path, "bert masked", rows, **{**of_words(tmp_path), "seq_len": 31})
        config = Config.model_validate(found)
        data = prepare_data(config, tmp_path / "cache", QUIET)
        samples = samples_of(data, config)
        inputs, labels = samples.batch(np.arange(len(samples)))
        hidden, ids = labels != -100, inputs["input_ids"]
        assert abs(float(hidden.float().mean()) - 0.15) < 0.02
        assert not (torch.isin(labels[hidden], torch.tensor([0, CLS, SEP, MASK]))).any(), "special tokens stay"
        shares = [float((ids[hidden] == MASK).float().mean()), float((ids[hidden] == labels[hidden]).float().mean())]
        assert abs(shares[0] - 0.8) < 0.05 and abs(shares[1] - 0.1) < 0.05
        assert int(inputs["attention_mask"].sum()) == 60 * 62, "joined: every token is in one sample"
        again = samples_of(data, config).batch(np.arange(len(samples)))
        assert torch.equal(again[0]["input_ids"], ids)
        order = order_of(data, samples, config)
        later = samples.batch(order.ids(len(samples), len(samples)))
        assert not torch.equal(later[1].sort(0).values, labels.sort(0).values), "another epoch hides others"


class TestTaskOfAModel:
    @pytest.mark.parametrize(
        ("keys", "task"),
        [
            ({"architectures": ["RobertaForSequenceClassification"]}, "sequence-classification"),
            ({"architectures": ["DebertaV2ForTokenClassification"]}, "token-classification"),
            ({"architectures": ["T5ForConditionalGeneration"]}, "seq2seq"),
            ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "causal-lm"),
            ({"architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 80}, "causal-lm"),
            ({"architectures": ["BertForMaskedLM"]}, "masked-lm"),
            ({"architectures": ["ResNetForImageClassification"]}, "image-classification"),
            ({"architectures": ["LlamaForCausalLM"]}, "causal-lm"),
            ({"architectures": None}, "causal-lm"),
            ({}, "causal-lm"),
        ],
    )
    def test_by_the_architecture(self, keys, task):
        assert task_of_architecture(keys) == task

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            ({**BERT, "num_labels": 1}, "num_labels is 1, a regression"),
            ({**BERT, "num_labels": 3, "problem_type": "multi_label_classification"}, "a text has one class here"),
            ({**LLAMA, "num_labels": 3, "pad_token_id": None}, "pad_token_id is not set"),
        ],
    )
    def test_models_that_a_task_cannot_train(self, tmp_path, model, message):
        found = tables(tmp_path, "bert sequences")
        found["model"]["task"] = "sequence-classification"
        Path(found["model"]["config"]).write_text(json.dumps({**model, "architectures": []}))
        with pytest.raises(ModelError, match=message):
            prepare_data(Config.model_validate(found), tmp_path / "cache", QUIET)

    def test_bytes_need_an_id_for_the_mask(self, tmp_path):
        found = tables(tmp_path, "bert masked")
        model = {**BERT, "architectures": ["BertForMaskedLM"], "vocab_size": 257}
        Path(found["model"]["config"]).write_text(json.dumps(model))
        with pytest.raises(ModelError, match="vocab_size is 257, and bytes with a mask are 258 ids"):
            prepare_data(Config.model_validate(found), tmp_path / "cache", QUIET)


class TestRefused:
    def problems(self, tmp_path: Path, kind: str, rows: list[dict[str, Any]], **data: Any) -> tuple[str, ...]:
        with pytest.raises(DataError) as told:
            prepare_data(Config.model_validate(tables(tmp_path, kind, rows, **data)), tmp_path / "cache", QUIET)
        return told.value.problems

    def test_rows_of_texts_all_at_once(self, tmp_path):
        good = {"text": "red", "label": 0}
        bad = [{"text": "x"}, {"text": "", "label": 1}, {"text": 3, "label": 1}, {"text": "x", "label": 3}]
        found = self.problems(tmp_path, "bert sequences", [good, *bad])
        said = ["has no label", "'text' is empty", "holds int, not text", "has the label 3, and classes are 0 to 2"]
        for line, problem, part in zip(range(2, 6), found, said, strict=False):
            assert f"file 'rows.jsonl', line {line} " in problem and part in problem
        assert len(found) == 5

    def test_names_and_numbers(self, tmp_path):
        assert (
            "where other rows have names"
            in self.problems(tmp_path, "bert sequences", [{"text": "x", "label": "a"}, {"text": "x", "label": 1}])[0]
        )

    def test_more_names_than_classes(self, tmp_path):
        rows = [{"text": "x", "label": name} for name in "abcd"]
        assert (
            "line 4 has the label 'd', a class more than the 3 of the head"
            in self.problems(tmp_path, "bert sequences", rows)[0]
        )

    def test_words_without_their_tags(self, tmp_path):
        rows = [
            {"tokens": ["a", "b"], "tags": [1, 2]},
            {"tokens": ["a", "b"], "tags": [1]},
            {"tokens": "a b", "tags": [1]},
            {"tokens": ["a", ""], "tags": [1, 9]},
            {"tokens": ["a"], "tags": [9]},
        ]
        found = self.problems(tmp_path, "bert tokens", rows)
        parts = ["has 2 words and 1 tags", "holds str in 'tokens'", "a word that is empty", "has the tag 9"]
        for problem, part in zip(found, parts, strict=False):
            assert part in problem

    def test_columns(self, tmp_path):
        found = self.problems(tmp_path, "bert sequences", [{"review": "x", "stars": 1}])
        assert "has no column for label, text; it has: review, stars; name them in data.columns" in found[0]
        found = self.problems(tmp_path, "t5", [{"a": "x", "b": "y"}], columns={"source": "c", "target": "b"})
        assert "data.columns.source 'c' is not a column of" in found[0]
        given = tables(tmp_path, "t5", [{"a": "x", "b": "y"}], columns={"source": "a", "target": "b"})
        assert batch(tmp_path, given, [0])[1][0, 0] == ord("y")

    def test_a_tokenizer_without_a_mask(self, tmp_path):
        path = write_tokenizer(tmp_path / "words.json")
        path.write_text(path.read_text().replace("[MASK]", "[NONE]"))
        found = self.problems(tmp_path, "bert masked", [{"text": "red"}], tokenizer=str(path))
        assert "has no mask token" in found[0]

    @pytest.mark.parametrize(
        ("table", "keys", "message"),
        [
            ("data", {"pack": "isolated"}, "'data.pack' does nothing for the task sequence-classification"),
            ("data", {"loss_on": "all"}, "'data.loss_on' does nothing"),
            ("data", {"columns": {"messages": "x"}}, "names messages, which the task sequence-classification does not"),
            ("train", {"export": "hf"}, "'train.export' is for causal-lm"),
            ("train", {"loss_chunks": 4}, "'train.loss_chunks' is for causal-lm"),
            ("parallel", {"strategy": "fsdp+cp2"}, "splits sequences of causal-lm"),
            ("parallel", {"strategy": "ddp+lora"}, "freezes all but the adapters, and the head"),
        ],
    )
    def test_keys_that_do_not_go_with_the_task(self, tmp_path, table, keys, message):
        found = tables(tmp_path, "bert sequences")
        found.setdefault(table, {}).update(keys)
        with pytest.raises(ValueError, match=message):
            Config.model_validate(found)


def halved(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of a sum of squares, as a loss of one's own."""
    return ((outputs - labels) ** 2).sum() / 2, torch.tensor(len(labels))


def miscounted(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    return outputs.sum(), 7


def not_a_pair(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def not_summed(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    return outputs, len(labels)


class TestOwnLoss:
    def loss(self, tmp_path: Path, name: str) -> Any:
        found = tables(tmp_path, "bert sequences")
        found["model"]["loss"] = f"tests.unit.test_text_tasks:{name}"
        return loss_of(Config.model_validate(found))

    def test_the_sum_is_what_counts(self, tmp_path):
        assert self.loss(tmp_path, "halved")(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])).item() == 2.5

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("miscounted", "returned the count 7 for labels of which 2 count"),
            ("not_a_pair", "returned Tensor; return the sum of the loss, a tensor, and its count"),
            ("not_summed", r"a sum of shape \(2,\); it must be 0-d"),
            ("nothing_here", "nothing_here"),
        ],
    )
    def test_mistakes(self, tmp_path, name, message):
        with pytest.raises(UserError, match=message):
            self.loss(tmp_path, name)(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0]))
