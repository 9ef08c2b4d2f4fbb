"""Receipt lines on fp8 products: which layers are converted and multiply so, and the scales of gathered weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from shardwise.parallel.fp8 import config_of, float8_layers, gathered_scales
from shardwise.plan.plan import gathers_fp8
from shardwise.receipts.receipt import Line
from shardwise.receipts.recorder import StepRecorder
from shardwise.train.session import Session

_SAME_SCALE = 1e-6  # the division is made in float64 and the scale kept in fp32


def fp8_lines(session: Session, recorder: StepRecorder) -> Iterator[Line]:
    """Yield the lines; none if neither plan nor module has fp8. Collective where weights are gathered in fp8."""
    plan, layers = session.plan, float8_layers(session.module)
    if plan.fp8 == "none" and not layers:
        return
    decided = session.applied.fp8
    planned = 0 if decided is None else len(decided.layers)
    others = "" if decided is None or not decided.kept else f"; not {decided.reasons()}"
    kind = plan.fp8 + (", emulated" if plan.fp8_emulate else "")
    kinds = Counter(kind if _as_planned(session, one) else "otherwise" for one in layers.values())
    found = " and ".join(f"{number} {text}" for text, number in kinds.items()) or "none"
    yield _same("fp8 layers", f"{planned} {kind}{others}", f"{found}{others}")
    if not plan.compile:
        called, multiplied = len(recorder.fp8_called), len(recorder.fp8_layers)
        found = str(multiplied) if called == len(layers) else f"{multiplied} of {called} that were called"
        ok = 0 < multiplied == called and len(layers) == planned  # a step may pass some blocks by
        yield Line(name="layers that multiply in fp8", planned=str(planned), found=found, ok=ok)
    if gathers_fp8(plan):
        yield _scale_line(session, planned)
    yield Line(name="fp8 against bf16", planned="by bench step --fp8", found="not measured in this run", ok=None)


def gathered_in_fp8(session: Session) -> frozenset[str]:
    """Return the parameters that the plan gathers in one byte an element."""
    decided = session.applied.fp8
    if decided is None or not gathers_fp8(session.plan):
        return frozenset()
    return frozenset(f"{name}.weight" for name in decided.layers)


def _as_planned(session: Session, layer: nn.Module) -> bool:
    return session.plan.fp8 != "none" and bool(getattr(layer, "config", None) == config_of(session.plan))


def _scale_line(session: Session, planned: int) -> Line:
    """Compare the scale of each gathered weight with the one that the whole weight has now.

    A rank casts its shard with its own copy of the scale, and reads the others' shards with it, too.
    """
    from torchao.float8.config import e4m3_dtype  # of AMD's MI300 it is another one

    decided, meshes, right = session.applied.fp8, session.applied.meshes, 0
    if decided is not None and meshes is not None:
        found = gathered_scales(session.module)  # a rank may have fewer than another
        shards = [found[name][0] if name in found else None for name in decided.layers]
        parts = [shard.abs().max().item() if shard is not None and shard.numel() else 0.0 for shard in shards]
        largest = torch.tensor(parts, device=session.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=meshes.data.get_group(meshes.data.ndim - 1))
        wanted = torch.finfo(e4m3_dtype).max / largest.double().clamp(min=1e-12)
        for name, value in zip(decided.layers, wanted.tolist(), strict=True):
            scale = found[name][1] if name in found else None
            right += scale is not None and abs(float(scale) - value) <= _SAME_SCALE * value
    return _same("scales of weights gathered in fp8", f"{planned} of whole weights", f"{right} of whole weights")


def _same(name: str, planned: str, found: str) -> Line:
    return Line(name=name, planned=planned, found=found, ok=planned == found)
