"""Receipt lines on the samples of each rank, compared by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.utils import _pytree

from shardwise.distributed.process_group import gather_ints, gather_text
from shardwise.receipts.receipt import Line
from shardwise.train.data.isolation import Isolation
from shardwise.train.measure_added_rows import AddedRowsMeasurement
from shardwise.train.session import Session
from shardwise.train.step import Micro

DISTINCT = "samples across ranks"
SHARED = "samples within model groups"
PACKED = "documents in a sample"
ADDED = "added tokens"
ROUNDED = 2.0**-7  # of a mean that a file of bf16 holds


def sample_lines(session: Session, micros: list[Micro], before: set[str]) -> Iterator[Line]:
    """Check that no micro batch went to two data-parallel ranks, and that their groups agree.

    If the data repeats from step to step (``before`` are the last step's hashes), as when one batch is
    overfitted on purpose, that is reported and not an error. Under context parallel a rank has a chunk of each
    sample; chunks without a label (padding) may be equal, and are left out.
    """
    dims = session.plan.dims
    mine = [digest(micro) for micro in micros if not micro.padding and (dims.cp == 1 or micro.num_tokens)]
    repeats = any(row[0] for row in gather_ints([int(bool(before & set(mine)))], session.ranks))
    everyone = [text.split() for text in gather_text(" ".join(mine), session.ranks)]
    places = [dims.place(rank) for rank in range(len(everyone))]
    teams: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(places):
        teams.setdefault((place.dp, place.cp), []).append(rank)
    one_of_each = {ranks[0]: everyone[ranks[0]] for ranks in teams.values()}
    yield _distinct(one_of_each, session.dealer, repeats=repeats)
    size = dims.tp * dims.pp
    if size > 1:
        odd = [rank for ranks in teams.values() for rank in ranks if everyone[rank] != everyone[ranks[0]]]
        found = f"other samples on ranks {', '.join(map(str, odd))}" if odd else f"the same on each {size} ranks"
        yield Line(name=SHARED, planned=f"the same on each {size} ranks", found=found, ok=not odd)


def packed_line(*, mask_borders: bool) -> Line:
    """Report that packing lets attention cross documents, whatever the labels at their borders."""
    borders = "first tokens without loss" if mask_borders else "first tokens with loss"
    return Line(name=PACKED, planned="packed", found=f"attend to each other, {borders}", ok=None)


def isolation_line(found: Isolation) -> Line:
    """Report whether one document of a sample moves the loss of another."""
    if found.wrong_rows:
        found_text = f"{found.wrong_rows} samples are not whole documents with their own labels"
    elif not found.documents:
        found_text = "one document in each sample of the first steps"
    else:
        kind = {True: "isolated", False: "not isolated", None: "unknown, as nothing moves this loss"}[found.ok]
        found_text = (
            f"{kind}: another document moves a loss by {found.change:.2g} of it "
            f"({found.documents} compared; without borders {found.open_change:.2g})"
        )
        found_text += "" if found.ok is not False else '; set data.pack = "none", which gives each a sample of its own'
    return Line(name=PACKED, planned="isolated", found=found_text, ok=found.ok)


def added_rows_line(found: AddedRowsMeasurement) -> Line:
    """Report whether the rows of added tokens began as the mean of the others."""
    planned = f"{found.added.count} rows, the mean of the other {found.added.old}"
    if found.distance is None:
        return Line(name=ADDED, planned=planned, found="not measured", ok=None)
    ok = found.distance <= ROUNDED
    found_text = planned if ok else f"{found.added.count} rows, off by {found.distance:.2g} of the mean of the others"
    return Line(name=ADDED, planned=planned, found=found_text, ok=ok)


def _distinct(everyone: dict[int, list[str]], dealer: str, *, repeats: bool) -> Line:
    """Build the line over one rank of each team."""
    holders: dict[str, list[int]] = {}
    for rank, digests in everyone.items():
        for text in digests:
            holders.setdefault(text, []).append(rank)
    total = sum(len(digests) for digests in everyone.values())
    twice = [ranks for ranks in holders.values() if len(ranks) > 1]
    found = f"{len(holders)} distinct"
    if twice:
        found += f"; the same samples on ranks {', '.join(str(r) for r in sorted(set(twice[0])))}"
        if dealer:
            found += (
                f": the loader's {dealer} knows its rank, or sharded=True says so, and was trusted to give each rank "
                "other samples; if it gives all ranks the same, call session.steps(loader, sharded=False)"
            )
    if repeats:
        found += "; the data repeats itself from step to step"
    ok = None if repeats else not twice
    return Line(name=DISTINCT, planned=f"{total} distinct", found=found, ok=ok)


def digest(micro: Micro) -> str:
    """Hash all tensors of a micro batch."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in _pytree.tree_leaves((micro.inputs, micro.labels)):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode() + tensor_bytes(leaf))
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a plain tensor, in order."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
