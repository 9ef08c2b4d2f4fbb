"""Format each pydantic problem of a config: key, value, rule and nearest known key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from shardwise.errors import did_you_mean

_RULES = {  # pydantic's error type and the rule in words
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text, in quotes",
    "list_type": "a list, such as ['a', 'b']",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}",
    "dict_type": "a table",
    "model_type": "a table",
}
SMALL = 1e-4
_SHOWN = 200  # characters of a value in a message


def explain(item: Any, config: type[BaseModel]) -> str:
    """Format one pydantic problem of a ``config`` as one line."""
    path = [str(part) for part in item["loc"]]
    where = ".".join(path)
    start = f"{where}: " if where else ""  # problems between tables have no key of their own
    if item["type"] == "extra_forbidden":
        known = _known_keys(path[:-1], config)
        what = "key" if path[:-1] else "table"
        return f"{where}: no such {what}{did_you_mean(path[-1], known)}; known here: {', '.join(known)}"
    if item["type"] == "missing":
        return f"{where}: is missing; add it to the config file"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return start + (message if not message.startswith("(") else "; ".join(item["ctx"]["error"].args))
    rule = _RULES.get(item["type"], message.partition(" should be ")[2] or message).format(**item.get("ctx", {}))
    if 0 < (least := item.get("ctx", {}).get("ge", 1)) < SMALL:
        rule = f"{least:g} or more"  # pydantic writes all the zeros
    hint = did_you_mean(str(item["input"]), re.findall(r"'(\w+)'", rule)) if item["type"] == "literal_error" else ""
    return f"{where}: got {_shown(item['input'])}; it must be {rule}{hint}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits, possible in hexadecimal
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _known_keys(path: Sequence[str], table: Any) -> list[str]:
    for part in path:
        field = table.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        table = field.annotation
    return list(table.model_fields)
