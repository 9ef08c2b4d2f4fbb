"""Conversations to tokens: rendered by the tokenizer's own chat template, with the role of each token."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from shardwise.errors import DataError
from shardwise.train.data.documents import Document, Message, RowProblem

LossOn = Literal["assistant", "completion", "last", "all"]
ROLES = ("text", "system", "user", "assistant", "tool", "template")
"""Roles of tokens. A mark is ``2 × index + whether it has a loss``."""
_ROLE_OF = {"developer": "system", "function": "tool", "ipython": "tool"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_ASKS_FOR_TODAY = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML (OpenAI's format, 2023), with the assistant's turns marked."""


@dataclass(frozen=True)
class Span:
    """Characters ``begin`` to ``end`` of a rendered text, written by a role, with or without a loss."""

    begin: int
    end: int
    role: str
    trained: bool


@dataclass(frozen=True)
class Rendered:
    """A document as text, and who wrote which part; other characters are the template's.

    With ``full`` every token has a loss, also the template's.
    """

    text: str
    spans: tuple[Span, ...]
    full: bool = False


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and what it may refer to (``bos_token`` and other special tokens).

    ``ends`` are the tokens that may end a turn: white space after the last of them is not the assistant's. ``date`` is
    the day that the template takes for today, as ``2026-11-23``; ``None`` is the day on which it is rendered.
    """

    template: str
    special: dict[str, str]
    ends: tuple[str, ...] = ()
    date: str | None = None

    @property
    def writes_date(self) -> bool:
        """True if the template may write today's date, as that of Llama 3.1 does."""
        return "strftime_now" in self.template

    @property
    def computes_date(self) -> bool:
        """True if the template may write a date whose format is none of its literals, and which ``date`` cannot fix."""
        return "strftime_now" in _ASKS_FOR_TODAY.sub("", _TODAY.sub("", self.template))

    @cached_property
    def _dated(self) -> str:
        """The template with its dates written out: transformers gives templates no function of one's own."""
        if self.date is None:
            return self.template
        day = datetime.fromisoformat(self.date)
        return _TODAY.sub(lambda call: json.dumps(day.strftime(call[2])), self.template)

    @cached_property
    def marks_generation(self) -> bool:
        """True if the template marks what the assistant generates, where transformers finds the marks."""
        return _GENERATION.search(self.template) is not None and not _marks_captured(self.template)

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """Render messages; ``prompt`` adds the words that ask for the assistant's next turn.

        Raises:
            RowProblem: the template refuses these messages.
        """
        return self._rendered(messages, tools, prompt)[0]

    def _rendered(self, messages: Sequence[Message], tools: Any, prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = self.marks_generation and not prompt
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._dated,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self.special,
            )
        except TemplateError as error:
            found_text = " ".join(str(error).split()) or type(error).__name__
            raise RowProblem(f"the chat template refuses it: {found_text:.200}") from None
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise RowProblem(f"the chat template fails: {type(error).__name__}: {error!s:.200}") from None
        return texts[0], list(spans[0]) if marked else []

    def document(self, document: Document, loss_on: LossOn) -> Rendered:
        """Render a conversation, and find the parts with a loss.

        A template that marks generation says itself what the assistant wrote. Of another one, an assistant's turn
        begins where the rendered messages before it end, with the words that ask for it, as at inference; so each of
        these texts has to begin the full one.

        Raises:
            RowProblem: the template refuses the messages, or renders a turn otherwise once others follow it.
        """
        messages, tools = document.messages, document.tools
        text, marked = self._rendered(messages, tools, False)
        if (read := _read_arguments(messages, text)) is not None:
            messages = read
            text, marked = self._rendered(messages, tools, False)
        turns = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
        chosen = _chosen(turns, loss_on, document)
        rest: list[int] = []
        if self.marks_generation:
            if len(marked) != len(turns) and chosen != set(turns):
                raise RowProblem(
                    f"the chat template marks {len(marked)} parts as generated, and the assistant has {len(turns)} "
                    'turns; repair its {% generation %} blocks, or set data.loss_on = "assistant"'
                )
            every = chosen == set(turns)
            spans = [Span(*part, "assistant", every or turns[i] in chosen) for i, part in enumerate(marked)]
        elif loss_on == "all":
            spans, rest = [], turns
        else:
            spans = [self._turn(messages, tools, text, turn) for turn in turns if turn in chosen]
            rest = [turn for turn in turns if turn not in chosen]
        others = _others(messages, text, [(one.begin, one.end) for one in spans], rest)
        return Rendered(text, (*spans, *others), full=loss_on == "all")

    def _turn(self, messages: Sequence[Message], tools: Any, text: str, turn: int) -> Span:
        """Find one of the assistant's turns by what is rendered up to it."""
        asked = self.render(messages[:turn], tools, prompt=True)
        ended = text if turn == len(messages) - 1 else self.render(messages[: turn + 1], tools)
        shared = next((i for i, pair in enumerate(zip(text, ended, strict=False)) if pair[0] != pair[1]), len(ended))
        end = self._end_of_turn(ended[:shared]) if shared < len(ended) else shared
        if not text.startswith(asked) or end is None or end < len(asked) or not self._says_nothing(ended[end:]):
            part = "the prompt of" if not text.startswith(asked) else "all up to"
            raise RowProblem(
                f"the chat template renders {part} message {turn + 1} otherwise once later messages follow it, so the "
                'assistant\'s part is not known; use a template with {% generation %}, or data.loss_on = "last"'
            )
        return Span(len(asked), max(self._without_tail(text[:end]), len(asked)), "assistant", True)

    def _end_of_turn(self, text: str) -> int | None:
        """Return where the last token that ends a turn does, in a text that goes on otherwise from then on."""
        return max((at + len(one) for one in self.ends if (at := text.rfind(one)) >= 0), default=None)

    def _says_nothing(self, text: str) -> bool:
        """Return whether there are only tokens that end something, such as one for the end of the conversation."""
        for one in self.ends:
            text = text.replace(one, "")
        return not text.strip()

    def _without_tail(self, text: str) -> int:
        """Return the length up to the token at which generation ends: no white space, and no second end after that.

        Ends without white space between them belong together, such as that of a tool call and that of the turn.
        """
        end, kept = len(text), text.rstrip()
        while last := next((one for one in self.ends if kept.endswith(one)), None):
            end, before = len(kept), kept.removesuffix(last)
            kept = before.rstrip()
            if kept == before:
                break
        return end


def _read_arguments(messages: Sequence[Message], text: str) -> tuple[Message, ...] | None:
    """Read the arguments of tool calls that are JSON text, as OpenAI's format has it, if they were encoded twice.

    A template that encodes them itself wants objects. Return ``None`` where none were encoded twice.
    """
    twice = False

    def read(value: Any) -> Any:
        nonlocal twice
        if isinstance(value, list):
            return [read(one) for one in value]
        if not isinstance(value, dict):
            return value
        found = {key: read(one) for key, one in value.items()}
        given = found.get("arguments")
        if isinstance(given, str) and '"' in given:
            with suppress(ValueError):
                found["arguments"] = json.loads(given)
                twice = twice or json.dumps(given, ensure_ascii=False)[1:-1] in text
        return found

    made = tuple({**one, "tool_calls": read(one["tool_calls"])} if one.get("tool_calls") else one for one in messages)
    return made if twice else None


def _others(
    messages: Sequence[Message], text: str, taken: Sequence[tuple[int, int]], turns: Sequence[int]
) -> list[Span]:
    """Find the contents of the other messages, in order, for the table of roles.

    ``turns`` are those of the assistant that are not ``taken``. A content that the template changed is not found, and
    counts as the template's.
    """
    found, at = [], 0
    for number, one in enumerate(messages):
        if one["role"] == "assistant" and number not in turns:
            at = next((end for begin, end in taken if begin >= at), at)
            continue
        content = one["content"].strip()
        begin = text.find(content, at) if content else -1
        if begin < 0 or any(begin < stop and begin + len(content) > start for start, stop in taken):
            continue
        at = begin + len(content)
        found.append(Span(begin, at, _ROLE_OF.get(str(one["role"]), str(one["role"])), trained=False))
    return found


def _chosen(turns: Sequence[int], loss_on: LossOn, document: Document) -> set[int]:
    """Return the assistant's turns that have a loss; a message with ``weight`` 0 has none (OpenAI's format)."""
    chosen = turns[-1:] if loss_on == "last" else turns
    if loss_on == "completion":
        chosen = [turn for turn in turns if turn >= document.trained_from]
    return {turn for turn in chosen if document.messages[turn].get("weight", 1) != 0}


def prompt_and_completion(document: Document, loss_on: LossOn) -> Rendered:
    """Join a prompt and a completion that are plain text."""
    prompt, completion = document.text or "", document.completion or ""
    text = prompt + completion
    spans = (Span(0, len(prompt), "user", trained=False), Span(len(prompt), len(text), "assistant", trained=True))
    return Rendered(text, spans, full=loss_on == "all")


def marks(rendered: Rendered, offsets: Sequence[tuple[int, int]]) -> bytearray:
    """Return the mark of each token, given the characters that it stands for.

    A token belongs to the part in which it begins: one that straddles the border before the assistant's part is part
    of the prompt, as it would be at inference.
    """
    found = bytearray([2 * ROLES.index("template")]) * len(offsets)
    spans = sorted(rendered.spans, key=lambda one: one.begin)
    codes = [2 * ROLES.index(one.role) + one.trained for one in spans]
    at = 0
    for index, (begin, end) in enumerate(offsets):
        while at < len(spans) and spans[at].end <= begin:
            at += 1
        if at < len(spans) and spans[at].begin <= begin < spans[at].end and end > begin:
            found[index] = codes[at]
    return bytearray(code | 1 for code in found) if rendered.full else found


def _marks_captured(template: str) -> bool:
    """Return whether a template marks generation within a macro, or text that it keeps for later.

    Transformers counts such marks from where the text was made, not from where it is printed.
    """
    from jinja2 import Environment

    inside, words = 0, list[str]()
    for _, kind, value in Environment().lex(template):
        if kind == "block_begin":
            words = []
        elif kind in ("name", "operator"):
            words.append(value)
        elif kind == "block_end" and words:
            if words[0] in ("macro", "call", "filter") or (words[0] == "set" and "=" not in words):
                inside += 1
            elif words[0] in ("endmacro", "endcall", "endfilter", "endset"):
                inside -= 1
            elif words[0] == "generation" and inside:
                return True
    return False


def check_template(template: str, where: str) -> None:
    """Compile a template.

    Raises:
        DataError: it is not Jinja.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=template)
    except TemplateSyntaxError as error:
        raise DataError(f"{where} is not a Jinja template: {error.message} (line {error.lineno}); repair it") from None
