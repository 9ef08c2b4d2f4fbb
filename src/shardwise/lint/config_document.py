"""A configuration of another tool or of Shardwise: its data, and the line of a key."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from shardwise.lint.rule import Fault


class ConfigDocument:
    """A JSON, YAML or TOML file; ``tool`` says whose it is, empty where nothing shows it."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.data = _parse(path, text)
        self.tool = _tool(path, self.data)

    def get(self, dotted: str) -> Any:
        """The value of ``a.b``; ``None`` where there is none."""
        found: Any = self.data
        for key in dotted.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def fault(self, key: str, text: str = "") -> Fault:
        """A fault at the key ``a.b``, or at the first line."""
        line = 1
        for part in key.split("."):
            quoted = rf'^\s*(?:[{{,]\s*)?["\']?{re.escape(part)}["\']?\s*[:=]|"{re.escape(part)}"\s*:'
            for number, content in enumerate(self.text.split("\n")[line - 1 :], line):
                if re.search(quoted, content):
                    line = number
                    break
        return Fault(line, 1, text)


def _parse(path: Path, text: str) -> dict[str, Any]:
    """Read the data; anything but a table is empty.

    Raises:
        ValueError: the file is none of its kind.
    """
    if path.suffix == ".json":
        found = json.loads(text)
    elif path.suffix == ".toml":
        found = tomllib.loads(text)
    else:
        import yaml

        class UntaggedLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
            """Values with a tag of another program's are ``None``."""

        UntaggedLoader.add_constructor(None, lambda loader, node: None)
        try:
            documents = list(yaml.load_all(text, UntaggedLoader))
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
        found = documents[0] if len(documents) == 1 else None
    return found if isinstance(found, dict) else {}


def _tool(path: Path, data: dict[str, Any]) -> str:
    keys = set(data)
    if path.suffix == ".toml":
        tables = [data.get(name) for name in ("model", "data")]
        model, samples = (set(one) if isinstance(one, dict) else set() for one in tables)
        own = model & {"config", "factory", "weights"} and samples & {"path", "sources", "seq_len"}
        return "shardwise" if own and "train" in data else ""
    if path.suffix == ".json":
        known = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
        return "deepspeed" if keys & known else ""
    return "accelerate" if {"compute_environment", "distributed_type"} <= keys else ""
