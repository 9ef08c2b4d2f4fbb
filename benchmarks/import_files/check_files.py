"""Import every configuration file below folders: each key is in a row, or the file is refused with its reasons.

``python benchmarks/import_files/check_files.py accelerate/ axolotl/ DeepSpeed/``, with checkouts of these repositories.
A file counts as a configuration if its folder or name does not say that it is something else; see `ELSE`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError
from shardwise.interop.deepspeed.import_config import import_deepspeed
from shardwise.interop.files.import_file import format_of, import_file, read_file

ELSE = re.compile(
    r"/\.(git|github|devcontainer|vscode|runpod|pre-commit|coderabbit)|fixtures|snr_results|_data/|vocab|_config\.yml"
    r"|_toctree|docker-compose|whitelist|metadata\.json|codecov|_quarto|hub\.json|FUNDING|template\.yml"
)
ROWS = ("taken", "same", "not_taken", "no_effect", "open")


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a file that are not tables."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def outcome(path: Path, axolotl: bool) -> tuple[str, list[str]]:
    """What becomes of a file, and its problems, or the keys that no row has."""
    common: dict[str, Any] = {"ranks": 8, "device": "cuda", "here": "cuda", "given": {}}
    try:
        values = read_file(path)
        tool = "axolotl" if axolotl and path.suffix in (".yaml", ".yml") else format_of(path, values)
        if tool == "deepspeed":
            found = import_deepspeed(values, engine=None, **common)
        else:
            found = import_file(tool, values, **common)
    except PlanError as error:
        return "refused", list(error.problems)
    keys = {row.key for kind in ROWS for row in getattr(found, kind)}
    ignored = [leaf for leaf in leaves(values) if not _named(leaf, keys)]
    return ("ignored" if ignored else "imported"), ignored


def _named(leaf: str, keys: set[str]) -> bool:
    """A row has the key, what is inside of it, or the table around it."""
    inside = any(key.startswith((f"{leaf}[", f"{leaf}.")) for key in keys)
    return leaf in keys or inside or leaf.rpartition(".")[0] in keys


def main() -> None:
    """Print the number of files by folder and outcome; exit code 1 if a key was accepted and ignored."""
    counts: Counter[tuple[str, str]] = Counter()
    for folder in map(Path, sys.argv[1:]):
        for path in sorted(one for one in folder.rglob("*") if one.suffix in (".yaml", ".yml", ".json")):
            if path.is_file() and not ELSE.search(f"/{path.relative_to(folder)}"):
                kind, lines = outcome(path, "axolotl" in folder.name)
                counts[folder.name, kind] += 1
                if kind == "ignored":
                    print(f"{path}: {', '.join(lines)}")
    for (name, kind), number in sorted(counts.items()):
        print(f"{name}: {number} {kind}")
    sys.exit(any(kind == "ignored" for _, kind in counts))


if __name__ == "__main__":
    main()
