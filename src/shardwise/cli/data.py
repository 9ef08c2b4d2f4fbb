"""Verb ``shardwise data preview``: what the data becomes, before anything is trained."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwise.cli.arguments import ConfigPath, Json, Overrides
from shardwise.errors import DataError, UserError
from shardwise.train.config import read_config
from shardwise.train.config_tasks import refuse_other_tasks


def run_data_preview(
    config: ConfigPath,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Number of documents to show.")] = 1,
    first: Annotated[int, typer.Option("--from", min=0, help="Number of the first document to show, from 0.")] = 0,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with the documents in colour.")] = None,
    as_json: Json = False,
) -> None:
    """Run ``shardwise data preview``.

    Raises:
        UserError: the config or the data cannot be used, or the page cannot be written.
    """
    read = read_config(config, overrides or [])
    refuse_other_tasks(read, "data preview")
    from shardwise.report.sample_preview import html_page, parts_of, terminal_text
    from shardwise.train.data.corpus import prepare_corpus
    from shardwise.train.data.data_receipt import data_receipt
    from shardwise.train.data.tokenizer import load_tokenizer

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    corpus = prepare_corpus(
        read.data, Path(read.train.output) / "data", lambda text: console.print(f"data: {text}", markup=False)
    )
    receipt, total = data_receipt(corpus, read), len(corpus.train.starts) - 1
    if first >= total:
        raise DataError(f"--from {first}: there are {total} training documents, from 0 to {total - 1}")
    tokenizer = load_tokenizer(read.data.tokenizer)
    shown = [
        (f"document {number} of {total}", parts_of(corpus, tokenizer, number, read))
        for number in range(first, min(first + rows, total))
    ]
    for number, line in enumerate(receipt.lines()):
        console.print(f"{'      ' if number else 'data: '}{line}", markup=False)
    if not as_json:
        for name, parts in shown:
            cut = [part.cut for part in parts]
            said = "; after ✂ cut off by data.seq_len" if any(cut) else ""
            said = "; in no sample: data.seq_len cuts off all that has a loss" if all(cut) else said
            console.print(f"{name}; «with a loss»{said}:", style="bold")
            console.print(terminal_text(parts))
    if html is not None:
        try:
            html.write_text(html_page(str(config), list(receipt.lines()), shown), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html '{html}' cannot be written: {error.strerror}; give another path") from None
        console.print(f"page: {html}", markup=False)
    if as_json:
        documents = [[asdict(part) for part in parts] for _, parts in shown]
        print(json.dumps({"schema": 1, **receipt.to_dict(), "documents_shown": documents}))
