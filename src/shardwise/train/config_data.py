"""Table ``[data]`` of a config file, and the base of all tables."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shardwise.train.config_values import Fraction, Length, Named
from shardwise.units import listed

Part = Literal[
    "messages", "prompt", "completion", "instruction", "input", "output", "tools",
    "text", "pair", "label", "tokens", "tags", "source", "target", "image",
]  # fmt: skip


class Table(BaseModel):
    """Base of all tables: frozen, no unknown keys, no silent type conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_is_nothing(cls, data: Any) -> Any:
        """Convert ``"none"`` to ``None`` for optional keys, as TOML has no null."""
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if NoneType in get_args(field.annotation)}
        return {key: None if key in optional and value == "none" else value for key, value in data.items()}


def _is_date(text: str) -> bool:
    try:
        return str(date.fromisoformat(text)) == text
    except ValueError:
        return False


class SourceTable(Table):
    """One of ``data.sources``: a part of a mixture; keys that are left out are those of ``[data]``."""

    path: Named = Field(description="file or folder")
    name: Named | None = Field(None, description="for tables and metrics; the name of the file or folder if left out")
    weight: float | None = Field(None, gt=0, le=1e9, description="share of the samples; of all or of none")
    format: Literal["auto", "text", "jsonl", "csv", "parquet", "dataset"] | None = Field(None, description="see data")
    split: Named | None = Field(None, description="see data")
    include: list[str] | None = Field(None, description="see data")
    exclude: list[str] | None = Field(None, description="see data")
    text_field: str | None = Field(None, description="see data")
    columns: dict[Part, str] | None = Field(None, description="see data")

    @property
    def label(self) -> str:
        """Name for people."""
        return self.name or Path(self.path).stem or self.path


class DataTable(Table):
    """``[data]``: documents, and how they become samples."""

    path: Named | None = Field(
        None, description="file or folder; 'python:stdlib' or 'python:PACKAGE' is installed source code"
    )
    sources: list[SourceTable] = Field(
        default_factory=list, description="instead of path, a mixture: tables with path, weight, name, and keys of data"
    )
    stop_when: Literal["first_exhausted", "all_exhausted"] = Field(
        "first_exhausted", description="an epoch of weighted sources ends when the first, or all, were seen in full"
    )
    format: Literal["auto", "text", "jsonl", "csv", "parquet", "dataset"] = Field(
        "auto", description="auto inspects the files; dataset is a folder written by datasets.save_to_disk"
    )
    split: Named | None = Field(None, description="split of a folder of datasets; 'train' if left out")
    include: list[str] = Field(default_factory=lambda: ["**/*"], description="files of a text folder: glob patterns")
    exclude: list[str] = Field(default_factory=list, description="files left out: glob patterns")
    text_field: str = Field("text", description="column with plain documents; columns of conversations are found")
    columns: dict[Part, str] = Field(
        default_factory=dict, description="other names of columns: messages, prompt, completion, instruction, ..."
    )
    tokenizer: Named = Field("bytes", description="'bytes', a tokenizer.json, or a transformers folder")
    chat_template: Named | None = Field(
        None, description="'chatml' or a file with a Jinja template; the tokenizer's own if left out"
    )
    date: Named | None = Field(
        None,
        description="today for a chat template that writes the date, as 2026-11-23; the day of preparation if none",
    )
    loss_on: Literal["auto", "assistant", "completion", "last", "all"] = Field(
        "auto", description="tokens with a loss: the assistant's turns, the completion, the last turn, or all"
    )
    bad_rows: Literal["refuse", "skip"] = Field("refuse", description="what becomes of rows that cannot be rendered")
    seq_len: Length = Field(0, description="tokens in a sample; required, but for image-classification")
    target_len: Length | None = Field(None, description="seq2seq: tokens in a target; seq_len if left out")
    mask_share: Annotated[float, Field(gt=0, lt=1)] = Field(0.15, description="masked-lm: share of tokens to predict")
    resize: bool = Field(False, description="image-classification: bring images to the size that the model takes")
    pack: Literal["auto", "isolated", "joined", "none"] = Field(
        "auto",
        description="documents in a sample: isolated (none sees another), joined and split, or none (one, padded); "
        "auto: isolated for conversations and pretrained weights, else joined",
    )
    mask_borders: bool = Field(False, description="no loss on the first token of the next document in a joined sample")
    heldout_fraction: Fraction = Field(0.05, description="share of documents kept for evaluation, chosen by content")
    heldout_path: Named | None = Field(None, description="held-out documents from here instead")
    shuffle: bool = Field(True, description="a new order each epoch, a function of train.seed")

    @field_validator("pack", mode="before")
    @classmethod
    def _once_a_switch(cls, value: Any) -> Any:
        """Take what was written before there were three ways."""
        return {True: "joined", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if self.date is not None and not _is_date(self.date):
            raise ValueError(f"'date' is '{self.date}', and no day of the calendar; write it as 2026-11-23")
        if problems := self._source_problems():
            raise ValueError(*problems)
        if self.mask_borders and self.pack in ("isolated", "none"):
            raise ValueError(f"'mask_borders' has no effect if pack is '{self.pack}'; remove it")
        if self.heldout_path is not None and "heldout_fraction" in self.model_fields_set:
            raise ValueError("'heldout_path' and 'heldout_fraction' both select the held-out documents; remove one")
        return self

    def _source_problems(self) -> list[str]:
        if (self.path is None) == (not self.sources):
            given = "neither; add one" if self.path is None else "both; leave one out"
            return [f"needs exactly one of 'path' and 'sources', got {given}"]
        names = [one.label for one in self.sources]
        problems = []
        if twice := {name for name in names if names.count(name) > 1}:
            problems.append(f"'sources' has {listed(sorted(twice))} more than once; give each a name of its own")
        without = [one.label for one in self.sources if one.weight is None]
        if without and len(without) < len(names):
            problems.append(f"'sources' gives some a weight, and {listed(without)} none; give it to all or to none")
        if "stop_when" in self.model_fields_set and (not self.sources or without):
            problems.append("'stop_when' has an effect on sources with weights only; remove it")
        return problems

    def each_source(self) -> Iterator[tuple[str, str, str, DataTable]]:
        """Yield the name, the path, its key and the table of each source; the name is empty without a mixture."""
        if self.path is not None:
            yield "", self.path, "data.path", self
        for number, one in enumerate(self.sources):
            own = one.model_dump(exclude_none=True, exclude={"path", "name", "weight"})
            yield one.label, one.path, f"data.sources[{number}].path", self.model_copy(update=own)
