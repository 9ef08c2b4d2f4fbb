"""Samples: every token is learnt once, nothing else is, and bytes are counted for exactly what is learnt."""

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.errors import DataError
from shardwise.train.config import Config
from shardwise.train.config_data import DataTable
from shardwise.train.data.corpus import Tokens, prepare_corpus
from shardwise.train.data.samples import DocumentSamples, NumberedSamples, PackedSamples, samples_for

END = 256
LENGTHS = [5, 1, 16, 0, 7, 8, 23, 2]  # bytes of the documents; their separators come on top


def stream(lengths: list[int], num_bytes: int | None = None) -> Tokens:
    """Documents of these lengths; the token at index i is i mod 251, so that every place is known."""
    starts = np.concatenate([[0], np.cumsum(np.array(lengths) + 1)]).astype(np.int64)
    tokens = (np.arange(starts[-1]) % 251).astype(np.uint16)
    tokens[starts[1:] - 1] = END
    return Tokens(tokens, starts, sum(lengths) if num_bytes is None else num_bytes)


def learnt(samples: NumberedSamples) -> list[tuple[int, int]]:
    """(token before, label) of every label of an epoch; checks the shape of every sample on the way."""
    pairs = []
    for sample in range(len(samples)):
        inputs, labels = samples.batch(np.array([sample]))
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.shape == labels.shape == (1, samples.seq_len)
        assert inputs.is_contiguous() and labels.is_contiguous()
        pairs += [(i, t) for i, t in zip(inputs[0].tolist(), labels[0].tolist(), strict=True) if t != -100]
    return pairs


def all_samples(seq_len: int, tokens: Tokens | None = None) -> list[NumberedSamples]:
    tokens = stream(LENGTHS) if tokens is None else tokens
    return [
        PackedSamples(tokens, seq_len, END, False),
        PackedSamples(tokens, seq_len, END, True),
        DocumentSamples(tokens, seq_len, END),
    ]


@pytest.mark.parametrize("seq_len", [1, 2, 7, 8, 16, 69, 70, 500])
class TestEveryTokenOnce:
    def test_packed(self, seq_len: int) -> None:
        tokens = stream(LENGTHS)
        row = tokens.tokens.tolist()
        samples = PackedSamples(tokens, seq_len, END, False)
        assert learnt(samples) == list(itertools.pairwise(row))
        assert len(samples) == -(-(len(row) - 1) // seq_len)

    def test_packed_with_borders_masked(self, seq_len: int) -> None:
        tokens = stream(LENGTHS)
        row, firsts = tokens.tokens.tolist(), set(tokens.starts.tolist())
        expected = [(row[i - 1], row[i]) for i in range(1, len(row)) if i not in firsts]
        assert learnt(PackedSamples(tokens, seq_len, END, True)) == expected

    def test_documents(self, seq_len: int) -> None:
        tokens = stream(LENGTHS)
        rows = [row.tolist() for row in np.split(tokens.tokens, tokens.starts[1:-1])]
        samples = DocumentSamples(tokens, seq_len, END)
        assert learnt(samples) == [pair for row in rows for pair in itertools.pairwise(row)]
        assert len(samples) == sum(-(-n // seq_len) for n in LENGTHS)

    def test_bytes_of_the_labels_of_every_prefix(self, seq_len: int) -> None:
        for samples in all_samples(seq_len):
            so_far = 0
            assert samples.label_bytes(0) == 0
            for sample in range(len(samples)):
                labels = samples.batch(np.array([sample]))[1]
                so_far += int(((labels >= 0) & (labels < END)).sum())
                assert samples.label_bytes(sample + 1) == so_far
            assert samples.label_bytes(None) == samples.label_bytes(10**9) == so_far


class TestBatch:
    def test_rows_are_the_samples_asked_for(self) -> None:
        for samples in all_samples(8):
            ids = np.array([3, 0, -1, len(samples) - 1, 3])
            inputs, labels = samples.batch(ids)
            for row, sample in enumerate(ids):
                one = samples.batch(np.array([sample]))
                assert torch.equal(inputs[row], one[0][0]) and torch.equal(labels[row], one[1][0])

    def test_an_empty_sample(self) -> None:
        for samples in all_samples(8):
            inputs, labels = samples.batch(np.array([-1, -1]))
            assert inputs.tolist() == [[END] * 8] * 2
            assert labels.tolist() == [[-100] * 8] * 2

    def test_padding_is_the_separator_without_a_label(self) -> None:
        inputs, labels = DocumentSamples(stream([2, 5]), 4, END).batch(np.arange(3))
        assert inputs.tolist() == [[0, 1, END, END], [3, 4, 5, 6], [7, END, END, END]]
        assert labels.tolist() == [[1, END, -100, -100], [4, 5, 6, 7], [END, -100, -100, -100]]
        inputs, labels = PackedSamples(stream([2, 5]), 5, END, True).batch(np.arange(2))
        assert inputs.tolist() == [[0, 1, END, 3, 4], [5, 6, 7, END, END]]
        assert labels.tolist() == [[1, END, -100, 4, 5], [6, 7, END, -100, -100]]

    def test_a_batch_can_be_written_to(self) -> None:
        tokens = stream(LENGTHS)
        tokens.tokens.flags.writeable = False
        inputs, labels = PackedSamples(tokens, 8, END, False).batch(np.array([0]))
        inputs.zero_()
        labels.zero_()
        assert tokens.tokens[1] == 1

    def test_no_ids(self) -> None:
        inputs, labels = PackedSamples(stream(LENGTHS), 8, END, True).batch(np.array([], np.int64))
        assert inputs.shape == labels.shape == (0, 8)

    @pytest.mark.parametrize("wrong", [-2, 9, 10])
    def test_ids_out_of_range(self, wrong: int) -> None:
        samples = PackedSamples(stream(LENGTHS), 8, END, False)
        assert len(samples) == 9
        with pytest.raises(IndexError, match=f"^sample ids .*{wrong}.* are not all in -1 to 8$"):
            samples.batch(np.array([0, wrong]))

    def test_a_separator_inside_a_document_is_no_border(self) -> None:
        tokens = stream([6, 6])
        tokens.tokens[2] = END
        assert (END, 3) in learnt(PackedSamples(tokens, 4, END, True))
        assert (END, 7) not in learnt(PackedSamples(tokens, 4, END, True))
        assert PackedSamples(tokens, 4, END, False).label_bytes(None) == 11

    def test_it_is_fast(self) -> None:
        tokens = stream([700] * 3000)
        for samples in all_samples(256, tokens):
            ids = np.random.default_rng(0).integers(0, len(samples), (50, 8))
            times = []
            for row in ids:
                began = time.perf_counter()
                samples.batch(row)
                times.append(time.perf_counter() - began)
            assert min(times) < 200e-6


def test_bytes_of_longer_tokens_are_shared_out() -> None:
    tokens = stream(LENGTHS, num_bytes=4 * sum(LENGTHS))
    samples = PackedSamples(tokens, 8, END, False)
    labels = samples.batch(np.arange(3))[1]
    assert samples.label_bytes(3) == 4 * int((labels != END).sum())
    assert samples.label_bytes(None) == 4 * (sum(LENGTHS) - 1)  # the first token is never a label


def test_too_short() -> None:
    for make in (lambda t: PackedSamples(t, 4, END, False), lambda t: DocumentSamples(t, 4, END)):
        with pytest.raises(DataError) as error:
            make(stream([0]))
        assert str(error.value) == "the corpus has no token that follows another one; give documents with more text"
        assert len(make(stream([1]))) == 1
    with pytest.raises(DataError):
        DocumentSamples(stream([0, 0, 0]), 4, END)


def test_a_real_corpus_from_its_table(tmp_path: Path) -> None:
    common = {"path": "python:stdlib", "include": ["json/*.py"], "seq_len": 64, "heldout_fraction": 0.3}
    corpus = prepare_corpus(DataTable(**common), tmp_path, lambda line: None)
    for keys, kind in (
        ({"mask_borders": True}, PackedSamples),
        ({}, PackedSamples),
        ({"pack": False}, DocumentSamples),
    ):
        config = Config(model={"factory": "a:b"}, data={**common, **keys}, train={"steps": 1, "global_batch": 1})
        for tokens, heldout in ((corpus.train, False), (corpus.heldout, True)):
            samples = samples_for(corpus, config, heldout=heldout)
            assert type(samples) is kind and samples.seq_len == 64
            documents = len(tokens.starts) - 1
            never = documents if keys else 1  # labels that the first tokens of documents are not
            assert samples.label_bytes(None) == tokens.num_bytes - never
            pairs = learnt(samples)
            assert len(pairs) == tokens.num_bytes + documents - never
            assert sum(label == corpus.separator for _, label in pairs) == documents
            text = bytes(label for _, label in pairs if label != corpus.separator).decode()
            assert "def " in text or "import" in text
