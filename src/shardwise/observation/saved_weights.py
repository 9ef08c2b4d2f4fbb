"""`check_saved`: whether a saved model or adapter, of any tool's format, has the weights that train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.reader import Source
from shardwise.distributed.process_group import Ranks, broadcast_text, leave
from shardwise.errors import UserError
from shardwise.observation.collect import innermost, name_of, tied_groups
from shardwise.observation.observer import control_group
from shardwise.observation.plain_copy import full_parameters, whole
from shardwise.observation.setup_lines import names_text
from shardwise.receipts.receipt import Line, Receipt
from shardwise.units import counted

_MODEL, _PEFT = "model/", "base_model.model."


def check_saved(model: nn.Module, place: Any) -> Receipt:
    """Compare what a loop has just saved at ``place`` with the live weights, tensor by tensor; call it on every rank.

    Every trainable parameter must be in the file, whole, with the values that it has now, rounded to the file's dtype.

    Args:
        model: as the loop calls it.
        place: file or folder in any format that `shardwise convert` reads, PEFT's adapters included.

    Raises:
        UserError: there is no checkpoint that can be read.
    """
    root, _ = innermost(model)
    ranks = control_group()
    try:
        with _disable_current_modes(), torch.no_grad():
            return _checked(root, str(place), ranks)
    finally:
        if ranks is not None:
            leave(ranks)


def _checked(root: nn.Module, place: str, ranks: Ranks | None) -> Receipt:
    is_main = ranks is None or ranks.is_main
    with contextlib.ExitStack() as stack:
        source, problem = None, ""
        if is_main:
            try:
                source = stack.enter_context(open_source(place))
            except Exception as error:  # all ranks must know before they send weights
                problem = str(error) or type(error).__name__
        problem = problem if ranks is None else broadcast_text(problem, ranks)
        if problem:
            raise UserError(f"check_saved: {problem}")
        verdict = _Verdict(source)
        with full_parameters(root):
            ties = tied_groups(root)
            named = {name_of(name): p for name, p in root.named_parameters()}
            for name, p in named.items():
                full = whole(p)  # collective
                if is_main:
                    names = next((group for group in ties if name in group), (name,))
                    verdict.add(names, full, p.requires_grad)
        text = Receipt(title="saved weights", lines=tuple(verdict.lines())).model_dump_json() if is_main else ""
    return Receipt.model_validate_json(text if ranks is None else broadcast_text(text, ranks))


class _Verdict:
    """What is wrong with each parameter in the file, on rank 0."""

    def __init__(self, source: Source | None) -> None:
        self._source = source
        found: Mapping[str, Any] = {} if source is None else source.tensors
        self._stored = {_plain(name): name for name in found if name.startswith(_MODEL)}
        if source is not None:
            self._stored |= {_plain(other): name for other, name in source.aliases.items()}
        self.missing: list[str] = []
        self.sliced: list[str] = []
        self.apart: list[str] = []
        self.right = self.absent = 0

    def add(self, names: Sequence[str], full: torch.Tensor, trainable: bool) -> None:
        """Compare one parameter, under any of its names; a frozen one may be absent."""
        assert self._source is not None
        name = names[0]
        stored = next((self._stored[key] for key in map(_plain, names) if key in self._stored), None)
        if stored is None:
            if trainable:
                self.missing.append(name)
            self.absent += not trainable
            return
        info = self._source.tensors[stored]
        if info.shape != tuple(full.shape):
            self.sliced.append(f"{name} {list(info.shape)} of {list(full.shape)}")
            return
        saved = self._source.read(stored, info.full)
        alike = torch.allclose(full.to(saved.dtype), saved, rtol=0, atol=0, equal_nan=True)
        if alike:
            self.right += 1
        else:
            self.apart.append(name)

    def lines(self) -> Iterator[Line]:
        """Yield the receipt's lines."""
        number = self.right + len(self.missing) + len(self.sliced) + len(self.apart)
        frozen = f"; {counted(self.absent, 'frozen parameter')} not in it" if self.absent else ""
        yield _line("trained parameters in the file", "all", "not", self.missing, f"all{frozen}")
        yield _line("shapes", "whole", "", self.sliced, "whole", "a rank's part alone? ")
        yield _line("values", "equal to the live ones", "not", self.apart, f"{self.right} of {number} equal")


def _line(name: str, planned: str, word: str, wrong: list[str], right: str, hint: str = "") -> Line:
    found = f"{hint}{word} {names_text(wrong)}".strip() if wrong else right
    return Line(name=name, planned=planned, found=found, ok=not wrong)


def _plain(name: str) -> str:
    return name_of(name.removeprefix(_MODEL)).removeprefix(_PEFT)
