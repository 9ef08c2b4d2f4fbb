"""Models and data of another tool's file: what is on this machine becomes keys of ``[model]`` and ``[data]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.key_table import Reading


def model_rule(reading: Reading, key: str, value: Any) -> None:
    """Take a model: its folder is the configuration, the weights and the tokenizer."""
    if not isinstance(value, str):
        reading.refuse(key, value, "must be the folder of a model")
        return
    for target in ("model.config", "model.weights", "data.tokenizer"):
        reading.put(target, value)
    reading.taken.append(FileKey(key, value, "model.config, model.weights, data.tokenizer"))
    if not _is_here(value):
        reading.open.append(
            FileKey(key, value, "is not a folder here, and nothing is downloaded; give the folder of it")
        )


def add_source(reading: Reading, key: str, source: dict[str, Any]) -> None:
    """Add a part of the data, and say if it is not here."""
    reading.keys.setdefault("data.sources", []).append(source)
    if not _is_here(source["path"]):
        why = "is not a file or a folder here, and nothing is downloaded; give the path of it"
        reading.open.append(FileKey(key, source["path"], why))


def _is_here(path: str) -> bool:
    """Return whether there is such a file or folder; a name that none can have is not here."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, or of an unknown user
        return False


def settle_sources(reading: Reading) -> None:
    """Write one source as keys of ``[data]`` itself."""
    sources = reading.keys.pop("data.sources", [])
    if len(sources) == 1:
        for name, value in sources[0].items():
            if name not in ("name", "weight"):
                reading.put(f"data.{name}", value)
    elif sources:
        reading.put("data.sources", sources)


def adapter_keys(reading: Reading, strategy: str, adapter: str) -> str:
    """Return the strategy with its adapter."""
    if adapter and strategy.startswith("deepspeed"):
        reading.refuse(
            "strategy", f"{strategy} with {adapter}", "adapters are trained on PyTorch's strategies; use fsdp"
        )
    return f"{strategy}+{adapter}" if adapter else strategy


def drop_adapter(reading: Reading) -> None:
    """Take back what the file says of adapters that it does not train."""
    for key in [key for key in reading.keys if key.startswith("lora.")]:
        del reading.keys[key]
    moot = [row for row in reading.taken if row.why.startswith("lora.")]
    reading.taken = [row for row in reading.taken if row not in moot]
    reading.no_effect += [FileKey(row.key, row.value, "no adapter is trained") for row in moot]
