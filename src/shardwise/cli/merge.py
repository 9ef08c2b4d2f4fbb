"""Merge of ``shardwise checkpoint merge-lora``: adapters into base weights, verified."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from shardwise.checkpoint.added_rows import open_with_rows
from shardwise.checkpoint.added_tokens import added_of
from shardwise.checkpoint.convert.check_merged import MergeVerdict, Pieces, check_merge
from shardwise.checkpoint.convert.conversion import Written, convert
from shardwise.checkpoint.convert.known_model import KnownModel, find_model
from shardwise.checkpoint.convert.merge_lora import MergedSource, saved_adapters
from shardwise.checkpoint.matching import Selection, select
from shardwise.checkpoint.readers.huggingface import HuggingFaceSource
from shardwise.checkpoint.readers.live import LiveSource
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.save_report import versions
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.checkpoint.weights import base_digest
from shardwise.cli.convert import (
    Bar,
    folder_problems,
    hugging_face_extras,
)
from shardwise.errors import ModelError, UserError, did_you_mean
from shardwise.parallel.lora.adapters import linear_layers
from shardwise.parallel.materialize import build

SCHEMA = 1
ONTO = ("unpacked", "original")


@dataclass(frozen=True)
class _Base:
    """Path of the base, and the model's view of it."""

    source: Source
    taken: Selection
    digest: str | None


class AdapterMerge:
    """LoRA merge; every check is done when it is created, before anything is written."""

    def __init__(
        self,
        source: Source,
        base: str | None,
        onto: str | None,
        model: str | None,
        dtype: torch.dtype | None,
        console: Console,
        stack: ExitStack,
    ) -> None:
        self.saved = saved_adapters(source)
        if not isinstance(source, OwnSource):
            raise TypeError(source)
        self.adapters, self.console, self.dtype = source, console, dtype
        self.notes: list[str] = []
        if onto is not None and self.saved.kind != "qlora":
            raise UserError(
                f"--onto {onto}: the adapters of '{source.place}' were trained with +{self.saved.kind}, whose base is "
                "not packed; take --onto out"
            )
        known = find_model(model, source)
        if not isinstance(known, KnownModel):
            raise UserError(f"'{source.place}': its layers must be known to merge them: {known}")
        self.known = known
        self.onto = (onto or "unpacked") if self.saved.kind == "qlora" else None
        self.base = self._opened(base, stack)
        layers = linear_layers(known.build(real=False))
        packed = layers if self.onto == "unpacked" else ()
        self.merged = MergedSource(
            self.base.source,
            self.base.taken,
            source,
            self.saved,
            transposed=[name for name, layer in layers.items() if not isinstance(layer, torch.nn.Linear)],
            packed=packed,
            dtype=dtype,
        )
        stack.enter_context(self.merged)

    def note(self, text: str) -> None:
        """Print a note, and store it for the document."""
        self.notes.append(text)
        self.console.print(f"note: {text}", markup=False)

    def describe(self) -> None:
        """Print the head: adapters, base, and the operation."""
        saved, options = self.saved, self.saved.options
        step = self.adapters.manifest.step
        kind = f"{saved.kind}{', DoRA' if options.dora else ''}"
        head = f"adapters: '{self.adapters.place}', step {step}: {kind}, rank {options.rank}, scale {options.scale:.4g}"
        self.console.print(f"{head}, {len(saved.targets)} layers", markup=False)
        digest = "" if self.base.digest is None else f", digest {self.base.digest}"
        digest += " as in training" if saved.digest is not None else ""
        self.console.print(f"base: {self.base.source.kind} '{self.base.source.place}'{digest}", markup=False)
        if saved.seed is not None and saved.base is None:
            self._report_drawn(saved.seed)
        elif saved.digest is None:
            self.note("the checkpoint does not say what its base was, so nothing shows that it was this one")
        if self.onto == "unpacked":
            self.note(
                f"merged onto the {options.quant_type} weights unpacked again, which is what the adapters were trained "
                f"on: {len(self.merged.dequantized)} weights differ from the base's, merged or not"
            )
        elif self.onto == "original":
            self.note("merged onto the original weights: outputs are not those of what was trained, the packed ones")

    def write(self, place: Folder, limit: int, *, check: bool) -> tuple[Written, MergeVerdict]:
        """Write the folder, and verify it."""
        selection = select(self.merged, self.known.expected(), dtype=self.dtype, weights_only=True, reason="")
        for note in selection.notes:
            self.note(note)
        folder = self.known.folder
        if folder is None and isinstance(self.base.source, HuggingFaceSource):
            folder = self.base.source.folder
        extras = hugging_face_extras(self.known.config, folder, selection, self.note)
        self._report_rounding(selection)
        original = self.onto == "original"
        pieces = Pieces(self.known, self.base.source, self.base.taken, self.adapters, self.saved, original)
        with Bar(self.console) as bar:
            for source in (self.adapters, self.base.source):
                if check and isinstance(source, OwnSource):
                    bar.begin("checking the sources", sum(info.num_bytes for info in source.tensors.values()))
                    source.check(bar.tick)

            def checked(written: Folder) -> MergeVerdict:
                if not check:
                    return MergeVerdict(None, "not verified: --no-check was given")
                return check_merge(pieces, self.merged, selection, written, bar)

            return convert(
                self.merged,
                selection,
                place,
                to="hf",
                max_shard_bytes=limit,
                extras=extras,
                progress=bar,
                check=checked,
            )

    def document(
        self, target: Folder, written: Written | None, verdict: MergeVerdict, seconds: float
    ) -> dict[str, Any]:
        """Build the answer as JSON."""
        saved = self.saved
        return {
            "schema": SCHEMA,
            "source": {"kind": self.adapters.kind, "place": self.adapters.place, "step": self.adapters.step},
            "base": {"kind": self.base.source.kind, "place": self.base.source.place, "digest": self.base.digest},
            "adapter": {
                "kind": saved.kind,
                "options": saved.options.model_dump(mode="json"),
                "scale": saved.options.scale,
                "layers": len(saved.targets),
            },
            "onto": self.onto,
            "target": str(written.place if written else target),
            "tensors": len(self.merged.tensors),
            "bytes": written.num_bytes if written else 0,
            "files": written.files if written else 0,
            "seconds": round(seconds, 3),
            "notes": self.notes,
            "verified": verdict.verified,
            "verdict": verdict.text,
            "max_difference": verdict.difference,
            "bound": verdict.bound,
            "adapters_change": verdict.effect,
            "from_packed": verdict.from_quantized,
        }

    def _opened(self, place: str | None, stack: ExitStack) -> _Base:
        """Open the base, which must be the one of the training."""
        saved = self.saved
        if saved.base is None and saved.seed is None and place is None:
            raise UserError(
                f"'{self.adapters.place}' was saved by a loop of one's own and does not say what its base was; give "
                "the weights that the model had: --base FOLDER"
            )
        if saved.base is None and saved.seed is not None:
            if place is not None:
                raise UserError(
                    f"--base {place}: the run drew its base from seed {saved.seed}, and nothing says what that was to "
                    "compare with; leave --base out, and it is drawn again"
                )
            return self._drawn(saved.seed, stack)
        where = str(place or saved.base)
        try:
            added = added_of(self.adapters.manifest.model)
            source = stack.enter_context(open_with_rows(where, self.known.build(real=False), added))
        except UserError as error:
            if place is not None:
                raise
            raise UserError(
                f"the base that '{self.adapters.place}' was trained on is not where it was ({error}); give its place "
                "now: --base FOLDER"
            ) from None
        taken = select(source, self.known.expected(), dtype=None, weights_only=True, reason="")
        digest = base_digest(source, [item.origin for item in taken.items])
        if saved.digest is not None and digest != saved.digest:
            raise UserError(
                f"'{source.place}' is not the base of '{self.adapters.place}': its digest is {digest}, and the "
                f"adapters were trained on one of {saved.digest} ('{saved.base}'); give that one: --base FOLDER"
            )
        return _Base(source, taken, digest)

    def _drawn(self, seed: int, stack: ExitStack) -> _Base:
        known = self.known
        try:
            module = build(lambda: known.make(torch.float32), seed, real=True)
        except Exception as error:
            raise ModelError(f"model '{known.label}': building it raised {type(error).__name__}: {error}") from error
        source = stack.enter_context(LiveSource(module, f"{known.label}, seed {seed}"))
        return _Base(source, select(source, known.expected(), dtype=None, weights_only=True, reason=""), None)

    def _report_drawn(self, seed: int) -> None:
        """Report the seed and version of a randomly initialized base, which has no digest."""
        self.note(f"the base was drawn from seed {seed}, not read; it is drawn again, and is in memory as a whole")
        then, now = self.adapters.manifest.versions, versions()
        others = [f"{name} {then[name]} then, {now.get(name)} now" for name in then if then[name] != now.get(name)]
        if others:
            self.note(f"other versions may draw other weights: {'; '.join(others)}")

    def _report_rounding(self, selection: Selection) -> None:
        """Report how often a merged value is rounded in a low-precision dtype."""
        changed = {*self.merged.merged, *self.merged.in_full}
        dtypes = [item.info.dtype for item in selection.items if item.name in changed]
        rounded = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.itemsize < 4})
        if rounded:
            self.note(
                f"{len(dtypes)} merged weights are rounded once, to {', '.join(rounded)}; --dtype fp32 keeps more"
            )


def check_merge_words(onto: str | None, dtype: str | None, max_shard_size: str | None) -> None:
    """Check the options; raises all problems at once."""
    problems = folder_problems(dtype, max_shard_size)
    if onto is not None and onto not in ONTO:
        problems.insert(0, f"--onto {onto}: give unpacked or original{did_you_mean(onto, ONTO)}")
    if problems:
        raise UserError(*problems)
