"""Render an engine's file from its template; each value is quoted for the language that it stands in."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from shardwise.launch.engines.launch_request import NO_INTERFACE, LaunchRequest

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, request: LaunchRequest, **more: object) -> str:
    """Fill the file ``template`` of this package with a request and ``more`` values."""
    return _environment().get_template(template).render(r=request, no_interface=NO_INTERFACE, **more)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("shardwise.launch.engines"),
        autoescape=False,  # no HTML: each value goes through one of the filters below
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": shell_words,
        "sbatch": sbatch_value,
        "yaml": json.dumps,
        "block": yaml_block,
        "pod": pod_value,
    }
    return environment


def shell_words(value: str | Iterable[str]) -> str:
    """Quote a word, or words, for a POSIX shell."""
    return shlex.quote(value) if isinstance(value, str) else shlex.join(value)


def sbatch_value(text: str) -> str:
    """Return ``text`` for an ``#SBATCH`` line, in quotes where it needs them; see `unfit_for_sbatch`."""
    return text if re.fullmatch(r"[\w./:,=@%+-]+", text, re.ASCII) else f'"{text}"'


def unfit_for_sbatch(text: str) -> str | None:
    """Return why no ``#SBATCH`` line can hold ``text``; ``None`` if it can."""
    if not text.isprintable():
        return "a line of #SBATCH ends at a line break, and holds no control characters"
    return "a line of #SBATCH has no way to write a quote or a backslash" if set(text) & set("\"'\\") else None


def yaml_block(text: str, indent: int) -> str:
    """Return ``text`` as a block that people can read; as a quoted scalar where a block could not hold it."""
    plain = all(letter == "\n" or letter.isprintable() for letter in text)
    if not plain or not text.endswith("\n") or text.endswith("\n\n") or text[:1] in ("", " ", "\n"):
        return json.dumps(text)
    lines = (f"{' ' * indent}{line}" if line else "" for line in text.split("\n"))
    return "|\n" + "\n".join(lines).rstrip("\n")


def pod_value(text: str) -> str:
    """Return ``text`` for a pod's command as a YAML scalar; Kubernetes would replace ``$(NAME)`` and ``$$``."""
    return json.dumps(re.sub(r"\$(?=[$(])", "$$", text))
