"""``shardwise plan --serve``: read the options of inference, evaluate the ways to serve, print the answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.errors import DoesNotFit
from shardwise.report.serving_json import serving_document
from shardwise.report.serving_report import print_serving
from shardwise.search.serving_options import find_serving
from shardwise.search.serving_request import read_serving


def run_serve(
    words: Mapping[str, Any], serving: Mapping[str, Any], price: Path | None, console: Console, *, as_json: bool
) -> None:
    """Answer what a model needs to serve; ``serving`` are the options of it.

    Raises:
        UserError: every invalid option.
        DoesNotFit: no way to serve fits, or the pinned one does not.
    """
    request, notes = read_serving(words, serving, price)
    for line in notes:
        console.print(line, markup=False)
    result = find_serving(request)
    print_serving(request, result, console)
    if as_json:
        print(serving_document(request, result, notes).model_dump_json(by_alias=True))
    if result.recommended is None:
        name = f"{request.cluster.world_size} × {request.cluster.device_name}"
        raise DoesNotFit(f"nothing fits {name}; what would fit stands above")
