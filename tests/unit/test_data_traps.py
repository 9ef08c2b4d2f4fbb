"""Data sets and templates that once gave wrong tokens, labels or losses without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from shardwise.cli.export_model import stop_where_answers_end
from shardwise.errors import DataError
from shardwise.receipts.lines.sample_lines import isolation_line
from shardwise.report.sample_preview import parts_of, terminal_text
from shardwise.train.config import Config
from shardwise.train.config_data import DataTable
from shardwise.train.data.chat import CHATML, ROLES, ChatTemplate
from shardwise.train.data.corpus import Corpus, prepare_corpus
from shardwise.train.data.data_receipt import data_receipt
from shardwise.train.data.documents import Document, columns_of
from shardwise.train.data.encode import Encoder
from shardwise.train.data.isolation import Isolation, shared_rows
from shardwise.train.data.packing import pieces_of
from shardwise.train.data.samples import IGNORED, IsolatedSamples, JoinedSources, PackedSamples, samples_for
from shardwise.train.data.tokenizer import load_tokenizer
from shardwise.train.generate import Generator

TOOLS = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(asked: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def prepared(tmp_path: Path, **table: Any) -> Corpus:
    given = {"chat_template": "chatml", "heldout_fraction": 0.0, "seq_len": 64} | table
    if "heldout_path" in given:
        del given["heldout_fraction"]
    return prepare_corpus(DataTable(**given), tmp_path / "cache", lambda _: None)


def text_of(corpus: Corpus) -> str:
    return bytes(np.asarray(corpus.train.tokens).astype(np.uint8)).decode()


def test_a_named_text_column_is_another_corpus_than_messages_beside_it(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [chat("q", f"a{i}") | {"text": f"text {i}"} for i in range(4)])
    assert prepared(tmp_path, path=path).kind == "messages"
    assert prepared(tmp_path, path=path, text_field="text", chat_template=None).kind == "text"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"loss_on": "last"}, "data.loss_on 'last' does nothing for plain text"),
        ({"chat_template": "chatml"}, "data.chat_template 'chatml' does nothing for plain text"),
        ({"columns": {"messages": "text", "completion": "text"}}, "data.columns.completion 'text' is not read"),
    ],
)
def test_options_that_would_do_nothing(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"text": "abc"}])
    with pytest.raises(DataError) as told:
        prepared(tmp_path, path=path, **{"chat_template": None} | table)
    assert message in str(told.value)


def test_a_part_that_the_first_row_lacks_is_read_from_later_rows(tmp_path: Path) -> None:
    rows = [{"instruction": "add", "output": "x"}, {"instruction": "sum", "input": "CONTEXT", "output": "y"}]
    assert "sum\n\nCONTEXT" in text_of(prepared(tmp_path, path=lines(tmp_path / "rows.jsonl", rows)))
    (tmp_path / "tools.jinja").write_text(TOOLS)
    rows = [chat("q", "a"), chat("r", "b") | {"tools": [{"name": "search"}]}]
    corpus = prepared(tmp_path, path=lines(tmp_path / "tools.jsonl", rows), chat_template=str(tmp_path / "tools.jinja"))
    assert text_of(corpus).count("search") == 1


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_a_table_gives_a_call_no_arguments_of_other_rows(tmp_path: Path, form: str) -> None:
    (tmp_path / "tools.jinja").write_text(TOOLS)
    rows = []
    for key in ("city", "sum"):
        row = chat("q", "a")
        row["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {key: "1"}}}]
        rows.append(row | {"tools": [{"name": "f", "parameters": {key: {"type": "string"}}}]})
    if form == "parquet":
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    else:
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    name = "rows.parquet" if form == "parquet" else "rows"
    text = text_of(prepared(tmp_path, path=str(tmp_path / name), chat_template=str(tmp_path / "tools.jinja")))
    assert "null" not in text and '"arguments": {"city": "1"}' in text and '"arguments": {"sum": "1"}' in text


MACRO = (
    "{% macro turn(m) %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}[{{ m.content }}]"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KEPT = (
    "{% for m in messages %}{% set body %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endset %}"
    "{{ body }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [MACRO, KEPT])
def test_marks_in_a_macro_or_a_kept_text_do_not_shift_the_mask(template: str) -> None:
    found = ChatTemplate(template, {}).document(Document("", messages=tuple(chat("Why?", "So.")["messages"])), "last")
    assert [found.text[one.begin : one.end] for one in found.spans if one.trained] == ["So.<|im_end|>"]
    assert ChatTemplate(CHATML, {}).marks_generation


def test_the_end_of_a_turn_behind_another_special_token_is_trained() -> None:
    messages = tuple(chat("Where?", "<box>1,2</box>")["messages"])
    found = ChatTemplate(TOOLS, {}, ("<|im_end|>", "</box>")).document(Document("", messages=messages), "assistant")
    assert [found.text[one.begin : one.end] for one in found.spans if one.trained] == ["<box>1,2</box><|im_end|>"]


def byte_level(folder: Path, *, trim: bool = False) -> Any:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE(vocab={}, merges=[]))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.post_processor = library.processors.ByteLevel(trim_offsets=trim)
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [], library.trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<|im_end|>", "<|endoftext|>"])
    )
    made.save(str(folder / "tokenizer.json"))
    return made


def test_generation_stops_where_answers_end(tmp_path: Path) -> None:
    """A base model's own end is that of a document: an exported chat model once went on behind its answers."""
    made, name = byte_level(tmp_path), str(tmp_path / "tokenizer.json")
    turn, document = (made.token_to_id(word) for word in ("<|im_end|>", "<|endoftext|>"))
    ends = {kind: Encoder(name, kind, "chatml", "auto").end_of_answers() for kind in ("messages", "completion", "text")}
    assert ends == {"messages": turn, "completion": document, "text": document} and turn != document
    assert Encoder("bytes", "messages", "chatml", "auto").end_of_answers() is None, "there it is ten tokens"
    given = {"path": lines(tmp_path / "rows.jsonl", [chat("q", "a")]), "tokenizer": name}
    config = configured(given, asked=["q"])
    generator = Generator(config, "messages")
    assert generator._text(torch.tensor([*made.encode("hi").ids, turn, *made.encode("more").ids, document])) == "hi"
    corpus, output, target = prepared(tmp_path, **given), tmp_path / "run", tmp_path / "model"
    output.mkdir()
    (output / "job.json").write_text(json.dumps({"corpus": str(corpus.folder)}))
    config = config.model_copy(update={"train": config.train.model_copy(update={"output": str(output)})})
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"eos_token_id": document, "bos_token_id": None}))
    for settings in ({}, {"eos_token_id": [document], "temperature": 0.6}, {"eos_token_id": [7, turn]}):
        (target / "generation_config.json").write_text(json.dumps(settings))
        stop_where_answers_end(config, target, Console(quiet=True))
        found = json.loads((target / "generation_config.json").read_text())
        assert found["eos_token_id"] == ([7, turn] if 7 in settings.get("eos_token_id", []) else [document, turn])
        assert found.get("temperature") == settings.get("temperature")


def test_a_token_that_transformers_puts_before_a_text_is_named_where_rows_have_none(tmp_path: Path) -> None:
    """Gemma's models are lost without theirs, and prompts and plain text were trained without a word about it."""
    made = byte_level(tmp_path)
    said = {}
    for which, before in (("none", ""), ("before", "<|endoftext|> "), ("behind", "")):
        behind = " <|endoftext|>" if which == "behind" else ""
        made.post_processor = pytest.importorskip("tokenizers").processors.TemplateProcessing(
            single=f"{before}$A{behind}", special_tokens=[("<|endoftext|>", made.token_to_id("<|endoftext|>"))]
        )
        made.save(str(tmp_path / "tokenizer.json"))
        for kind, row in (
            ("chat", chat("q", "a")),
            ("pair", {"prompt": "q", "completion": "a"}),
            ("text", {"text": "a"}),
        ):
            rows = lines(tmp_path / f"{kind}.jsonl", [row])
            table = DataTable(
                path=rows, heldout_fraction=0.0, seq_len=64, tokenizer=str(tmp_path / "tokenizer.json"),
                **({"chat_template": "chatml"} if kind == "chat" else {}),
            )  # fmt: skip
            told: list[str] = []
            prepare_corpus(table, tmp_path / "cache", told.append)
            said[which, kind] = [line.split(" before a text")[0] for line in told if " before a text" in line]
    puts = [f"data.tokenizer '{tmp_path / 'tokenizer.json'}' puts <|endoftext|>"]
    assert {case: found for case, found in said.items() if found} == {
        ("before", kind): puts for kind in ("pair", "text")
    }


@pytest.mark.parametrize("trim", [False, True])
def test_white_space_of_an_answer_is_trained_where_offsets_leave_it_out(tmp_path: Path, trim: bool) -> None:
    made = byte_level(tmp_path, trim=trim)
    answer = "if x:\n    return  😀\n"
    path = lines(tmp_path / "rows.jsonl", [chat("q", answer), chat("half \ud83d", "a")])
    corpus = prepared(tmp_path, path=path, tokenizer=str(tmp_path / "tokenizer.json"))
    end = corpus.train.starts[1]
    trained = np.asarray(corpus.train.tokens[:end])[np.asarray(corpus.train.marks[:end]) & 1 == 1]
    assert made.decode(trained.tolist(), skip_special_tokens=False) == answer + "<|im_end|>"


def test_a_long_plain_document_goes_on_beside_conversations(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "long.txt").write_text("".join(f"{i:04d} " for i in range(200)))
    sources = [{"path": lines(tmp_path / "rows.jsonl", [chat("q", "a" * 99)])}, {"path": str(notes)}]
    corpus = prepared(tmp_path, sources=sources)
    chats, text = corpus.train.source(0), corpus.train.source(1)
    assert chats is not None and text is not None
    assert IsolatedSamples(text, 64, corpus.separator).label_count(None) == len(text.tokens) - 1 == 1000
    cuts = pieces_of(corpus.train, 64).truncation
    assert (cuts.documents, cuts.truncated, cuts.lost) == (2, 1, 0)
    whole, cut = (IsolatedSamples(chats, length, corpus.separator) for length in (999, 64))
    assert whole.roles()["assistant"][1] - cuts.tokens_lost == cut.label_count(None) == cut.roles()["assistant"][1]


def configured(corpus_of: dict[str, Any], asked: list[str] | None = None, **data: Any) -> Config:
    table = {"chat_template": "chatml", "heldout_fraction": 0.0, "seq_len": 64} | corpus_of | data
    train: dict[str, Any] = {"epochs": 1, "global_batch": 1, "micro_batch": 1}
    if asked is not None:
        train |= {"generate": asked, "generate_tokens": 1, "eval_every": 1}
        table = {key: value for key, value in table.items() if key != "heldout_fraction"}
    return Config.model_validate({"model": {"config": "."}, "data": table, "train": train})


@pytest.mark.parametrize("pack", ["isolated", "none", "joined"])
@pytest.mark.parametrize("mask_borders", [False, True])
def test_what_is_told_of_the_data_is_what_steps_train_on(tmp_path: Path, pack: str, mask_borders: bool) -> None:
    rows = [chat("q", "a" * 199), chat("q" * 150, "lost"), chat("q" * 20, "short"), chat("q", "b" * 40)]
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "long.txt").write_text("".join(f"{i:04d} " for i in range(40)))
    sources = {"sources": [{"path": lines(tmp_path / "rows.jsonl", rows)}, {"path": str(notes)}]}
    borders = {"mask_borders": True} if mask_borders and pack == "joined" else {}
    config = configured(sources, pack=pack, seq_len=128, **borders)
    corpus = prepare_corpus(config.data, tmp_path / "cache", lambda _: None)
    samples = samples_for(corpus, config)
    ids = np.arange(len(samples))
    labels = samples.batch(ids)[1]
    trained = int((labels != IGNORED).sum())
    receipt = data_receipt(corpus, config)
    assert sum(one for _, one in receipt.roles.values()) == trained
    assert receipt.trained_share == trained / samples.num_tokens(ids)
    parts = [part for number in range(5) for part in parts_of(corpus, load_tokenizer("bytes"), number, config)]
    shown = "".join(part.text for part in parts if part.trained)
    assert shown.count("b") == 40 and shown.count("short<|im_end|>") == 1 and shown.count("0039 ") == 1
    kept = int((labels == ord("a")).sum())
    assert shown.count("aa") == kept // 2 and ("lost" in shown) == (pack == "joined")
    told = [line for line in receipt.lines() if "cut off by data.seq_len" in line]
    if pack == "joined":
        assert not told and not any(part.cut for part in parts) and "✂" not in terminal_text(parts).plain
        return
    cut = "".join(part.text for part in parts if part.cut)
    assert cut.count("a" * (199 - kept)) == cut.count("lost") == 1 and terminal_text(parts).plain.count("✂") == 1
    lost = 199 - kept + len("<|im_end|>lost<|im_end|>")
    assert "1 of them lost every label and are left out" in told[0]
    assert told[0].endswith(f"({lost} of {trained + lost} tokens with a loss are cut off by data.seq_len)")


def test_a_length_that_cuts_every_label_is_named(tmp_path: Path) -> None:
    given = {"path": lines(tmp_path / "rows.jsonl", [chat("q" * 150, "lost"), chat("q" * 200, "lost")])}
    for pack in ("isolated", "none"):
        config = configured(given, pack=pack)
        corpus = prepare_corpus(config.data, tmp_path / "cache", lambda _: None)
        with pytest.raises(DataError) as found:
            samples_for(corpus, config)
        assert str(found.value).startswith("data.seq_len = 64 cuts off every token with a loss"), found.value
        enough = int(str(found.value).split("set data.seq_len to ")[1].split()[0])
        one = samples_for(corpus, configured(given, pack=pack, seq_len=enough))
        assert int((one.batch(np.array([0]))[1] != IGNORED).sum()) == 1
        with pytest.raises(DataError, match="cuts off every token"):
            samples_for(corpus, configured(given, pack=pack, seq_len=enough - 1))


def test_heldout_documents_of_their_own_become_samples(tmp_path: Path) -> None:
    chats = lines(tmp_path / "rows.jsonl", [chat("q", f"a{i}") for i in range(3)])
    held = lines(tmp_path / "held.jsonl", [chat("q", f"b{i}") for i in range(2)])
    document = {
        "model": {"factory": "a:b"},
        "data": {"path": chats, "heldout_path": held, "chat_template": "chatml", "seq_len": 64},
        "train": {"steps": 1, "output": str(tmp_path)},
    }
    config = Config.model_validate(document)
    corpus = prepare_corpus(config.data, tmp_path / "cache", lambda _: None)
    assert (len(samples_for(corpus, config)), len(samples_for(corpus, config, heldout=True))) == (3, 2)


def test_a_source_answers_for_its_own_rows_only(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [{"messages": []}]
    many = lines(tmp_path / "many.jsonl", [chat("q", f"a{i}") for i in range(92)] + 8 * bad)
    few = lines(tmp_path / "few.jsonl", [chat("r", f"a{i}") for i in range(9)])
    corpus = prepared(tmp_path, sources=[{"path": many}, {"path": few}], bad_rows="skip")
    assert corpus.left_out == 8
    few = lines(tmp_path / "few.jsonl", [chat("r", f"a{i}") for i in range(5)] + 2 * bad)
    with pytest.raises(DataError, match="2 of 7 rows") as told:
        prepared(tmp_path, sources=[{"path": many}, {"path": few}], bad_rows="skip")
    assert "many.jsonl" not in str(told.value)


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_labels_masked_at_borders_are_not_counted(tmp_path: Path, kind: str) -> None:
    rows = [{"text": f"abc{i}"} if kind == "text" else chat("q", f"a{i}") for i in range(7)]
    template = None if kind == "text" else "chatml"
    path = lines(tmp_path / "rows.jsonl", rows)
    corpus = prepared(tmp_path, path=path, loss_on="all", chat_template=template)
    samples = PackedSamples(corpus.train, 16, corpus.separator, mask_borders=True)
    for count in (0, 1, 2, len(samples)):
        labels = samples.batch(np.arange(count))[1]
        assert samples.label_count(count) == int((labels != IGNORED).sum())
    borders = len(corpus.train.starts) - 2
    assert samples.label_count(None) == len(corpus.train.tokens) - 1 - borders
    assert ROLES[0] == "text"


@pytest.mark.parametrize("encodes", [True, False])
def test_arguments_that_are_json_text_are_not_encoded_twice(encodes: bool) -> None:
    arguments = '{"city": "Zürich"}'
    messages = chat("Where?", "")["messages"]
    messages[1]["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]
    template = TOOLS if encodes else TOOLS.replace("m.tool_calls | tojson", "m.tool_calls[0].function.arguments")
    found = ChatTemplate(template, {}, ("<|im_end|>",)).document(Document("", messages=tuple(messages)), "assistant")
    trained = [found.text[one.begin : one.end] for one in found.spans if one.trained]
    call = f'[{{"function": {{"name": "f", "arguments": {arguments}}}}}]' if encodes else arguments
    assert trained == [f"{call}<|im_end|>"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("heldout", [False, True])
def test_the_first_packed_samples_are_not_the_longest_documents(tmp_path: Path, heldout: bool) -> None:
    rows = [{"text": f"{i:03d}".ljust(60 if i % 7 == 0 else 5 + i % 11)} for i in range(400)]
    path = lines(tmp_path / "rows.jsonl", rows)
    given = {"path": path, "pack": "isolated", "seq_len": 64, "shuffle": heldout, "heldout_fraction": 0.5 * heldout}
    config = Config.model_validate(
        {"model": {"factory": "a:b"}, "data": given, "train": {"steps": 1, "output": str(tmp_path)}}
    )
    corpus = prepare_corpus(config.data, tmp_path / "cache", lambda _: None)
    samples = samples_for(corpus, config, heldout=heldout)
    assert isinstance(samples, IsolatedSamples)

    def mean(count: int) -> float:
        return samples.label_count(count) / samples.documents(np.arange(count))

    assert 0.6 < mean(len(samples) // 5) / mean(len(samples)) < 1.6
    inputs, labels = samples.batch(np.arange(len(samples)))
    assert all(samples.is_right(i, inputs["input_ids"][i], inputs["position_ids"][i], labels[i]) for i in range(9))
    tokens = corpus.heldout if heldout else corpus.train
    assert tokens is not None and int((labels != IGNORED).sum()) == len(tokens.tokens) - len(tokens.starts) + 1


def test_isolation_is_unknown_where_an_open_border_would_not_show() -> None:
    assert Isolation(change=0.0, open_change=0.0, documents=4).ok is None
    assert "unknown" in isolation_line(Isolation(change=0.0, open_change=0.0, documents=4)).found
    assert Isolation(change=0.0, open_change=1e-4, documents=4).ok is True
    assert Isolation(change=1e-4, open_change=0.0, documents=4).ok is False
    assert 'set data.pack = "none"' in isolation_line(Isolation(change=1e-4, open_change=0.0, documents=4)).found


def test_documents_of_one_sample_are_compared_wherever_there_are_some(tmp_path: Path) -> None:
    """A model that sees over borders once went unnoticed where the first step's samples held a long document each."""
    rows = [chat("q", "a" * (90 + i)) for i in range(20)] + [chat("q", f"s{i}") for i in range(4)]
    corpus = prepared(tmp_path, path=lines(tmp_path / "rows.jsonl", rows), seq_len=128)
    samples = IsolatedSamples(corpus.train, 128, corpus.separator)
    everything = np.arange(-1, len(samples))
    shared = [number for number in range(len(samples)) if samples.documents(np.array([number])) > 1]
    assert samples.is_shared(everything).nonzero()[0].tolist() == [number + 1 for number in shared]
    alone = np.array([number for number in range(len(samples)) if number not in shared][:2])
    for place in (0, 1):
        found = shared_rows(samples, alone, everything, 2, place)
        assert len(found) == 2 and set(found.tolist()) <= set(shared)
    own = np.array([alone[0], shared[0]])
    assert shared_rows(samples, own, everything, 2, 0) is own and shared_rows(samples, alone, alone, 2, 0) is alone
    joined = JoinedSources([samples, samples], ["one", "two"])
    twice = [*shared, *(number + len(samples) for number in shared)]
    assert (joined.is_shared(np.arange(-1, len(joined))).nonzero()[0] - 1).tolist() == twice


def test_bytes_have_no_token_for_a_template_that_ends_turns_with_one(tmp_path: Path) -> None:
    (tmp_path / "ends.jinja").write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    path = lines(tmp_path / "rows.jsonl", [chat("q", "a")])
    with pytest.raises(DataError, match="no turn would end"):
        prepared(tmp_path, path=path, chat_template=str(tmp_path / "ends.jinja"))


def test_a_models_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(DataError, match="has no tokenizer file; give 'bytes'"):
        load_tokenizer(str(tmp_path))


def test_columns_are_found_in_any_case() -> None:
    assert columns_of(["Question", "Answer"], None, {}, "rows.csv").names == {
        "prompt": "Question",
        "completion": "Answer",
    }


def test_prompts_and_completions_that_are_messages_pass_through_the_template(tmp_path: Path) -> None:
    """Its date once was that of each preparation, unsaid; the prompts of ``train.generate`` were not rendered."""
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    rows = [{"prompt": [{"role": "user", "content": "q"}], "completion": "a"} for _ in range(3)]
    given = {"path": lines(tmp_path / "rows.jsonl", rows), "chat_template": str(template), "date": "2024-02-03"}
    corpus = prepared(tmp_path, **given)
    assert corpus.date == "2024-02-03" and text_of(corpus).count("03 Feb 2024<|im_start|>user\nq<|im_end|>") == 3
    config = configured(given, asked=["q"], seq_len=128)
    assert bytes(Generator(config, corpus.kind, corpus.date).ids[0]).startswith(
        b"03 Feb 2024<|im_start|>user\nq<|im_end"
    )


def test_plain_prompts_beside_plain_text_are_no_conversations(tmp_path: Path) -> None:
    """The prompts of ``train.generate`` were once rendered by a template that no row had passed through."""
    (tmp_path / "note.txt").write_text("one two three")
    pairs = lines(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    sources = {"sources": [{"path": pairs}, {"path": str(tmp_path / "note.txt")}], "chat_template": None}
    corpus = prepared(tmp_path, **sources)
    config = configured(sources, asked=["1+1="])
    assert bytes(Generator(config, corpus.kind).ids[0]) == b"1+1="
