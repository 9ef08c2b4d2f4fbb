"""Several sources in one stream: shares, epochs, and the same samples however ranks split them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.errors import ConfigError
from shardwise.run.checks import check_samples
from shardwise.train.config import Config, read_config
from shardwise.train.config_data import DataTable
from shardwise.train.data.corpus import prepare_corpus
from shardwise.train.data.data_receipt import data_receipt
from shardwise.train.data.order import BLOCK, MixtureOrder, block_counts, rank_ids
from shardwise.train.data.samples import JoinedSources, order_for, samples_for

SIZES, WEIGHTS = [700, 90, 4000], [0.7, 0.2, 0.1]


def sources_of(ids: np.ndarray) -> Counter[int]:
    return Counter((np.searchsorted(np.cumsum(SIZES), ids, "right")).tolist())


class TestOrder:
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_shares_are_the_weights(self, shuffle: bool) -> None:
        order = MixtureOrder(SIZES, WEIGHTS, 3, shuffle)
        found = sources_of(order.ids(0, 3 * BLOCK))
        assert [found[i] / (3 * BLOCK) for i in range(3)] == WEIGHTS
        part = sources_of(order.ids(1234, 2000))
        for i, weight in enumerate(WEIGHTS):  # of independent draws, three standard errors
            assert abs(part[i] - 2000 * weight) < 3 * (2000 * weight * (1 - weight)) ** 0.5 + 1

    def test_every_source_has_epochs_of_its_own(self) -> None:
        order = MixtureOrder(SIZES, WEIGHTS, 3, True)
        ids = order.ids(0, 2 * BLOCK)
        mine = ids[(ids >= 700) & (ids < 790)] - 700
        for epoch in range(len(mine) // 90):
            assert sorted(mine[epoch * 90 : (epoch + 1) * 90]) == list(range(90))
        assert not np.array_equal(mine[:90], mine[90:180])

    def test_the_stream_is_a_function_of_the_index(self) -> None:
        order = MixtureOrder(SIZES, WEIGHTS, 3, True)
        ids = order.ids(0, BLOCK + 600)
        other = MixtureOrder(SIZES, WEIGHTS, 3, True)
        assert np.array_equal(other.ids(BLOCK - 100, 300), ids[BLOCK - 100 : BLOCK + 200])
        for dp, micro, accum in ((1, 24, 1), (2, 3, 4), (4, 2, 3), (8, 3, 1)):
            parts = [rank_ids(order, BLOCK - 10, dp, rank, micro, accum) for rank in range(dp)]
            step = np.concatenate([parts[rank][m] for m in range(accum) for rank in range(dp)])
            assert np.array_equal(step, ids[BLOCK - 10 : BLOCK + 14])
        before = order.positions(BLOCK + 57)
        assert before == [sources_of(ids[: BLOCK + 57])[i] for i in range(3)]

    def test_an_epoch_ends_as_with_interleave_datasets(self) -> None:
        first = MixtureOrder(SIZES, WEIGHTS, 3, True, epochs=1)
        seen = first.ids(0, first.epoch)
        assert first.total == first.epoch and first.ids(first.epoch, 2).tolist() == [-1, -1]
        assert len({*seen[(seen >= 700) & (seen < 790)].tolist()}) == 90  # the first one to be exhausted
        assert 700 <= seen[-1] < 790
        every = MixtureOrder(SIZES, WEIGHTS, 3, True, epochs=1, stop_when="all_exhausted")
        assert {*every.ids(0, every.epoch).tolist()} == set(range(sum(SIZES)))
        assert every.ids(0, every.epoch)[-1] >= 790

    def test_small_weights_are_not_dropped(self) -> None:
        assert block_counts([1, 1e-9]) == [BLOCK - 1, 1]
        assert sum(block_counts([1, 1, 1])) == BLOCK and sum(block_counts([0.3] * 7)) == BLOCK
        with pytest.raises(Exception, match="0 samples have no order"):
            MixtureOrder([3, 0], [1, 1], 0, True)


class TestConfig:
    def config(self, tmp_path: Path, weights: list[float | None] = [0.75, 0.25], **data: Any) -> Config:  # noqa: B006
        chats = [
            {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
            for i in range(60)
        ]
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
        (tmp_path / "notes").mkdir(exist_ok=True)
        for number in range(30):
            (tmp_path / "notes" / f"{number}.txt").write_text(f"note number {number}. " * 9)
        sources = [
            {"path": str(tmp_path / name), **({} if weight is None else {"weight": weight})}
            for name, weight in zip(("chats.jsonl", "notes"), weights, strict=True)
        ]
        table = {"sources": sources, "seq_len": 64, "chat_template": "chatml", **data}
        model = {"config": str(tmp_path / "config.json")}
        return Config.model_validate({"model": model, "data": table, "train": {"epochs": 1, "global_batch": 2}})

    def test_text_beside_conversations(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, heldout_fraction=0.1)
        corpus = prepare_corpus(config.data, tmp_path / "cache", lambda line: None)
        assert corpus.sources == ("chats", "notes") and corpus.kind == "messages"
        samples = samples_for(corpus, config)
        assert samples.roles()["text"][0] == samples.roles()["text"][1] > 0
        assert isinstance(samples, JoinedSources) and samples.isolated
        inputs, labels = samples.batch(np.array([0, samples.sizes[0], -1]))
        assert inputs["input_ids"].shape == inputs["position_ids"].shape == labels.shape == (3, 64)
        texts = ["".join(chr(i) for i in row if i < 256) for row in inputs["input_ids"].tolist()]
        assert texts[0].startswith("<|im_start|>user") and texts[1].startswith("note number")
        assert (labels[2] == -100).all() and (labels[0] != -100).any()
        for row, number in enumerate((0, samples.sizes[0], -1)):
            assert samples.is_right(number, inputs["input_ids"][row], inputs["position_ids"][row], labels[row])
        receipt = data_receipt(corpus, config)
        assert receipt.sources["chats"][1] == 0.75
        lines = [*receipt.lines()]
        assert any(line.startswith("notes: 25.00% of the stream") for line in lines)
        assert lines[1].startswith(f"{receipt.documents} documents; "), "notes are no conversations"
        fills = [part.fill for part in samples.parts]
        assert samples.fill is not None and 0 < min(fills) < samples.fill < max(fills) <= 1
        held = samples_for(corpus, config, heldout=True)
        assert len(held) >= 2  # each source keeps some

    def test_the_best_metric_is_one_that_will_be_measured(self, tmp_path: Path) -> None:
        def check(best: str, *, metrics: tuple[str, ...] = ("own:exact_match",), **keys: Any) -> str:
            data = {key: keys.pop(key) for key in ("heldout_fraction", "heldout_path") if key in keys}
            model = {key: keys.pop(key) for key in ("loss",) if key in keys}
            config = self.config(tmp_path, **data)
            train = {"epochs": 1, "global_batch": 2, "eval_every": 1, "best_metric": best, "metrics": [*metrics]} | keys
            tables = {"model": {"config": "."} | model, "data": config.data.model_dump(exclude_unset=True)}
            config = Config.model_validate(tables | {"train": train})
            try:
                check_samples(config, prepare_corpus(config.data, tmp_path / "cache", lambda line: None))
            except ConfigError as error:
                return str(error)
            return ""

        assert not check("heldout_loss/notes") and not check("heldout_loss", metrics=())
        assert not check("heldout_bits_per_byte") and not check("exact_match", best_is="highest")
        known = "heldout_loss, heldout_bits_per_byte, exact_match, heldout_loss/chats, heldout_loss/notes"
        assert check("heldout_loss/note") == (
            "train.best_metric 'heldout_loss/note' is not measured (did you mean 'heldout_loss/notes'?); known here: "
            + known
        )
        assert check("heldout_accuracy").endswith(known) and "not measured" in check("exact", metrics=())
        assert "set train.best_is='highest', or 'lowest'" in check("exact_match"), "0 of 10 would be the best"
        (tmp_path / "held.txt").write_text("held out, " * 9)
        held = {"heldout_path": str(tmp_path / "held.txt")}
        assert not check("heldout_loss", **held) and "known here: heldout_loss, " in check("heldout_loss/notes", **held)
        own = {"loss": "own:loss", "metrics": ()}
        assert not check("heldout_accuracy", best_is="highest", **own) and check("heldout_bits_per_byte", **own)

    def test_text_beside_completions_needs_no_template(self, tmp_path: Path) -> None:
        (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
        (tmp_path / "note.txt").write_text("one two three")
        sources = [{"path": str(tmp_path / name)} for name in ("pairs.jsonl", "note.txt")]
        table = DataTable.model_validate({"sources": sources, "seq_len": 16, "heldout_fraction": 0.0})
        corpus = prepare_corpus(table, tmp_path / "cache", lambda line: None)
        assert [mark & 1 for mark in corpus.train.marks][:5] == [0, 0, 0, 0, 1]
        config = Config.model_validate(
            {"model": {"config": "."}, "data": table, "train": {"steps": 1, "global_batch": 2}}
        )
        assert samples_for(corpus, config).roles()["text"] == (13, 13), "all but the first, which nothing predicts"

    def test_without_weights_an_epoch_has_every_sample_once(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, [None, None])
        samples = samples_for(prepare_corpus(config.data, tmp_path / "cache", lambda line: None), config)
        order = order_for(samples, config)
        assert sorted(order.ids(0, len(samples)).tolist()) == list(range(len(samples)))

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            ('path = "a"\nsources = [{path = "b"}]', "needs exactly one of 'path' and 'sources', got both"),
            ("", "needs exactly one of 'path' and 'sources', got neither"),
            ('sources = [{path = "x/a"}, {path = "y/a"}]', "'sources' has a more than once; give each a name"),
            ('sources = [{path = "a", weight = 1}, {path = "b"}]', "gives some a weight, and b none"),
            ('path = "a"\nstop_when = "all_exhausted"', "'stop_when' has an effect on sources with weights only"),
        ],
    )
    def test_what_cannot_be(self, data: str, said: str, tmp_path: Path) -> None:
        file = tmp_path / "c.toml"
        file.write_text(f'[model]\nconfig = "c"\n[data]\nseq_len = 8\n{data}\n[train]\nsteps = 1\nglobal_batch = 1\n')
        with pytest.raises(Exception, match="data: ") as caught:
            read_config(file)
        assert said in str(caught.value)
