"""Rows of a data set to documents: text, a conversation, or a prompt with its completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.errors import DataError, did_you_mean
from shardwise.units import listed

Kind = Literal["text", "messages", "completion", "instruction"]
Message = dict[str, Any]

NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "question"),
    "completion": ("completion", "response", "answer"),
    "instruction": ("instruction",),
    "input": ("input", "context"),
    "output": ("output", "response"),
    "tools": ("tools",),
}
"""Names of columns in published data sets, the usual one first. ``data.columns`` gives another."""
NEEDS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
}
_OPTIONAL: dict[Kind, tuple[str, ...]] = {"messages": ("tools",), "instruction": ("input",), "completion": ("tools",)}
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "observation": "tool"}
"""ShareGPT's names of roles; any other is taken as it is."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


class RowProblem(Exception):
    """A row that cannot be trained on: the rule and the fix, without its place."""


@dataclass(frozen=True)
class Document:
    """One training example, either ``text`` or ``messages``.

    ``trained_from`` is the index of the first message whose loss may count; ``completion`` the text that follows
    ``text`` where a row has a prompt and a completion as plain strings. ``at`` is its place, for messages.
    """

    at: str
    text: str | None = None
    completion: str | None = None
    messages: tuple[Message, ...] = ()
    tools: Any = None
    trained_from: int = 0


@dataclass(frozen=True)
class Columns:
    """What the rows of a source hold: its kind, and the column of each part."""

    kind: Kind
    names: Mapping[str, str]

    @property
    def optional(self) -> dict[str, tuple[str, ...]]:
        """Names of parts that the first row has not, and a later one may."""
        return {part: NAMES[part] for part in _OPTIONAL.get(self.kind, ()) if part not in self.names}

    def __str__(self) -> str:
        """Return a line for people."""
        said = {"text": "text", "messages": "conversations", "completion": "prompts with completions"}
        columns = ", ".join(f"{part} = '{name}'" if part != name else f"'{name}'" for part, name in self.names.items())
        return f"{said.get(self.kind, 'instructions')} in column{'s' * (len(self.names) > 1)} {columns}"


def columns_of(known: Sequence[str], text_field: str | None, given: Mapping[str, str], where: str) -> Columns:
    """Find what rows with the columns ``known`` hold.

    ``text_field`` is the text column if the config names one, ``given`` is ``data.columns``.

    Raises:
        DataError: a named column does not exist, or no known kind of row has these columns.
    """
    for part, name in given.items():
        if name not in known:
            hint, has = did_you_mean(name, known), ", ".join(known)
            raise DataError(f"data.columns.{part} '{name}' is not a column of {where}{hint}; it has: {has}")
    found = dict(given)
    if text_field is None:
        for part, names in NAMES.items():
            usual = next((name for wanted in names for name in known if name.lower() == wanted), None)
            if part not in found and usual is not None:
                found[part] = usual
        for kind, needed in NEEDS.items():
            parts = [*needed, *(part for part in _OPTIONAL.get(kind, ()) if part in found)]
            if all(part in found for part in needed):
                return _of(kind, {part: found[part] for part in parts}, given, where)
    field = text_field or "text"
    if field not in known:
        hint, has = did_you_mean(field, known), ", ".join(known)
        other = (
            ""
            if text_field
            else (
                "; columns of conversations and prompts are named in data.columns, such as messages = 'chat', or "
                "prompt = 'ask' and completion = 'reply' (for init: --column messages=chat)"
            )
        )
        raise DataError(f"data.text_field '{field}' is not a column of {where}{hint}; it has: {has}{other}")
    return _of("text", {"text": field}, given, where)


def _of(kind: Kind, names: dict[str, str], given: Mapping[str, str], where: str) -> Columns:
    """Return the columns, and refuse one that is named and would not be read."""
    columns = Columns(kind, names)
    if moot := [part for part in given if part not in names]:
        raise DataError(
            f"data.columns.{moot[0]} '{given[moot[0]]}' is not read: {where} holds {columns}; remove it, or name the "
            "other columns of its kind"
        )
    return columns


def document(row: Mapping[str, Any], columns: Columns, at: str) -> Document | None:
    """Return the document of a row; ``None`` for an empty text.

    Raises:
        RowProblem: the row does not hold what its columns promise.
    """
    missing = [name for part, name in columns.names.items() if name not in row and part in NEEDS.get(columns.kind, ())]
    if missing:
        raise RowProblem(
            f"has no {listed([repr(name) for name in missing])}, which the first row has; rows of one source have the "
            "same columns"
        )
    get = {part: row.get(name) for part, name in columns.names.items()}
    taken = set(columns.names.values())
    for part, names in columns.optional.items():
        get[part] = next((row[name] for name in names if row.get(name) and name not in taken), None)
    if columns.kind == "text":
        return Document(at, text=get["text"]) if get["text"] else None
    if columns.kind == "messages":
        return Document(at, messages=conversation(get["messages"]), tools=_tools(get.get("tools")))
    if columns.kind == "instruction":
        asked = "\n\n".join(_text(get, part) for part in ("instruction", "input") if get.get(part))
        answer = _text(get, "output")
        if not answer.strip():
            raise RowProblem(f"'{columns.names['output']}' is empty; give an answer, or remove the row")
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return Document(at, messages=conversation(turns), trained_from=1)
    prompt, completion = get["prompt"], get["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        first = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        then = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        if not isinstance(first, list) or not isinstance(then, list):
            raise RowProblem("'prompt' and 'completion' must be texts, or lists of messages")
        messages = conversation([*first, *then])
        return Document(at, messages=messages, tools=_tools(get.get("tools")), trained_from=len(first))
    if not _text(get, "completion").strip():
        raise RowProblem(f"'{columns.names['completion']}' is empty; give an answer, or remove the row")
    return Document(at, text=_text(get, "prompt"), completion=completion)


def conversation(messages: Any) -> tuple[Message, ...]:
    """Check a list of messages, and return it with ShareGPT's keys and roles converted.

    A message has a role and a content; an assistant's may have ``tool_calls`` instead. Other keys pass through.

    Raises:
        RowProblem: a message is malformed, a turn is empty, or roles are out of order.
    """
    if not isinstance(messages, list | tuple) or not messages:
        what = "is empty" if isinstance(messages, list | tuple) else f"holds {type(messages).__name__}"
        raise RowProblem(f"the list of messages {what}; give a list of objects with 'role' and 'content'")
    found = [_message(one, number) for number, one in enumerate(messages, 1)]
    before = ""
    for number, role in enumerate((one["role"] for one in found), 1):
        if role in ("system", "developer") and before not in ("", "system", "developer"):
            raise RowProblem(f"message {number} is the {role}'s after the {before}'s; it comes first")
        if role == before and role in ("user", "assistant"):
            raise RowProblem(f"messages {number - 1} and {number} are both the {role}'s; join them")
        if role == "assistant" and before in ("", "system", "developer"):
            raise RowProblem(f"message {number} is the assistant's, with no user's before it; add what it answers")
        before = role
    return tuple(found)


def _message(one: Any, number: int) -> Message:
    if not isinstance(one, Mapping):
        raise RowProblem(f"message {number} is {type(one).__name__}, not an object with 'role' and 'content'")
    # columns of a table give every message all keys of all messages
    message = {key: value for key, value in one.items() if value is not None}
    if "role" not in message and "from" in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RowProblem(f"message {number} has no 'role' (keys: {', '.join(map(str, one)) or 'none'}); add it")
    role = _ROLES.get(role, role)
    if role not in KNOWN_ROLES:
        raise RowProblem(f"message {number} has the role '{role:.40}'; roles are {', '.join(KNOWN_ROLES[:5])}")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if None in parts:
            raise RowProblem(f"message {number} has parts that are not text; only text is trained on")
        content = "".join(map(str, parts))
    if content is not None and not isinstance(content, str):
        raise RowProblem(f"the content of message {number} is {type(content).__name__}, not text")
    if message.get("weight", 1) not in (0, 1):
        raise RowProblem(f"the weight of message {number} is {message['weight']!r:.20}; it is 0 (no loss) or 1")
    if not (content or "").strip() and not message.get("tool_calls"):
        raise RowProblem(f"message {number}, the {role}'s, is empty; remove the turn or the row")
    return {**message, "role": role, "content": content if content is not None else ""}


def _text(parts: Mapping[str, Any], part: str) -> str:
    value = parts.get(part)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowProblem(f"'{part}' holds {type(value).__name__}, not text")
    return value


def _tools(value: Any) -> Any:
    """Return the tools of a row; some data sets keep them as JSON text."""
    if isinstance(value, str):
        import json

        try:
            return json.loads(value)
        except ValueError:
            raise RowProblem("'tools' is text that is not JSON; give a list of JSON schemas") from None
    return value or None
