"""Verbs ``shardwise checkpoint``: inspect, verify, convert and merge-lora.

The first two end with 3 if something is damaged.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console

from shardwise.checkpoint.inspect import inspect_checkpoint
from shardwise.cli.arguments import CheckpointPath, Json
from shardwise.errors import CheckpointError, UserError
from shardwise.report.checkpoint_table import (
    ReadProgress,
    inspection_json,
    print_inspection,
    print_verification,
    verification_json,
)
from shardwise.units import bytes_text, seconds_text

KnownModelPath = Annotated[
    str | None, typer.Option("--model", help="config.json or its folder, or package.module:factory.")
]
ShardSize = Annotated[str | None, typer.Option("--max-shard-size", help="Maximum file size, such as 5GB or 500MiB.")]
PIPED = 132
_FIX = "restore the files from a copy, or go on from an earlier checkpoint"


def run_inspect(
    place: CheckpointPath,
    everything: Annotated[bool, typer.Option("--all", help="Print one row per tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Run ``shardwise checkpoint inspect``.

    Raises:
        UserError: there is no checkpoint in a known format.
        CheckpointError: files are missing or have a wrong size, or the manifest is damaged.
    """
    try:
        found = inspect_checkpoint(place)
    except OSError as error:
        raise _unreadable(place, error) from None
    print_inspection(found, _console(as_json), everything=everything)
    if as_json:
        print(json.dumps(inspection_json(found)))
    if found.damage:
        raise CheckpointError(f"'{found.place}' is damaged, as is said above; {_FIX}")


def run_verify_checkpoint(place: CheckpointPath, as_json: Json = False) -> None:
    """Run ``shardwise checkpoint verify``.

    Raises:
        UserError: there is no checkpoint in a known format.
        CheckpointError: bytes differ from the saved ones, or something is missing.
    """
    from shardwise.checkpoint.integrity import verify_checkpoint

    console = _console(as_json)
    try:
        with ReadProgress(console) as progress:
            found = verify_checkpoint(place, progress.begin, progress.tick)
    except OSError as error:
        raise _unreadable(place, error) from None
    print_verification(found, console)
    if as_json:
        print(json.dumps(verification_json(found)))
    if found.damage:
        raise CheckpointError(f"'{found.place}' is damaged, as is said above; {_FIX}")


def run_convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Path or URL of any tool's checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Path or URL of the output folder.")],
    to: Annotated[
        str | None,
        typer.Option(help="hf, shardwise or peft (adapters); default: hf for a Shardwise checkpoint, else shardwise."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of floating-point weights: bf16, fp16 or fp32.")] = None,
    max_shard_size: ShardSize = None,
    model: KnownModelPath = None,
    verify: Annotated[bool, typer.Option(help="Compare every tensor and the model's outputs.")] = True,
    optimizer: Annotated[bool, typer.Option(help="Convert optimizer state if the target supports it.")] = True,
    as_json: Json = False,
) -> None:
    """Run ``shardwise checkpoint convert``.

    Raises:
        UserError: an argument is invalid, or names and shapes are not the model's.
        CheckpointError: the source is damaged or requires running code, or the target cannot be written.
        NotTheSame: the target's content differs from the source's; it was removed.
    """
    from shardwise.checkpoint.convert.check_outputs import NotTheSame
    from shardwise.checkpoint.convert.conversion import refuse_taken
    from shardwise.checkpoint.readers.detect import open_source
    from shardwise.checkpoint.storage.local_storage import folder_of
    from shardwise.cli import convert

    convert.give_memory_back()
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    started = time.perf_counter()
    place = folder_of(target)
    convert.check_conversion_words(to, dtype, max_shard_size)
    refuse_taken(place)
    with open_source(source) as opened:
        convert.refuse_adapters(to, opened)
        request = convert.ConversionRequest(
            to=convert.direction_of(to, opened),
            dtype=convert.DTYPES[dtype] if dtype else None,
            max_shard_bytes=convert.read_size(max_shard_size or convert.MAX_SHARD_SIZE),
            model=model,
            verify=verify,
            optimizer=optimizer,
        )
        answer = convert.ConversionAnswer(opened, request, place, console)
        console.print(f"source: {opened.kind} '{opened.place}', {convert.content_of(opened)}", markup=False)
        try:
            written, verdict = convert.run_conversion(opened, request, place, answer)
        except NotTheSame as error:
            if as_json:
                print(json.dumps(answer.document(None, error.verdict, time.perf_counter() - started)))
            raise
        answer.log(verdict.text)
        took = time.perf_counter() - started
        files = f"{written.files} {'file' if written.files == 1 else 'files'}"
        size = bytes_text(written.num_bytes)
        console.print(
            f"done: {convert.TARGET_NAMES[request.to]} '{written.place}', {files}, {size}, {seconds_text(took)}",
            markup=False,
        )
        if as_json:
            print(json.dumps(answer.document(written, verdict, took)))


def run_merge(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Path or URL of a run with +lora or +qlora.")],
    target: Annotated[str, typer.Option("--output", "-o", help="Path or URL of the output folder.")],
    base: Annotated[str | None, typer.Option(help="Path or URL of the base model; default: the run's.")] = None,
    onto: Annotated[str | None, typer.Option(help="+qlora: unpacked (as trained) or original weights.")] = None,
    model: KnownModelPath = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: the base's.")] = None,
    max_shard_size: ShardSize = None,
    check: Annotated[bool, typer.Option(help="Compare outputs with base plus adapters, and all tensors.")] = True,
    as_json: Json = False,
) -> None:
    """Run ``shardwise checkpoint merge-lora``.

    Raises:
        UserError: there are no adapters, the base is not the run's, the model is unknown, or the target exists.
        CheckpointError: a file is damaged, or the target cannot be written.
        NotMerged: the target's output differs from that of base and adapters; it was removed.
    """
    from shardwise.checkpoint.convert.check_merged import NotMerged
    from shardwise.checkpoint.convert.conversion import refuse_taken
    from shardwise.checkpoint.readers.detect import open_source
    from shardwise.checkpoint.storage.local_storage import folder_of
    from shardwise.cli import convert, merge

    convert.give_memory_back()
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    started = time.perf_counter()
    place = folder_of(target)
    merge.check_merge_words(onto, dtype, max_shard_size)
    refuse_taken(place)
    with ExitStack() as stack:
        opened = stack.enter_context(open_source(source))
        merging = merge.AdapterMerge(
            opened, base, onto, model, convert.DTYPES[dtype] if dtype else None, console, stack
        )
        merging.describe()
        try:
            written, verdict = merging.write(
                place, convert.read_size(max_shard_size or convert.MAX_SHARD_SIZE), check=check
            )
        except NotMerged as error:
            if as_json:
                print(json.dumps(merging.document(place, None, error.verdict, time.perf_counter() - started)))
            raise
        console.print(verdict.text, markup=False)
        if verdict.from_quantized is not None:
            merging.note(
                f"what was trained, the packed base with these adapters, gives outputs that differ by up to "
                f"{verdict.from_quantized:.3g}"
            )
        took = time.perf_counter() - started
        files = f"{written.files} {'file' if written.files == 1 else 'files'}, {bytes_text(written.num_bytes)}"
        console.print(f"done: Hugging Face folder '{written.place}', {files}, {seconds_text(took)}", markup=False)
        if as_json:
            print(json.dumps(merging.document(place, written, verdict, took)))


def _console(as_json: bool) -> Console:
    """Create a console with the terminal's width; in a file or a pipe, enough for names."""
    stream = sys.stderr if as_json else sys.stdout
    width = None if stream.isatty() else PIPED
    return Console(stderr=as_json, highlight=False, soft_wrap=width is not None, width=width)


def _unreadable(place: str, error: OSError) -> UserError:
    return UserError(
        f"'{error.filename or place}' cannot be read: {error.strerror or error}; give a place you may read"
    )
