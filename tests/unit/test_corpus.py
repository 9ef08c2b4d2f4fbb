"""Documents of every kind become the same tokens on disk, once, and every way to get it wrong has a line of text."""

import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shardwise.errors import DataError, MachineError, UserError
from shardwise.train.config_data import DataTable
from shardwise.train.data import corpus as corpus_module
from shardwise.train.data.corpus import Corpus, Tokens, open_corpus, prepare_corpus
from shardwise.train.data.tokenizer import load_tokenizer

TEXTS = [f"document {i}: " + "the quick brown fox " * (i % 7 + 1) + "é\r\n\n" for i in range(40)]


def prepare(path: object, cache: Path, lines: list[str] | None = None, **keys: object) -> Corpus:
    table = DataTable(path=str(path), seq_len=8, **keys)
    return prepare_corpus(table, cache, (lines if lines is not None else []).append)


def fails(kind: type[UserError], path: object, cache: Path, **keys: object) -> str:
    with pytest.raises(kind) as error:
        prepare(path, cache, **keys)
    assert not list(cache.glob(".*")) if cache.is_dir() else True, "a temporary folder was left behind"
    assert "\n" not in str(error.value)
    return str(error.value)


def documents(tokens: Tokens | None) -> list[str]:
    """The texts that a ``bytes`` corpus holds; checks the separators on the way."""
    if tokens is None:
        return []
    rows = np.split(np.asarray(tokens.tokens), tokens.starts[1:-1])
    assert all(row[-1] == 256 and row[:-1].max(initial=0) < 256 for row in rows)
    return [bytes(row[:-1].astype(np.uint8)).decode() for row in rows]


def everything(corpus: Corpus) -> list[str]:
    return sorted(documents(corpus.train) + documents(corpus.heldout))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    path.mkdir()
    for index, text in enumerate(TEXTS):
        (path / f"{index:02d}.txt").write_bytes(text.encode())
    return path


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, **columns: list[object]) -> Path:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


class TestKinds:
    def test_a_text_folder_keeps_every_byte_in_the_order_of_paths(self, folder: Path, tmp_path: Path) -> None:
        (folder / "empty.txt").touch()
        corpus = prepare(folder, tmp_path / "cache", heldout_fraction=0.0)
        assert documents(corpus.train) == TEXTS
        assert corpus.heldout is None
        assert (corpus.vocab_size, corpus.separator, corpus.train.tokens.dtype) == (257, 256, np.uint16)
        assert isinstance(corpus.train.tokens, np.memmap) and not corpus.train.tokens.flags.writeable
        assert corpus.train.starts.dtype == np.int64
        assert corpus.train.starts[-1] == len(corpus.train.tokens) == corpus.train.num_bytes + len(TEXTS)
        assert corpus.train.num_bytes == sum(len(text.encode()) for text in TEXTS)

    def test_jsonl_json_list_parquet_and_saved_dataset_are_the_same_documents(self, tmp_path: Path) -> None:
        import datasets

        rows = [{"text": text, "other": [1, "a", {"b": None}][i % 3]} for i, text in enumerate(TEXTS)]
        (tmp_path / "a[1]*").mkdir()  # a path is no pattern
        lines = write_jsonl(tmp_path / "a[1]*" / "rows.jsonl", [*rows, {"text": None}, {"text": ""}])
        (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
        data = datasets.Dataset.from_dict({"n": range(len(TEXTS)), "text": TEXTS})
        write_parquet(tmp_path / "a[1]*" / "rows.parquet", n=list(range(len(TEXTS))), text=TEXTS)
        data.save_to_disk(str(tmp_path / "saved"))
        datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(str(tmp_path / "splits"))
        paths = [lines, tmp_path / "rows.json", tmp_path / "a[1]*" / "rows.parquet", tmp_path / "saved"]
        for path in [*paths, tmp_path / "splits"]:
            corpus = prepare(path, tmp_path / "cache", heldout_fraction=0.0)
            assert documents(corpus.train) == TEXTS, path

    def test_a_folder_is_what_all_its_files_are(self, tmp_path: Path) -> None:
        data = tmp_path / "data"
        data.mkdir()
        write_jsonl(data / "b.jsonl", [{"text": "two"}])
        write_jsonl(data / "a.jsonl", [{"text": "one"}])
        assert documents(prepare(data, tmp_path / "cache", heldout_fraction=0.0).train) == ["one", "two"]
        (data / "readme.md").write_text("three")
        mixed = prepare(data, tmp_path / "cache", heldout_fraction=0.0)
        assert documents(mixed.train) == ['{"text": "one"}\n', '{"text": "two"}\n', "three"]
        forced = prepare(data, tmp_path / "cache", heldout_fraction=0.0, format="jsonl")
        assert documents(forced.train) == ["one", "two"]

    def test_the_standard_library_and_installed_packages(self, tmp_path: Path) -> None:
        lines: list[str] = []
        corpus = prepare("python:stdlib", tmp_path / "cache", lines, include=["json/*.py"], heldout_fraction=0.0)
        sources = [p for p in sorted(Path(json.__file__).parent.glob("*.py")) if p.stat().st_size]
        assert documents(corpus.train) == [p.read_text() for p in sources]
        assert lines[0] == f"reading {len(sources)} files"
        package = prepare("python:shardwise.plan", tmp_path / "cache", heldout_fraction=0.0)
        assert any("class Plan" in text for text in documents(package.train))
        prepare("python:typing_extensions", tmp_path / "cache", heldout_fraction=0.0)  # a single file

    def test_a_package_is_not_imported(self, tmp_path: Path) -> None:
        (tmp_path / "explosive").mkdir()
        (tmp_path / "explosive" / "__init__.py").write_text("raise RuntimeError('imported')\n")
        sys.path.insert(0, str(tmp_path))
        try:
            corpus = prepare("python:explosive", tmp_path / "cache")
        finally:
            sys.path.remove(str(tmp_path))
        assert documents(corpus.train) == ["raise RuntimeError('imported')\n"]

    def test_source_folders_of_tests_are_left_out_of_packages_only(self, tmp_path: Path) -> None:
        for place in ("mine/a.py", "mine/tests/b.py", "mine/.git/c.py", "mine/notes.md"):
            (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place).write_text(place)
        (tmp_path / "mine" / "__init__.py").write_text("init")
        sys.path.insert(0, str(tmp_path))
        try:
            package = prepare("python:mine", tmp_path / "cache", heldout_fraction=0.0)
        finally:
            sys.path.remove(str(tmp_path))
        assert documents(package.train) == ["init", "mine/a.py"]
        texts = documents(prepare(tmp_path / "mine", tmp_path / "cache", heldout_fraction=0.0).train)
        assert texts == ["init", "mine/a.py", "mine/notes.md", "mine/tests/b.py"]

    def test_include_and_exclude(self, tmp_path: Path) -> None:
        for place in ("a.py", "b.txt", "deep/c.py", "deep/er/d.py", "out/e.py"):
            (tmp_path / "in" / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / place).write_text(place)

        def found(**keys: object) -> list[str]:
            return documents(prepare(tmp_path / "in", tmp_path / "cache", heldout_fraction=0.0, **keys).train)

        assert found(include=["*.py"]) == ["a.py"]
        assert found(include=["**/*.py"]) == ["a.py", "deep/c.py", "deep/er/d.py", "out/e.py"]
        assert found(include=["**/*.py"], exclude=["out", "**/[dx].py"]) == ["a.py", "deep/c.py"]
        assert found(include=["deep/**", "?.txt"], exclude=["deep/er/**"]) == ["b.txt", "deep/c.py"]

    def test_the_cache_inside_the_data_is_not_data(self, folder: Path) -> None:
        first = prepare(folder, folder / "cache")
        lines: list[str] = []
        assert prepare(folder, folder / "cache", lines).fingerprint == first.fingerprint
        assert lines == []

    def test_bytes_that_are_not_utf8_are_replaced_and_said(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"caf\xe9")
        lines: list[str] = []
        corpus = prepare(tmp_path / "a.txt", tmp_path / "cache", lines)
        assert documents(corpus.train) == ["caf\ufffd"]
        said = "1 documents contain U+FFFD, the replacement of bytes that are not UTF-8: the first is file 'a.txt'"
        assert said in lines
        assert "nothing is held out: there is only one document; give data.heldout_path" in lines


class TestTokenizers:
    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> object:
        import tokenizers

        built = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
        built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "<|endoftext|>", "<stop>"],
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        built.train_from_iterator(TEXTS, trainer)
        built.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        built.enable_truncation(4)
        built.enable_padding(length=64)
        return built

    def test_a_file_gives_whole_documents_without_added_tokens(self, tokenizer, folder: Path, tmp_path: Path) -> None:
        tokenizer.save(str(tmp_path / "mine.json"))
        corpus = prepare(folder, tmp_path / "cache", tokenizer=str(tmp_path / "mine.json"), heldout_fraction=0.0)
        rows = np.split(np.asarray(corpus.train.tokens), corpus.train.starts[1:-1])
        assert corpus.separator == 1 and all(row[-1] == 1 for row in rows)
        assert [tokenizer.decode(row[:-1].tolist(), skip_special_tokens=False) for row in rows] == TEXTS
        assert corpus.vocab_size == tokenizer.get_vocab_size() == 300
        assert corpus.train.tokens.dtype == np.uint16
        assert len(corpus.train.tokens) < corpus.train.num_bytes / 2

    @pytest.mark.parametrize(
        ("template", "begin"), [("<s> $A", "<s>"), ("$A <stop>", ""), ("<s> $A <stop>", "<s>"), ("$A", "")]
    )
    def test_what_is_put_before_a_text_and_not_what_is_put_behind(
        self, template: str, begin: str, tokenizer, tmp_path: Path
    ) -> None:
        import tokenizers

        special = [("<s>", 0), ("<stop>", 2)]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
        tokenizer.save(str(tmp_path / "mine.json"))
        assert load_tokenizer(str(tmp_path / "mine.json")).begin == begin

    def test_a_letter_of_two_tokens_has_nothing_put_before_it(self, tmp_path: Path) -> None:
        import tokenizers

        letters = {"<|endoftext|>": 0, "_": 1, "a": 2}
        built = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
        built.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement="_")
        built.save(str(tmp_path / "mine.json"))
        assert built.encode("a").ids == [1, 2] and load_tokenizer(str(tmp_path / "mine.json")).begin == ""

    def test_a_folder_says_which_token_ends_a_document(self, tokenizer, folder: Path, tmp_path: Path) -> None:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for number, end in ((2, "<stop>"), (0, {"content": "<s>"})):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
            corpus = prepare(folder, tmp_path / "cache", tokenizer=str(tmp_path))
            assert corpus.separator == number == corpus.train.tokens[-1]

    def test_a_transformers_folder_without_tokenizer_json(self, folder: Path, tmp_path: Path) -> None:
        from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer

        letters = sorted(set("".join(TEXTS).encode().decode("latin-1")))
        shown = {**{c: c for c in letters if c >= "!"}, " ": "Ġ", "\n": "Ċ", "\r": "č"}
        vocab = {letter: i for i, letter in enumerate(sorted(set(shown.values())))} | {"<|endoftext|>": 200}
        GPT2Tokenizer(vocab=vocab, merges=[]).save_pretrained(str(tmp_path / "slow"))
        (tmp_path / "slow" / "tokenizer.json").unlink()
        (tmp_path / "slow" / "vocab.json").write_text(json.dumps(vocab))
        (tmp_path / "slow" / "merges.txt").write_text("#version: 0.2\n")
        (tmp_path / "slow" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        corpus = prepare(folder, tmp_path / "cache", tokenizer=str(tmp_path / "slow"), heldout_fraction=0.0)
        assert (corpus.vocab_size, corpus.separator, corpus.train.tokens.dtype) == (201, 200, np.uint8)
        names = {i: letter for letter, i in vocab.items()}
        first = [names[i] for i in corpus.train.tokens[: corpus.train.starts[1] - 1].tolist()]
        assert "".join(first).startswith("documentĠ0:ĠtheĠquick")

    def test_the_type_is_the_smallest_that_holds_the_vocabulary(self, folder: Path, tmp_path: Path) -> None:
        import tokenizers

        for size, dtype in ((256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)):
            vocab = {"</s>": 0, "fox": size - 1} | {f"w{i}": i for i in range(1, size - 1)}
            built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="</s>"))
            built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
            built.save(str(tmp_path / "words.json"))
            corpus = prepare(folder, tmp_path / "cache", tokenizer=str(tmp_path / "words.json"), heldout_fraction=0.0)
            assert corpus.vocab_size == size and corpus.train.tokens.dtype == dtype
            assert corpus.train.tokens.max() == size - 1

    def test_errors(self, folder: Path, tmp_path: Path) -> None:
        import tokenizers

        cache = tmp_path / "cache"
        message = fails(DataError, folder, cache, tokenizer="gpt2-of-nobody")
        fix = "give 'bytes', a tokenizer.json or a folder with one"
        assert message == f"data.tokenizer 'gpt2-of-nobody' does not exist here; {fix}"
        (tmp_path / "none").mkdir()
        message = fails(DataError, folder, cache, tokenizer=str(tmp_path / "none"))
        assert message == f"data.tokenizer '{tmp_path / 'none'}' has no tokenizer file; {fix}"
        (tmp_path / "broken.json").write_text("{")
        message = fails(DataError, folder, cache, tokenizer=str(tmp_path / "broken.json"))
        assert message.startswith(f"data.tokenizer '{tmp_path / 'broken.json'}' cannot be read: ")
        (tmp_path / "none" / "tokenizer_config.json").write_text("{}")
        message = fails(DataError, folder, cache, tokenizer=str(tmp_path / "none"))
        assert message.startswith(f"data.tokenizer '{tmp_path / 'none'}' cannot be read: ")
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "endless.json"))
        message = fails(DataError, folder, cache, tokenizer=str(tmp_path / "endless.json"))
        assert "has no token that ends a document; add one of these: </s>, <|endoftext|>," in message


class TestHeldOut:
    def test_the_side_of_a_document_is_a_function_of_its_content(self, folder: Path, tmp_path: Path) -> None:
        corpus = prepare(folder, tmp_path / "cache", heldout_fraction=0.3)
        limit = 0.3 * 2**64

        def is_held(text: str) -> bool:
            return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") < limit

        assert documents(corpus.train) == [text for text in TEXTS if not is_held(text)]
        assert documents(corpus.heldout) == [text for text in TEXTS if is_held(text)] != []
        for path in folder.iterdir():  # other names are another order
            path.rename(folder / f"{99 - int(path.stem)}.txt")
        (folder / "copy.txt").write_bytes(documents(corpus.heldout)[0].encode())
        again = prepare(folder, tmp_path / "cache", heldout_fraction=0.3)
        assert set(documents(again.heldout)) == set(documents(corpus.heldout))
        assert not set(documents(again.heldout)) & set(documents(again.train))

    def test_neither_side_is_empty_if_there_are_two_contents(self, tmp_path: Path) -> None:
        for fraction in (1e-12, 1 - 1e-12):
            two = write_jsonl(tmp_path / "two.jsonl", [{"text": t} for t in ("a", "b", "a")])
            corpus = prepare(two, tmp_path / "cache", heldout_fraction=fraction)
            assert {*documents(corpus.train), *documents(corpus.heldout)} == {"a", "b"}
            assert set(documents(corpus.train)) != set(documents(corpus.heldout))
            assert len(everything(corpus)) == 3
            same = write_jsonl(tmp_path / "same.jsonl", [{"text": "a"}] * 2)
            corpus = prepare(same, tmp_path / "cache", heldout_fraction=fraction)
            assert documents(corpus.train) == ["a", "a"] and corpus.heldout is None

    def test_the_smallest_hash_is_held_out_if_the_fraction_takes_none(self, folder: Path, tmp_path: Path) -> None:
        corpus = prepare(folder, tmp_path / "cache", heldout_fraction=1e-12)
        assert documents(corpus.heldout) == [
            min(TEXTS, key=lambda text: hashlib.blake2b(text.encode(), digest_size=8).digest())
        ]

    def test_a_path_of_its_own(self, folder: Path, tmp_path: Path) -> None:
        other = write_jsonl(tmp_path / "other.jsonl", [{"text": "new"}, {"text": TEXTS[3]}])
        lines: list[str] = []
        corpus = prepare(folder, tmp_path / "cache", lines, heldout_path=str(other))
        assert documents(corpus.train) == TEXTS
        assert documents(corpus.heldout) == ["new", TEXTS[3]]
        assert "1 of 2 held-out documents are trained on too: they are in data.path" in lines

    def test_errors_name_the_key(self, folder: Path, tmp_path: Path) -> None:
        message = fails(DataError, folder, tmp_path / "cache", heldout_path="nowhere")
        assert message == "data.heldout_path 'nowhere' does not exist; give a file or a folder"
        (tmp_path / "blank.txt").touch()
        message = fails(DataError, folder, tmp_path / "cache", heldout_path=str(tmp_path / "blank.txt"))
        where = f"data.heldout_path '{tmp_path / 'blank.txt'}'"
        assert message == f"{where} has only empty documents; give some with text"


class TestEntropy:
    def slow(self, data: bytes) -> tuple[float, float]:
        singles, pairs = Counter(data), Counter(itertools.pairwise(data))
        firsts = Counter(data[:-1])
        order0 = -sum(n / len(data) * math.log2(n / len(data)) for n in singles.values())
        order1 = -sum(n / (len(data) - 1) * math.log2(n / firsts[a]) for (a, _), n in pairs.items())
        return order0, order1

    def test_it_is_that_of_the_documents_joined(self, folder: Path, tmp_path: Path) -> None:
        for fraction in (0.0, 0.3):
            corpus = prepare(folder, tmp_path / "cache", heldout_fraction=fraction)
            expected = self.slow("".join(TEXTS).encode())
            assert (corpus.order0_bits, corpus.order1_bits) == pytest.approx(expected, abs=1e-9)

    def test_across_batches(self, tmp_path: Path) -> None:
        texts = [chr(97 + i * i % 26) for i in range(300)]
        rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
        corpus = prepare(rows, tmp_path / "cache")
        assert (corpus.order0_bits, corpus.order1_bits) == pytest.approx(self.slow("".join(texts).encode()), abs=1e-9)

    def test_across_chunks(self, tmp_path: Path) -> None:
        data = np.random.default_rng(0).integers(97, 105, 2_200_000, dtype=np.uint8).tobytes()
        (tmp_path / "big.txt").write_bytes(data)
        corpus = prepare(tmp_path / "big.txt", tmp_path / "cache")
        assert (corpus.order0_bits, corpus.order1_bits) == pytest.approx(self.slow(data), abs=1e-9)

    def test_one_byte_repeated_has_none(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("aaaa")
        corpus = prepare(tmp_path / "a.txt", tmp_path / "cache")
        assert (corpus.order0_bits, corpus.order1_bits) == (0.0, 0.0)


class TestCache:
    def test_the_second_time_is_fast_silent_and_without_datasets(self, folder: Path, tmp_path: Path) -> None:
        first = prepare(folder, tmp_path / "cache")
        code = (
            "import sys, time, pathlib\n"
            "from shardwise.train.config_data import DataTable\n"
            "from shardwise.train.data.corpus import prepare_corpus\n"
            f"table = DataTable(path={str(folder)!r}, seq_len=99, pack=False, shuffle=False)\n"
            "began = time.perf_counter()\n"
            f"corpus = prepare_corpus(table, pathlib.Path({str(tmp_path / 'cache')!r}), print)\n"
            "assert time.perf_counter() - began < 0.5\n"
            "assert not {'datasets', 'tokenizers', 'pyarrow'} & set(sys.modules)\n"
            "print(corpus.fingerprint)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == (first.fingerprint + "\n", "")
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.folder.name]

    def test_what_is_reported(self, folder: Path, tmp_path: Path) -> None:
        lines: list[str] = []
        prepare(folder, tmp_path / "cache", lines, heldout_fraction=0.3)
        held = len([t for t in TEXTS if hashlib.blake2b(t.encode(), digest_size=8).digest() < b"\x4c\xcc\xcc\xcc"])
        size = sum(len(text.encode()) for text in TEXTS)
        end = f"{size / 1024:.2f} KiB, {(size + 40) / 1000:.1f} k tokens, 40 documents, {held} held out"
        assert lines == ["reading 40 files", end]

    def test_long_work_reports_the_rate_and_what_is_left(self, tmp_path: Path, monkeypatch) -> None:
        rows = write_jsonl(tmp_path / "many.jsonl", [{"text": f"{i:10d}"} for i in range(1280)])  # 23 bytes a line
        clock = iter(range(10_000))
        monkeypatch.setattr(corpus_module.time, "monotonic", lambda: float(next(clock)))
        lines: list[str] = []
        prepare(rows, tmp_path / "cache", lines)
        kib = 1280 * 23 / 1024
        assert lines[1:-1] == [
            f"tokenised {kib * i / 10:.2f} KiB of {kib:.2f} KiB, {kib / 10:.2f} KiB/s, {10 - i:.1f} s left"
            for i in (2, 4, 6, 8)
        ]

    def test_what_changes_the_fingerprint(self, folder: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        prints = [prepare(folder, cache).fingerprint]
        prints.append(prepare(folder, cache, heldout_fraction=0.2).fingerprint)
        prints.append(prepare(folder, cache, heldout_path=str(folder / "00.txt")).fingerprint)
        prints.append(prepare(folder, cache, exclude=["00.txt"]).fingerprint)
        facts = (folder / "00.txt").stat()
        os.utime(folder / "00.txt", ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
        prints.append(prepare(folder, cache).fingerprint)
        (folder / "new.txt").write_text("new")
        prints.append(prepare(folder, cache).fingerprint)
        assert len(set(prints)) == len(prints)

    def test_another_tokenizer_of_the_same_name_is_another_corpus(self, folder: Path, tmp_path: Path) -> None:
        import tokenizers

        found = []
        for end in ("</s>", "<eos>"):
            built = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, end: 1}, unk_token="a"))
            built.save(str(tmp_path / "t.json"))
            found.append(prepare(folder, tmp_path / "cache", tokenizer=str(tmp_path / "t.json")).fingerprint)
        assert found[0] != found[1]

    def test_open_gives_the_same_corpus(self, folder: Path, tmp_path: Path) -> None:
        corpus = prepare(folder, tmp_path / "cache")
        opened = open_corpus(corpus.folder)
        for one, other in ((corpus.train, opened.train), (corpus.heldout, opened.heldout)):
            assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.starts, other.starts)
            assert one.num_bytes == other.num_bytes
        names = {f.name for f in dataclasses.fields(Corpus)} - {"train", "heldout"}
        assert {n: getattr(corpus, n) for n in names} == {n: getattr(opened, n) for n in names}

    @pytest.mark.parametrize("name", ["corpus.json", "train.npy", "heldout_starts.npy"])
    @pytest.mark.parametrize("damage", ["cut", "gone"])
    def test_a_damaged_folder_is_an_error_to_open_and_is_prepared_again(
        self, name: str, damage: str, folder: Path, tmp_path: Path
    ) -> None:
        corpus = prepare(folder, tmp_path / "cache")
        full = everything(corpus)
        path = corpus.folder / name
        data = path.read_bytes()
        path.unlink()  # the mapped file lives on
        if damage == "cut":
            path.write_bytes(data[:-8])
        with pytest.raises(DataError, match=r"^corpus '.*' cannot be opened: .+; delete it and run again$"):
            open_corpus(corpus.folder)
        lines: list[str] = []
        assert everything(prepare(folder, tmp_path / "cache", lines)) == full
        assert lines[0] == f"the corpus in '{corpus.folder}' is damaged, preparing it again"

    @pytest.mark.parametrize("names", [("train",), ("train_starts",), ("train", "train_starts")])
    def test_tokens_that_are_not_as_many_as_noted(self, names: tuple[str], folder: Path, tmp_path: Path) -> None:
        corpus = prepare(folder, tmp_path / "cache")
        short = {"train": np.zeros(5, np.uint16), "train_starts": np.array([0, 5])}
        for name in names:
            np.save(corpus.folder / f"{name}.npy", short[name])
        with pytest.raises(DataError, match=r"train\.npy has \d+ tokens instead of \d+;"):
            open_corpus(corpus.folder)

    def test_nothing_is_written_elsewhere_and_datasets_is_left_as_it_was(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "home").mkdir()
        write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
        write_parquet(tmp_path / "rows.parquet", text=["a"])
        code = (
            "import datasets, pathlib\n"
            "from shardwise.train.config_data import DataTable\n"
            "from shardwise.train.data.corpus import prepare_corpus\n"
            "before = datasets.config.HF_HUB_OFFLINE, datasets.utils.logging.get_verbosity()\n"
            f"for path in ({str(folder)!r}, 'rows.jsonl', 'rows.parquet'):\n"
            "    prepare_corpus(DataTable(path=path, seq_len=8), pathlib.Path('cache'), lambda line: None)\n"
            "assert before == (datasets.config.HF_HUB_OFFLINE, datasets.utils.logging.get_verbosity())\n"
            "assert not datasets.are_progress_bars_disabled()\n"
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))} | {"HOME": "home"}
        call = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
        assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
        assert list((tmp_path / "home").iterdir()) == []
        assert len(list((tmp_path / "cache").iterdir())) == 3


class TestErrors:
    def test_no_such_path(self, tmp_path: Path) -> None:
        message = fails(DataError, "no/such", tmp_path / "cache")
        assert message == "data.path 'no/such' does not exist; give a file or a folder"

    def test_no_such_package(self, tmp_path: Path) -> None:
        for name in ("nothing_of_this_name", "sys", "json.nothing"):
            rule = f"'{name}' is not an installed package with Python source; install it or give a folder"
            assert fails(DataError, f"python:{name}", tmp_path / "cache") == f"data.path 'python:{name}': {rule}"

    def test_no_file_matches(self, folder: Path, tmp_path: Path) -> None:
        message = fails(DataError, folder, tmp_path / "cache", include=["*.py"], exclude=["a*"])
        assert message == (
            f"data.path '{folder}' has no documents: no file matches data.include ['*.py'] and not data.exclude "
            "['a*']; patterns are relative to it, such as '**/*.txt'"
        )

    def test_only_empty_documents(self, tmp_path: Path) -> None:
        import datasets
        import pyarrow

        for rows in ([], [{"text": ""}, {"text": None}]):
            path = write_jsonl(tmp_path / "rows.jsonl", rows)
            message = fails(DataError, path, tmp_path / "cache")
            assert message == f"data.path '{path}' has only empty documents; give some with text"
        for texts in ([], [""], [None, ""]):
            column = pyarrow.array(texts, pyarrow.string())
            path = write_parquet(tmp_path / "rows.parquet", text=column)
            message = fails(DataError, path, tmp_path / "cache")
            assert message == f"data.path '{path}' has only empty documents; give some with text"
            if not texts:
                continue  # datasets cannot load what it saved then
            saved = datasets.Dataset(pyarrow.table({"text": column}))
            saved.save_to_disk(str(tmp_path / f"saved{len(texts)}"))
            message = fails(DataError, tmp_path / f"saved{len(texts)}", tmp_path / "cache")
            assert message.endswith("has only empty documents; give some with text")

    def test_no_such_column(self, tmp_path: Path) -> None:
        import datasets

        rows = write_jsonl(tmp_path / "rows.jsonl", [{"texts": "a", "n": 1}])
        start = "data.text_field 'text' is not a column of data.path"
        end = " (did you mean 'texts'?); it has: texts, n; columns of conversations and prompts are named in "
        end += "data.columns, such as messages = 'chat', or prompt = 'ask' and completion = 'reply' "
        end += "(for init: --column messages=chat)"
        message = fails(DataError, rows, tmp_path / "cache")
        assert message == f"{start} '{rows}' (file 'rows.jsonl', line 1){end}"
        data = datasets.Dataset.from_dict({"texts": ["a"], "n": [1]})
        write_parquet(tmp_path / "rows.parquet", texts=["a"], n=[1])
        message = fails(DataError, tmp_path / "rows.parquet", tmp_path / "cache")
        assert message == f"{start} '{tmp_path / 'rows.parquet'}' (file 'rows.parquet'){end}"
        data.save_to_disk(str(tmp_path / "saved"))
        assert fails(DataError, tmp_path / "saved", tmp_path / "cache") == f"{start} '{tmp_path / 'saved'}'{end}"

    def test_a_column_that_is_not_text(self, tmp_path: Path) -> None:
        rows = write_jsonl(tmp_path / "rows.jsonl", [{"n": 1}])
        message = fails(DataError, rows, tmp_path / "cache", text_field="n")
        where = "(file 'rows.jsonl', line 1)"
        assert message == f"data.text_field 'n' holds int {where}, not text; set it to a text column"
        write_parquet(tmp_path / "rows.parquet", n=[1])
        message = fails(DataError, tmp_path / "rows.parquet", tmp_path / "cache", text_field="n")
        assert message == "data.text_field 'n' holds int64, not text; set it to a text column"

    def test_unreadable_files(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.jsonl"
        bad.write_text('\ufeff{"text": "a"}\n\n{"text"\n')
        message = fails(DataError, bad, tmp_path / "cache")
        rule = "file 'bad.jsonl', line 3 is not JSON: Expecting ':' delimiter"
        assert message == f"data.path '{bad}': {rule}; repair it"
        bad.write_text('{"text": "a"}\n"b"\n')
        message = fails(DataError, bad, tmp_path / "cache")
        assert message == f"data.path '{bad}': file 'bad.jsonl', line 2 holds 'b', not an object; repair it"
        full = write_parquet(tmp_path / "bad.parquet", text=TEXTS).read_bytes()
        for content in (b"PAR1 not at all", full[:4] + b"?" * 200 + full[204:]):
            (tmp_path / "bad.parquet").write_bytes(content)
            message = fails(DataError, tmp_path / "bad.parquet", tmp_path / "cache")
            assert message.startswith(f"data.path '{tmp_path / 'bad.parquet'}' cannot be read as parquet: ")
            assert message.endswith("; repair it or set data.format")

    def test_what_datasets_logs_is_our_error_and_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        write_parquet(tmp_path / "data" / "a.parquet", text=["a"])
        write_parquet(tmp_path / "data" / "b.parquet", text=[b"\xff\xfe"])
        code = (
            "import pathlib\n"
            "from shardwise.train.config_data import DataTable\n"
            "from shardwise.train.data.corpus import prepare_corpus\n"
            "try:\n"
            "    prepare_corpus(DataTable(path='data', seq_len=8), pathlib.Path('cache'), lambda line: None)\n"
            "except Exception as error:\n"
            "    print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
        message = "data.text_field 'text' holds binary, not text; set it to a text column\n"
        assert (done.stdout, done.stderr) == (message, "")

    def test_a_dataset_that_is_none(self, folder: Path, tmp_path: Path) -> None:
        for path in (folder, folder / "00.txt"):
            message = fails(DataError, path, tmp_path / "cache", format="dataset")
            rule = "give a folder that datasets.save_to_disk wrote"
            assert message == f"data.path '{path}' is not a saved dataset; {rule}"

    def test_splits_without_train(self, tmp_path: Path) -> None:
        import datasets

        data = datasets.Dataset.from_dict({"text": ["a", "b"]})
        datasets.DatasetDict(one=data, two=data).save_to_disk(str(tmp_path / "splits"))
        message = fails(DataError, tmp_path / "splits", tmp_path / "cache")
        rule = "has several splits and no 'train'; set data.split, or give the folder of one split: one, two"
        assert message == f"data.path '{tmp_path / 'splits'}' {rule}"
        assert everything(prepare(tmp_path / "splits" / "one", tmp_path / "cache")) == ["a", "b"]
        assert everything(prepare(tmp_path / "splits", tmp_path / "cache", split="two")) == ["a", "b"]
        message = fails(DataError, tmp_path / "splits", tmp_path / "cache", split="three")
        assert message == f"data.split 'three' is none of data.path '{tmp_path / 'splits'}', which has one, two"

    def test_a_link_to_nothing(self, folder: Path, tmp_path: Path) -> None:
        (folder / "link.txt").symlink_to("nowhere")
        message = fails(DataError, folder, tmp_path / "cache")
        rule = "file 'link.txt' is a link to nothing; repair it or add it to data.exclude"
        assert message == f"data.path '{folder}': {rule}"
        prepare(folder, tmp_path / "cache", exclude=["link.txt"])

    def test_a_pipe_is_not_read(self, folder: Path, tmp_path: Path) -> None:
        os.mkfifo(folder / "pipe.txt")
        assert len(everything(prepare(folder, tmp_path / "cache"))) == len(TEXTS)

    def test_a_cache_that_cannot_be_written(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        message = fails(UserError, folder, tmp_path / "file")
        end = "cannot be written: File exists; use a folder you may write"
        assert message == f"corpus cache '{tmp_path / 'file'}' {end}"

    @pytest.mark.parametrize(
        ("code", "kind", "fix"),
        [
            (errno.ENOSPC, MachineError, "free space or use another folder"),
            (errno.EROFS, UserError, "use a folder you may write"),
        ],
    )
    def test_a_disk_that_fails_while_writing(
        self, code: int, kind: type, fix: str, folder: Path, tmp_path: Path, monkeypatch
    ) -> None:
        def fail(*args: object, **keys: object) -> None:
            raise OSError(code, os.strerror(code))

        places = [(corpus_module.np, "save"), (corpus_module.os, "replace"), (corpus_module.Path, "mkdir")]
        for owner, name in places:
            with monkeypatch.context() as patch, pytest.raises(kind) as error:
                patch.setattr(owner, name, fail)
                prepare(folder, tmp_path / "cache")
            where = f"corpus cache '{tmp_path / 'cache'}'"
            assert str(error.value) == f"{where} cannot be written: {os.strerror(code)}; {fix}"
            assert list((tmp_path / "cache").iterdir()) == []

    def test_a_missing_package_is_named(self, folder: Path, tmp_path: Path, monkeypatch) -> None:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "saved"))
        monkeypatch.setitem(sys.modules, "datasets", None)
        message = fails(DataError, tmp_path / "saved", tmp_path / "cache")
        assert message.startswith("the corpus needs the package 'datasets' (")
        assert message.endswith("); pip install 'shardwise[hf]'")


def test_many_documents_are_fast(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"{i} " * 20} for i in range(20_000)])
    began = time.perf_counter()
    corpus = prepare(rows, tmp_path / "cache")
    assert len(everything(corpus)) == 20_000
    assert time.perf_counter() - began < 10
