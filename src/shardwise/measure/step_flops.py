"""Count the work of one live step: FLOPs by operator, tokens, and bytes of every collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from shardwise.distributed.process_group import gather_ints
from shardwise.measure.collectives import OTHER, Axes, Collective, CollectiveRecorder
from shardwise.measure.utilisation import StepWork
from shardwise.parallel.lora.adapters import adapters_of
from shardwise.train.session import Session
from shardwise.train.step import Micro, Step

COUNTED_STEP = 1
"""Step of a process to skip: the first, which is neither timed nor checked by receipts."""
TRIES = 3
"""Steps to try; if none can be counted, the rest runs without."""
_PHASES = ("forward", "backward", "clip", "optimizer")
_BACKWARD_OF_FORWARD = 2.5
"""A flash attention's backward has five products where its forward has two (Dao et al., arXiv 2205.14135)."""
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward")
"""Products of rows with the weights of their experts, which torch's counter does not know."""


class WorkRecorder(CollectiveRecorder):
    """Recorder of collectives that also counts FLOPs by torch's ``torch.utils.flop_counter``.

    For a sharded tensor the local part counts. ``attention_forward`` and ``attention_backward`` are those
    of fused attention, its full square; ``batched`` those of batched products in forward, which attention that is
    not fused consists of.
    """

    def __init__(self, phase: Callable[[], str], axes: Axes | None = None) -> None:
        super().__init__(phase, axes)
        self.total = self.attention_forward = self.attention_backward = self.batched = self.forward = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet is not None:
            self._count(packet, args, kwargs or {}, result)
        return result

    def _count(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = packet.__name__
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            flops = _cpu_attention(name, args)
        elif packet in flop_registry:
            args, kwargs, result = _pytree.tree_map_only(DTensor, _local, (args, kwargs, result))
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
        elif packet._qualified_op_name in _GROUPED:
            flops = _grouped_product(args, result)
        elif packet._qualified_op_name == "bitsandbytes::gemm_4bit":
            flops = _packed_product(args)
        else:
            return
        self.total += flops
        forward = self._phase() == "forward"
        self.forward += flops if forward else 0.0
        if "attention" in name:
            if "backward" in name:
                self.attention_backward += flops
            else:
                self.attention_forward += flops
        elif name in ("bmm", "baddbmm") and forward:
            self.batched += flops


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local()


def _grouped_product(args: Any, result: Any) -> float:
    """Count a grouped product: each row with one group's matrix; both gradients of transformers' fallback at once."""
    rows, matrices = args[0], args[1]
    return 2.0 * rows.numel() * matrices.shape[-1] * (len(result) if isinstance(result, tuple) else 1)


def _packed_product(args: Any) -> float:
    """Count bitsandbytes' product of x [..., inputs] with a quantized weight [outputs, inputs]."""
    outputs, inputs = args[2]
    return 2.0 * args[0].numel() * outputs if inputs else 0.0


def _cpu_attention(name: str, args: Any) -> float:
    """Count the CPU's fused attention: two products over the full square, five in backward."""
    first = 1 if name.endswith("_backward") else 0
    query, key, value = (tuple(tensor.shape) for tensor in args[first : first + 3])
    batch, heads, rows, width = query
    forward = 2.0 * batch * heads * rows * key[-2] * (width + value[-1])
    return forward * _BACKWARD_OF_FORWARD if first else forward


class FlopsRecorder:
    """Observer that counts a session's first step; ``work`` is then set on every rank.

    Args:
        axes: gives the axis of a collective's ranks for a session, or ``None`` for a plan without model parallelism.
    """

    def __init__(self, axes: Callable[[Session], Axes | None] | None = None) -> None:
        self.work: StepWork | None = None
        self._axes = axes
        self._seen = 0
        self._recorder: WorkRecorder | None = None

    def on_prepared(self, session: Session) -> None:
        """Do nothing."""

    def on_step_start(self, session: Session, step: Step) -> None:
        """Start counting, unless another recorder is active."""
        self._seen += 1
        if not self._looks or _get_current_dispatch_mode_stack():
            return
        self._recorder = WorkRecorder(lambda: session.phase, None if self._axes is None else self._axes(session))
        self._recorder.__enter__()

    def on_gradients(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Add up the counts of all ranks. Collective."""
        recorder = self._end()
        if self._looks:
            self.work = _full(session, step, recorder)

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Count a later step instead."""
        self._end()

    @property
    def _looks(self) -> bool:
        """Return whether to count this step; the same on every rank."""
        return self.work is None and COUNTED_STEP <= self._seen < COUNTED_STEP + TRIES

    def _end(self) -> WorkRecorder | None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)
        return recorder


def _full(session: Session, step: Step, recorder: WorkRecorder | None) -> StepWork | None:
    """Sum over ranks; ``None`` if a rank could not count."""
    place, micros = session.place, [micro for micro in step.micros if not micro.padding]
    positions = token_positions(micros)
    once = place.tp == place.pp == 0
    fused, unfused = (0.0, 0.0) if recorder is None else _attention_square(session, recorder)
    mine = [
        int(recorder is not None),
        -1 if positions is None else positions * once,
        *(round(value) for value in (fused + unfused, *((recorder.total, recorder.forward) if recorder else (0, 0)))),
    ]
    rows = gather_ints(mine, session.ranks)
    if not all(row[0] for row in rows):
        return None
    tokens = None if any(row[1] < 0 for row in rows) else sum(row[1] for row in rows)
    square, total, forward = (float(sum(row[index] for row in rows)) for index in (2, 3, 4))
    if session.plan.compile:
        configured = configured_square(session.module, tokens, _length(micros, session.plan.dims.cp))
        square = math.nan if configured is None else configured
    return _step_work(session, tokens, square, total, forward, recorder)


def _step_work(
    session: Session, tokens: int | None, square: float, total: float, forward: float, recorder: WorkRecorder | None
) -> StepWork:
    parameters, frozen = _parameters(session)
    idle = unused_parameters(session)
    unknown: dict[str, str] = {}
    traffic = None if recorder is None else _traffic(session, recorder.collectives)
    if session.plan.compile and session.plan.dims.splits_model:
        traffic, unknown["traffic"] = None, "compiled blocks send what torch's dispatcher does not see"
    model: float | None = (3.0 - frozen / max(1, parameters)) * forward
    if tokens:
        model = (6.0 * (parameters - idle) - 2.0 * max(0.0, frozen - idle)) * tokens + 3.0 * square
    executed: float | None = total
    if session.plan.compile:
        unknown["executed FLOPs"] = "compiled blocks run products that torch's dispatcher does not see"
        executed = None
        if not tokens or math.isnan(square):
            model = None
            unknown["model FLOPs"] = "the model is compiled, and its configuration does not describe its attention"
    elif not tokens and session.applied.pipeline is not None:
        model, unknown["model FLOPs"] = None, "the samples are not tokens, and a pipeline's forward cannot be separated"
    return StepWork(
        parameters=parameters,
        tokens=tokens,
        model_flops=model,
        executed_flops=executed,
        traffic=traffic,
        unknown=unknown,
    )


def _parameters(session: Session) -> tuple[int, int]:
    """Count the model's weights, dequantized, and those with adapters, which get no gradient.

    Weights that the user froze count as trained, as the convention has it.
    """
    spec, adapters = session.spec, adapters_of(session.module)
    if adapters is None:
        return spec.num_parameters, 0
    parameters = adapters.dequantized(spec)
    return parameters, parameters - spec.num_trainable


def unused_parameters(session: Session) -> float:
    """Count the weights of experts that a token does not use, by the choices of the last step."""
    routing = session.routing
    if not routing.layers or not routing.counts.numel():
        return 0.0
    sizes = {p.name: p.num_elements for p in session.spec.parameters}
    chosen = (routing.counts.sum(-1) / routing.tokens.clamp_min(1.0)).tolist()
    return sum(
        sum(sizes.get(name, 0) for name in layer.parameters) * (1.0 - each / layer.num_experts)
        for layer, each in zip(routing.layers, chosen, strict=True)
    )


def _attention_square(session: Session, recorder: WorkRecorder) -> tuple[float, float]:
    """Return forward FLOPs of this rank's attention, fused and not, without recompute.

    A backward occurs once for each forward, so a fused one is taken from there. A pipeline's phases are not separated:
    of its batched products, which are one part forward and two parts backward, a third is taken.
    """
    fused = recorder.attention_backward / _BACKWARD_OF_FORWARD or recorder.attention_forward
    piped = session.applied.pipeline is not None
    return fused, recorder.batched / 3.0 if piped else recorder.batched


def _length(micros: Iterable[Micro], cp: int) -> int | None:
    """Return positions of one sample on all its ranks; ``None`` if inputs are not token ids."""
    first = next(iter(micros), None)
    found = None if first is None else token_positions([first])
    if first is None or found is None:
        return None
    samples = next(leaf.shape[0] for leaf in _pytree.tree_leaves(first.inputs) if isinstance(leaf, torch.Tensor))
    return found // samples * cp if samples else None


def token_positions(micros: Iterable[Micro]) -> int | None:
    """Count positions of token ids with padding.

    ``None`` if inputs are not ids [samples, length].
    """
    positions = 0
    for micro in micros:
        shapes = {
            tuple(leaf.shape)
            for leaf in _pytree.tree_leaves(micro.inputs)
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and not leaf.is_floating_point()
        }
        if len(shapes) != 1:
            return None
        positions += math.prod(shapes.pop())
    return positions


def configured_square(module: Any, tokens: int | None, length: int | None) -> float | None:
    """Compute a step's attention square from a Hugging Face configuration; ``None`` if unknown."""
    config = getattr(module, "config", None)
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not (tokens and length and isinstance(heads, int) and isinstance(width, int) and isinstance(layers, int)):
        return None
    head = getattr(config, "head_dim", None) or width // heads
    return 4.0 * tokens * length * layers * heads * head


def _traffic(session: Session, collectives: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """Sum message bytes by axis and collective, without the session's and the user's own."""
    found: dict[str, dict[str, int]] = {}
    plan = session.plan
    for item in collectives:
        if item.phase not in _PHASES:
            continue
        axis = item.axis
        if axis == OTHER and not plan.dims.splits_model:
            replicas = "dp_replicate" if item.name == "all_reduce" else "dp_shard"
            axis = replicas if plan.parsed.base == "hsdp" else "dp"
        messages = found.setdefault(axis, {})
        messages[item.name] = messages.get(item.name, 0) + item.num_bytes
    return found
