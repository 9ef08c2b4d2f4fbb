"""Conversion of ``shardwise checkpoint convert``: read any tool's checkpoint, write, verify."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from shardwise.checkpoint.convert.check_outputs import OutputVerdict, check_conversion, widest
from shardwise.checkpoint.convert.conversion import Extras, To, Written, convert
from shardwise.checkpoint.convert.known_model import KnownModel, find_model
from shardwise.checkpoint.convert.merge_lora import holds_adapters, saved_adapters
from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.matching import MODEL, Expected, Selection, select
from shardwise.checkpoint.readers.huggingface import CONFIG, HuggingFaceSource
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.errors import UserError, did_you_mean
from shardwise.units import bytes_text

SCHEMA = 1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_SHARD_SIZE = "5GB"
SMALLEST_SHARD = 1024
_MMAP_THRESHOLD, _KEPT = -3, 1 << 20  # M_MMAP_THRESHOLD of glibc's malloc.h, and bytes
TARGET_NAMES = {"hf": "Hugging Face folder", "shardwise": "Shardwise checkpoint", "peft": "PEFT folder"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
# data files beside the weights of a Hugging Face model; code is never copied
_BESIDE = (
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class ConversionRequest:
    """Checked conversion request."""

    to: To
    dtype: torch.dtype | None
    max_shard_bytes: int
    model: str | None
    verify: bool
    optimizer: bool


class ConversionAnswer:
    """Answer of a conversion, as text and as JSON."""

    def __init__(self, source: Source, request: ConversionRequest, target: Folder, console: Console) -> None:
        self.source = source
        self.request = request
        self.target = target
        self.console = console
        self.notes: list[str] = []
        self.selection: Selection | None = None

    def note(self, text: str) -> None:
        """Print a note, and store it for the document."""
        self.notes.append(text)
        self.log(f"note: {text}")

    def log(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False)

    def document(self, written: Written | None, verdict: OutputVerdict, seconds: float) -> dict[str, Any]:
        """Build the answer as JSON; see docs/checkpoint-format.md."""
        items = self.selection.items if self.selection else ()
        return {
            "schema": SCHEMA,
            "source": {"kind": self.source.kind, "place": self.source.place, "step": self.source.step},
            "to": self.request.to,
            "target": str(written.place if written else self.target),
            "tensors": len(items),
            "bytes": self.selection.num_bytes if self.selection else 0,
            "files": written.files if written else 0,
            "seconds": round(seconds, 3),
            "notes": self.notes,
            "verified": verdict.verified,
            "verdict": verdict.text,
            "max_difference": verdict.max_difference,
        }


def run_conversion(
    source: Source, request: ConversionRequest, target: Folder, answer: ConversionAnswer
) -> tuple[Written, OutputVerdict]:
    """Write the target of one conversion, and verify it."""
    for note in source.notes:
        answer.note(note)
    known = find_model(request.model, source)
    if request.to == "peft":
        return _run_peft(source, request, target, known, answer)
    expected = known.expected() if isinstance(known, KnownModel) else None
    checked = known
    if expected is not None and expected.translated:
        if _has_file_names(source, expected):
            checked, expected = "transformers stores this model under other names than its modules have", None
            answer.note(f"{checked}; names are kept as they are, and not compared with the model's")
        elif request.to == "hf":
            answer.note("the names are those of transformers' modules, as it loads them; published files have others")
    hf = request.to == "hf"
    reason = "a Hugging Face folder has no place for it" if hf else "--no-optimizer was given"
    weights_only = hf or not request.optimizer
    selection = select(source, expected, dtype=request.dtype, weights_only=weights_only, reason=reason)
    answer.selection = selection
    for note in selection.notes:
        answer.note(note)
    if isinstance(source, OwnSource) and weights_only and source.manifest.state:
        answer.note(f"not carried over: the position in the data and other state of the run; {reason}")
    if request.to == "shardwise" and source.step is None:
        answer.note("the source does not say how many steps were done; the checkpoint is one of step 0")
    extras = _extras(source, request, known, selection, answer)
    with Bar(answer.console) as bar:
        if request.verify and isinstance(source, OwnSource):
            bar.begin("checking the source", sum(info.num_bytes for info in source.tensors.values()))
            source.check(bar.tick)

        def check(place: Folder) -> OutputVerdict:
            if not request.verify:
                return OutputVerdict(None, None, "not verified: --no-verify was given")
            return check_conversion(source, selection, place, request.to, checked, bar)

        return convert(
            source,
            selection,
            target,
            to=request.to,
            max_shard_bytes=request.max_shard_bytes,
            extras=extras,
            progress=bar,
            check=check,
        )


def _run_peft(
    source: Source, request: ConversionRequest, target: Folder, known: KnownModel | str, answer: ConversionAnswer
) -> tuple[Written, OutputVerdict]:
    """Write adapters in peft's format, without the base."""
    from shardwise.checkpoint.convert.peft import check_peft_folder, peft_config, peft_selection
    from shardwise.parallel.lora.adapters import linear_layers

    saved = saved_adapters(source)
    if not isinstance(known, KnownModel) or not isinstance(source, OwnSource):
        raise UserError(f"'{source.place}': its layers must be known, as peft asks how their weights lie: {known}")
    layers = linear_layers(known.build(real=False))
    lost = [name for name in saved.targets if name not in layers]
    if lost:
        raise UserError(f"'{source.place}': the model '{known.label}' has no linear layer {short_list(lost)}")
    selection = answer.selection = peft_selection(source, saved, request.dtype)
    transposed = any(not isinstance(layers[name], torch.nn.Linear) for name in saved.targets)
    causal = getattr(known.auto, "__name__", "") == "AutoModelForCausalLM"
    answer.note("the base is not carried over, nor the optimizer's state: peft's folder holds adapters only")
    if saved.kind == "qlora":
        answer.note(
            f"they were trained on a base in 4 bits ({saved.options.quant_type}); beside one that is not packed, "
            "outputs are others"
        )
    with Bar(answer.console) as bar:

        def check(place: Folder) -> OutputVerdict:
            if not request.verify:
                return OutputVerdict(None, None, "not verified: --no-verify was given")
            source.check(bar.tick)
            return check_peft_folder(source, saved, selection, place, known, bar)

        bar.begin("writing", selection.num_bytes)
        extras = Extras(config=peft_config(saved, transposed=transposed, causal=causal))
        return convert(
            source,
            selection,
            target,
            to="peft",
            max_shard_bytes=request.max_shard_bytes,
            extras=extras,
            progress=bar,
            check=check,
        )


def refuse_adapters(to: str | None, source: Source) -> None:
    """Reject adapters as a model: they are converted to peft's folder, or merged."""
    if to == "peft":
        saved_adapters(source)
    elif holds_adapters(source):
        raise UserError(
            f"'{source.place}' holds adapters only, and a model is made of them with their base: shardwise checkpoint "
            f"merge-lora {source.place} -o FOLDER; the adapters alone are exported for peft with --to peft"
        )


def _has_file_names(source: Source, expected: Expected) -> bool:
    """Return whether the source has names of a model's files that its modules do not have."""
    names = {name.removeprefix(MODEL) for name in source.tensors if name.startswith(MODEL)}
    published = isinstance(source, HuggingFaceSource) or bool(names & expected.names)
    return published and bool(names - expected.names - expected.transient)


def _extras(
    source: Source, request: ConversionRequest, known: KnownModel | str, selection: Selection, answer: ConversionAnswer
) -> Extras:
    """Collect the configuration and the files beside the weights; missing ones are reported."""
    entry = known.entry if isinstance(known, KnownModel) else None
    if request.to == "shardwise":
        if entry is None and isinstance(source, OwnSource):
            entry = source.manifest.model
        return Extras(model=entry)
    config = known.config if isinstance(known, KnownModel) else None
    folder = known.folder if isinstance(known, KnownModel) else None
    if isinstance(known, str) and isinstance(source, HuggingFaceSource):
        config = source.config
    if folder is None and isinstance(source, HuggingFaceSource):
        folder = source.folder
    return hugging_face_extras(config, folder, selection, answer.note)


def hugging_face_extras(
    config: Mapping[str, Any] | None, folder: Folder | None, selection: Selection, note: Callable[[str], None]
) -> Extras:
    """Build ``config.json`` with the written dtype, and the tokenizer's files in ``folder``."""
    if config is None:
        note(f"no {CONFIG} is written, as no configuration is known; give --model FOLDER for one")
        return Extras()
    stored = str(widest(i.info.dtype for i in selection.items if i.name.startswith(MODEL))).removeprefix("torch.")
    files = _beside(folder) if folder is not None else []
    if files:
        note(f"copied from '{folder}': {', '.join(file.name for file in files)}")
    elif folder is None:
        note("no tokenizer is written, as none is known; give --model FOLDER to copy its files")
    before = config.get("dtype") or config.get("torch_dtype")
    if before not in (None, stored):
        note(f"{CONFIG}: dtype is {stored}, as the weights are (it was {before})")
    return Extras(config=_with_dtype(config, stored), files=files)


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Set the stored dtype, also in nested configurations, so that loading rounds nothing."""
    inner = {k: _inner_dtype(v, dtype) for k, v in config.items() if k not in ("torch_dtype", "_name_or_path")}
    return {**inner, "dtype": dtype}


def _inner_dtype(value: Any, dtype: str) -> Any:
    if not isinstance(value, Mapping) or not {"dtype", "torch_dtype"} & value.keys():
        return value
    return _with_dtype(value, dtype)


def _beside(folder: Folder) -> list[Folder]:
    """Folders with files of the tokenizer and of generation."""
    found: list[Folder] = []
    there: list[Folder] = [*folder.iterdir()]
    for path in sorted(there, key=lambda path: path.name):
        is_tokenizer = path.name.startswith(_TOKENIZER) and path.name.endswith((".json", ".model"))
        if (path.name in _BESIDE or is_tokenizer) and path.is_file():
            found.append(path)
    return found


def direction_of(to: str | None, source: Source) -> To:
    """Return the target format, from the source if ``to`` is not given."""
    if to == "peft":
        return "peft"
    if to == "hf" or (to is None and isinstance(source, OwnSource)):
        return "hf"
    return "shardwise"


def check_conversion_words(to: str | None, dtype: str | None, max_shard_size: str | None) -> None:
    """Check the options; raises all problems at once."""
    problems = []
    if to is not None and to not in get_args(To):
        problems.append(f"--to {to}: give hf, shardwise or peft{did_you_mean(to, get_args(To))}")
    if max_shard_size is not None and to == "peft":
        problems.append(f"--max-shard-size {max_shard_size}: peft's folder has one file of adapters; take it out")
        max_shard_size = None
    problems += folder_problems(dtype, max_shard_size)
    if problems:
        raise UserError(*problems)


def folder_problems(dtype: str | None, max_shard_size: str | None) -> list[str]:
    """List problems of the dtype and the file size of a folder to write."""
    problems: list[str] = []
    if dtype is not None and dtype not in DTYPES:
        problems.append(f"--dtype {dtype}: give bf16, fp16 or fp32{did_you_mean(dtype, DTYPES)}")
    if max_shard_size is not None:
        try:
            read_size(max_shard_size)
        except UserError as error:
            problems += error.problems
    return problems


def give_memory_back() -> None:
    """Let glibc return every freed block to the system at once.

    By default it keeps memory freed by threads for later use, after a while hundreds of MiB; no other C library needs
    this.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _KEPT)


def read_size(text: str) -> int:
    """Parse ``5GB`` (thousands), ``500MiB`` (1024s) or ``1000000`` to bytes.

    Raises:
        UserError: it is not a size, or less than 1 KiB.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--max-shard-size {text}: give a size such as 5GB or 500MiB")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if size < SMALLEST_SHARD:
        raise UserError(f"--max-shard-size {text}: a file must have room for {SMALLEST_SHARD} bytes; give more")
    return size


def content_of(source: Source) -> str:
    """Describe a source in a few words."""
    size = bytes_text(sum(info.num_bytes for info in source.tensors.values()))
    step = "" if source.step is None else f", step {source.step}"
    return f"{len(source.tensors)} tensors, {size}{step}"


class Bar:
    """Progress bar with rate and remaining time on a terminal; no output elsewhere."""

    def __init__(self, console: Console) -> None:
        self._task: TaskID | None = None
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str, num_bytes: int) -> None:
        """See `shardwise.checkpoint.convert.conversion.Progress`."""
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=num_bytes or None)

    def tick(self, num_bytes: int) -> None:
        """See `shardwise.checkpoint.convert.conversion.Progress`."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, num_bytes)
