"""Which tokens of a conversation have a loss: five published template families against labels marked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import DataError
from shardwise.train.config_data import DataTable
from shardwise.train.data.chat import CHATML, ROLES, ChatTemplate, marks, prompt_and_completion
from shardwise.train.data.corpus import prepare_corpus
from shardwise.train.data.documents import Document, RowProblem, columns_of, conversation, document
from shardwise.train.data.samples import IsolatedSamples

# Templates in their published form: written anew, the text that they render is the format's.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first and system is defined %}{{ system + '\n\n' }}{% endif %}"
    "{{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{{ bos_token }}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
CHATML_PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {
    "chatml": (CHATML_PLAIN, ("<|im_end|>",)),
    "llama-3": (LLAMA3, ("<|eot_id|>",)),
    "mistral": (MISTRAL, ("</s>",)),
    "gemma": (GEMMA, ("<end_of_turn>",)),
    "phi": (PHI, ("<|end|>", "</s>")),
}
SYSTEM = {"role": "system", "content": "Be short."}
TURNS = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
]
# what has a loss, marked by hand: «»
BY_HAND = {
    "chatml": "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    "«One.<|im_end|>»\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n«Two.<|im_end|>»\n",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nOne?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«One.<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "«Two.<|eot_id|>»",
    "mistral": "<s>[INST] Be short.\n\nOne? [/INST]« One.</s>»[INST] One? [/INST]« Two.</s>»",
    "gemma": "<s><start_of_turn>user\nOne?<end_of_turn>\n<start_of_turn>model\n«One.<end_of_turn>»\n"
    "<start_of_turn>user\nOne?<end_of_turn>\n<start_of_turn>model\n«Two.<end_of_turn>»\n",
}


def family(name: str) -> ChatTemplate:
    template, ends = FAMILIES[name]
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, ends)


def marked(template: ChatTemplate, messages: list[dict[str, Any]], loss_on: str = "assistant", **keys: Any) -> str:
    """The rendered text with « and » around what has a loss, one character a token."""
    rendered = template.document(Document("row", messages=conversation(messages), **keys), loss_on)  # type: ignore[arg-type]
    found = marks(rendered, [(i, i + 1) for i in range(len(rendered.text))])
    text, inside = "", False
    for letter, mark in zip(rendered.text, found, strict=True):
        if bool(mark & 1) != inside:
            text, inside = text + ("«" if mark & 1 else "»"), not inside
        text += letter
    return text + "»" * inside


class TestMasks:
    @pytest.mark.parametrize("name", list(BY_HAND))
    def test_families_have_the_loss_that_was_marked_by_hand(self, name: str) -> None:
        messages = TURNS if name == "gemma" else [SYSTEM, *TURNS]
        assert marked(family(name), messages) == BY_HAND[name]

    def test_the_end_of_the_conversation_is_nobodys(self) -> None:
        only = ChatTemplate(PHI.replace("<|end|>", "."), {"eos_token": "</s>"}, ("</s>",))
        with pytest.raises(RowProblem, match="renders all up to message 2 otherwise once later messages follow"):
            marked(only, TURNS)  # nothing that ends a turn: its end cannot be told from the conversation's
        assert marked(only, TURNS, "last").endswith("<|assistant|>\n«Two..\n</s>»")

    @pytest.mark.parametrize("loss_on", ["assistant", "completion", "last", "all"])
    def test_marked_templates_agree_with_prefixes(self, loss_on: str) -> None:
        ours = ChatTemplate(CHATML, {}, ("<|im_end|>",))
        assert ours.marks_generation and not family("chatml").marks_generation
        found = [marked(one, [SYSTEM, *TURNS], loss_on, trained_from=3) for one in (ours, family("chatml"))]
        assert found[0] == found[1]
        assert found[0].count("«") == {"assistant": 2, "completion": 1, "last": 1, "all": 1}[loss_on]

    def test_tool_calls_pass_through_and_their_results_have_no_loss(self) -> None:
        call = {"function": {"name": "add", "arguments": {"a": 1}}}
        messages = [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2."},
        ]
        text = marked(family("chatml"), messages)
        assert text == (
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n«<tool_call>"
            '{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>»\n'
            "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n«2.<|im_end|>»\n"
        )

    def test_a_template_that_changes_earlier_turns_is_refused_by_name(self) -> None:
        thinking = (  # as templates do that drop the thoughts of all turns but the last
            "{% for m in messages %}{{ m.role }}: {% if loop.last %}{{ m.content }}{% else %}"
            "{{ m.content.split('</think>')[-1] }}{% endif %};{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        messages = [TURNS[0], {"role": "assistant", "content": "<think>hm</think>One."}, *TURNS[2:]]
        with pytest.raises(RowProblem, match=r'message 2 otherwise once later .*data.loss_on = "last"'):
            marked(ChatTemplate(thinking, {}), messages)
        assert marked(ChatTemplate(thinking, {}), messages, "last").endswith("assistant: «Two.;»")

    def test_what_a_template_refuses_is_said(self) -> None:
        with pytest.raises(RowProblem, match="the chat template refuses it: System role not supported"):
            marked(family("gemma"), [SYSTEM, *TURNS])

    def test_a_message_of_no_weight_has_no_loss(self) -> None:
        messages = [*TURNS[:1], {**TURNS[1], "weight": 0}, *TURNS[2:]]
        for template in (ChatTemplate(CHATML, {}, ("<|im_end|>",)), family("chatml")):
            assert "One.<|im_end|>" in marked(template, messages) and "«One." not in marked(template, messages)
            assert "«Two.<|im_end|>»" in marked(template, messages)
        with pytest.raises(RowProblem, match=r"the weight of message 2 is 0\.5; it is 0"):
            conversation([TURNS[0], {**TURNS[1], "weight": 0.5}])

    def test_a_token_that_straddles_the_border_belongs_to_the_prompt(self) -> None:
        rendered = prompt_and_completion(Document("row", text="ab", completion="cd"), "completion")
        assert [mark & 1 for mark in marks(rendered, [(0, 1), (1, 3), (3, 4)])] == [0, 0, 1]
        roles = [ROLES[mark // 2] for mark in marks(rendered, [(0, 1), (1, 3), (3, 4)])]
        assert roles == ["user", "user", "assistant"]


class TestRows:
    def test_kinds_are_found_by_their_columns(self) -> None:
        for known, kind in (
            (["id", "messages"], "messages"),
            (["conversations"], "messages"),
            (["question", "answer"], "completion"),
            (["instruction", "input", "output"], "instruction"),
            (["text", "prompt"], "text"),
        ):
            assert columns_of(known, None, {}, "here").kind == kind
        assert columns_of(["chat"], None, {"messages": "chat"}, "here").names == {"messages": "chat"}
        assert columns_of(["messages", "text"], "text", {}, "here").kind == "text"

    def test_sharegpt_is_messages(self) -> None:
        chat = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": None}]
        assert conversation(chat) == ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})

    @pytest.mark.parametrize(
        ("messages", "said"),
        [
            ([], "the list of messages is empty"),
            ("hello", "the list of messages holds str"),
            (["hello"], "message 1 is str, not an object"),
            ([{"content": "a"}], "message 1 has no 'role'"),
            ([{"role": "robot", "content": "a"}], "message 1 has the role 'robot'; roles are system,"),
            ([TURNS[0], {"role": "assistant", "content": " "}], "message 2, the assistant's, is empty"),
            ([TURNS[0], TURNS[2]], "messages 1 and 2 are both the user's"),
            ([TURNS[1]], "message 1 is the assistant's, with no user's before it"),
            ([*TURNS[:2], SYSTEM], "message 3 is the system's after the assistant's; it comes first"),
            ([{"role": "user", "content": 7}], "the content of message 1 is int, not text"),
            ([{"role": "user", "content": [{"type": "image"}]}], "message 1 has parts that are not text"),
        ],
    )
    def test_what_is_wrong_with_a_conversation(self, messages: Any, said: str) -> None:
        with pytest.raises(RowProblem) as caught:
            conversation(messages)
        assert said in str(caught.value)

    def test_instructions_and_prompts(self) -> None:
        columns = columns_of(["instruction", "input", "output"], None, {}, "here")
        row = document({"instruction": "Add.", "input": "1 1", "output": "2"}, columns, "row 1")
        assert row is not None and [one["content"] for one in row.messages] == ["Add.\n\n1 1", "2"]
        columns = columns_of(["prompt", "completion"], None, {}, "here")
        row = document({"prompt": "1+1=", "completion": "2"}, columns, "row 1")
        assert row is not None and (row.text, row.completion) == ("1+1=", "2")
        pair = {"prompt": TURNS[:3], "completion": TURNS[3:]}
        row = document(pair, columns, "row 1")
        assert row is not None and row.trained_from == 3 and len(row.messages) == 4


class TestCorpus:
    def prepare(self, tmp_path: Path, rows: list[Any], lines: list[str] | None = None, **keys: Any) -> Any:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = DataTable(path=str(path), seq_len=64, heldout_fraction=0.0, **({"chat_template": "chatml"} | keys))
        return prepare_corpus(table, tmp_path / "cache", (lines if lines is not None else []).append)

    def test_roles_are_counted_and_bytes_are_marked(self, tmp_path: Path) -> None:
        lines: list[str] = []
        corpus = self.prepare(tmp_path, [{"messages": [SYSTEM, *TURNS]}] * 2, lines)
        text = bytes(corpus.train.tokens[: corpus.train.starts[1]].astype("uint8")).decode()
        found = "".join(letter for letter, mark in zip(text, corpus.train.marks, strict=False) if mark & 1)
        assert found == "One.<|im_end|>Two.<|im_end|>"
        roles = IsolatedSamples(corpus.train, 512, corpus.separator).roles()
        assert roles["assistant"] == (56, 56) and roles["user"] == (16, 0) and roles["system"] == (18, 0)
        assert "rows are conversations in column 'messages'" in lines

    def test_prompts_end_with_the_separator_and_learn_it(self, tmp_path: Path) -> None:
        corpus = self.prepare(tmp_path, [{"prompt": "é=", "completion": "2"}])
        assert corpus.train.tokens.tolist() == [0xC3, 0xA9, ord("="), ord("2"), 256]
        assert [mark & 1 for mark in corpus.train.marks] == [0, 0, 0, 1, 1]

    def test_all_bad_rows_are_named_at_once(self, tmp_path: Path) -> None:
        rows: list[Any] = [{"messages": TURNS}] * 30
        rows[3], rows[7] = {"messages": []}, {"message": TURNS}
        with pytest.raises(DataError) as caught:
            self.prepare(tmp_path, rows)
        where = f"data.path '{tmp_path / 'rows.jsonl'}': file 'rows.jsonl', line"
        assert caught.value.problems[0].startswith(f"{where} 4 the list of messages is empty")
        assert caught.value.problems[1].startswith(f"{where} 8 has no 'messages', which the first row has")
        assert "leave them out with data.bad_rows" in caught.value.problems[2]
        lines: list[str] = []
        corpus = self.prepare(tmp_path, rows, lines, bad_rows="skip")
        assert corpus.left_out == 2 and len(corpus.train.starts) == 29
        assert "2 rows left out: 2 malformed, 0 without a label" in lines
        with pytest.raises(DataError) as caught:
            self.prepare(tmp_path, [{"messages": []}] * 400)
        assert len(caught.value.problems) == 21

    def test_more_than_a_tenth_left_out_is_refused(self, tmp_path: Path) -> None:
        silent = {"messages": TURNS[:1]}
        corpus = self.prepare(tmp_path, [{"messages": TURNS}] * 9 + [silent])
        assert corpus.left_out == 1 and "has no label" in corpus.left_out_first[0]
        with pytest.raises(DataError, match="2 of 10 rows, over a tenth, cannot be trained on"):
            self.prepare(tmp_path, [{"messages": TURNS}] * 8 + [silent] * 2)

    def test_no_template_is_one_message(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="has no chat template, and the rows are conversations; set"):
            self.prepare(tmp_path, [{"messages": TURNS}], chat_template=None)
        (tmp_path / "bad.jinja").write_text("{% for %}")
        with pytest.raises(DataError, match=r"bad\.jinja' is not a Jinja template"):
            self.prepare(tmp_path, [{"messages": TURNS}], chat_template=str(tmp_path / "bad.jinja"))

    def test_several_processes_give_the_same_corpus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from shardwise.train.data import encode

        rows = [
            {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}]}
            for i in range(999)
        ]
        one = self.prepare(tmp_path, rows)
        monkeypatch.setattr(encode, "_WORTH_WORKERS", 1)
        two = self.prepare(tmp_path, rows, loss_on="assistant")
        assert one.folder != two.folder and one.train.content == two.train.content

    def test_special_tokens_in_a_file_of_their_own_and_an_end_of_many_tokens(self, tmp_path: Path) -> None:
        import tokenizers

        built = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
        built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            special_tokens=["<end>"], show_progress=False, initial_alphabet=alphabet
        )
        built.train_from_iterator(["a"], trainer)
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        built.save(str(folder / "tokenizer.json"))
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
        lines: list[str] = []
        corpus = self.prepare(tmp_path, [{"messages": TURNS}], lines, tokenizer=str(folder))
        assert corpus.separator == built.token_to_id("<end>")
        assert any("<|im_end|>, which ends a turn of this chat template, is 10 tokens" in line for line in lines)
        template = tmp_path / "own.jinja"
        template.write_text(CHATML.replace("'<|im_end|>'", "eos_token"))
        lines.clear()
        corpus = self.prepare(
            tmp_path, [{"messages": TURNS}], lines, tokenizer=str(folder), chat_template=str(template)
        )
        assert corpus.train.tokens[corpus.train.marks & 1 == 1][-1] == corpus.separator
        assert not any("im_end" in line for line in lines)

    def test_a_date_is_one_day_for_all_rows_and_can_be_fixed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from datetime import date

        from shardwise.train.config import Config
        from shardwise.train.data import corpus as module
        from shardwise.train.evaluator import Evaluator
        from shardwise.train.tasks.registry import order_facts

        class Today(date):
            day_of_test = "2026-11-23"

            @classmethod
            def today(cls) -> Any:
                return date.fromisoformat(cls.day_of_test)

        monkeypatch.setattr(module, "date", Today)
        template = tmp_path / "dated.jinja"
        template.write_text("{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}\n" + CHATML)
        rows, lines = [{"messages": TURNS}, {"messages": TURNS[:2]}], list[str]()
        (tmp_path / "dated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def text(cache: str, **table: Any) -> tuple[str, Any]:
            given = {"seq_len": 64, "heldout_fraction": 0.0, "chat_template": str(template)}
            asked = DataTable(path=str(tmp_path / "dated.jsonl"), **{**given, **table})
            found = prepare_corpus(asked, tmp_path / cache, lines.append)
            return bytes(found.train.tokens.astype("uint8")).decode(), found

        first, here = text("a")
        assert first.count("23 Nov 2026") == 2
        assert any("which is 2026-11-23 in all" in x and 'data.date = "2026-11-23" prepares' in x for x in lines)
        Today.day_of_test = "2027-01-01"
        again, kept = text("a")  # prepared before: a run that goes on has the samples that it had
        assert again == first and kept.train.content == here.train.content
        moved, other = text("b")  # elsewhere, from nothing
        assert moved.count("01 Jan 2027") == 2 and other.train.content != here.train.content
        days = [order_facts(one, None)["data.date"] for one in (here, other)]  # type: ignore[arg-type]
        assert days == ["2026-11-23", "2027-01-01"]  # which a refused resume names
        data = {"path": str(tmp_path / "dated.jsonl"), "seq_len": 96, "chat_template": str(template)}
        asked = {
            "data": data,
            "model": {"factory": "a:b"},
            "train": {"generate": ["1?"], "generate_tokens": 2, "steps": 1},
        }
        asked["train"] |= {"global_batch": 1, "output": "o", "eval_every": 1}
        writer = Evaluator(Config.model_validate(asked), other, None, None).generator  # type: ignore[arg-type]
        assert bytes(writer.ids[0]).decode().startswith("01 Jan 2027"), "prompts have the day of the training data"
        fixed, _ = text("b", date="2026-11-23")
        assert fixed == first
        with pytest.raises(DataError, match=r"data\.date '2026-11-23' does nothing: the chat template writes no date"):
            self.prepare(tmp_path, rows, date="2026-11-23")
        for computed in (
            "{% set f = '%d %b' %}{{ strftime_now(f) }}",
            "{% set now = strftime_now %}{{ now('%d %b') }}",
        ):
            template.write_text(f"{{% if strftime_now is defined %}}{computed}{{% endif %}}\n{CHATML}")
            with pytest.raises(DataError, match=r"data\.date '2026-11-23' does nothing: .* a format that is no text"):
                text("c", date="2026-11-23")
            text("c")
            assert "each conversation has the date of its preparation" in "".join(lines)
            lines.clear()
        with pytest.raises(ValueError, match=r"'date' is '23\.11\.2026', and no day of the calendar"):
            DataTable(path="a", seq_len=8, date="23.11.2026")

    def test_csv_parquet_and_saved_rows_are_the_same(self, tmp_path: Path) -> None:
        import datasets

        rows = {"prompt": ["a,b\n", "c"], "completion": ["1", "2"]}
        data = datasets.Dataset.from_dict(rows)
        data.save_to_disk(str(tmp_path / "saved"))
        data.to_parquet(str(tmp_path / "rows.parquet"))
        data.to_csv(str(tmp_path / "rows.csv"), index=False)
        data.to_json(str(tmp_path / "rows.jsonl"))
        found = set()
        for name in ("saved", "rows.parquet", "rows.csv", "rows.jsonl"):
            table = DataTable(path=str(tmp_path / name), seq_len=64, heldout_fraction=0.0)
            found.add(prepare_corpus(table, tmp_path / "cache", lambda line: None).train.content)
        assert len(found) == 1
