"""``docs/config.md`` is what the schema of the config file says.

``python -m tests.golden.test_config_page --write`` (``make docs``) writes the page anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.train.config import Config, json_schema

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
HEAD = """# Every key of a config file

Generated from the schema (`shardwise train --schema`) by `make docs`. A key that is left out has its default; `none`
means no value. On the command line a key is `table.key=value`, such as `train.steps=20`. More rules:
[config-files.md](config-files.md).
"""


def page() -> str:
    """The page: a section for each table, a row for each key."""
    schema = json.loads(json_schema())
    sections = [HEAD]
    for name, field in Config.model_fields.items():
        table: type[BaseModel] = field.annotation  # type: ignore[assignment]  # each key of a config is a table
        facts = schema["$defs"][table.__name__]["properties"]
        about = (table.__doc__ or "").partition("\n")[0].partition(": ")[2].replace("``", "`").partition(" (`")[0]
        needed = " This table is required." if field.is_required() else ""
        sections.append(f"## `[{name}]`\n\n{about[:1].upper()}{about[1:].rstrip('.')}.{needed}\n")
        sections.append("| key | value | default | meaning |\n|---|---|---|---|")
        for key, one in table.model_fields.items():
            cells = (f"`{key}`", value(facts[key]), default(one), one.description or "")
            sections.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        sections.append("")
    return "\n".join(sections)


def default(field: FieldInfo) -> str:
    """A default as it is written in a config file, which has no null."""
    if field.is_required():
        return "required"
    found = field.get_default(call_default_factory=True)
    return "`none`" if found is None else f"`{json.dumps(found)}`"


def value(facts: dict[str, Any]) -> str:
    """What a key takes, in words."""
    if "anyOf" in facts:
        return " or ".join("`none`" if one == {"type": "null"} else value(one) for one in facts["anyOf"])
    if "enum" in facts:
        return ", ".join(f"`{one}`" for one in facts["enum"])
    kind = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
    if facts.get("type") in kind:
        return kind[facts["type"]] + bounds(facts)
    if facts.get("type") == "array":
        return f"list of {value(facts['items'])}"
    return "table"


def bounds(facts: dict[str, Any]) -> str:
    """The bounds of a number: from 1, at most 10, above 0, below 1."""
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    found = [f"{word} {facts[key]:,}".removesuffix(".0") for key, word in words.items() if key in facts]
    return f" {' '.join(found)}" if found else ""


def test_the_page_is_of_this_schema() -> None:
    assert PAGE.read_text() == page(), "docs/config.md is stale: run make docs"


def test_every_key_has_a_meaning() -> None:
    tables = json.loads(json_schema())["$defs"].items()
    keys = {f"{name}.{key}": facts for name, one in tables for key, facts in one["properties"].items()}
    assert not [key for key, facts in keys.items() if "description" not in facts]


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(page())
