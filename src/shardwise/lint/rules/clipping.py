"""Rules about the update: clipping, loss scaling, schedules."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.lint.fixes import replace
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Script, argument, called_name, is_constant, keyword, owner
from shardwise.lint.training_calls import conditional, every_n, is_scaler, is_scheduler, optimizer_steps

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


@rule(
    "SW601",
    "local-norm-clipped",
    message="Each rank clips by the norm of its own shards: ranks scale their gradients differently.",
    why="""torch.nn.utils.clip_grad_norm_ sees the local part of FSDP1's flat parameters; the global norm, which
    model.clip_grad_norm_() computes over ranks, is larger.""",
    fix="call model.clip_grad_norm_(max_norm)",
)
def local_norm_clipped(script: Script) -> Iterator[Fault]:
    """torch.nn.utils.clip_grad_norm_(model.parameters()) for a FullyShardedDataParallel model."""
    for call in script.torch_calls("clip_grad_norm_"):
        model = script.parameters_of(call.args[0]) if call.args else None
        if model is None or "fsdp1" not in script.wrapped(model, call):
            continue
        if any(ast.unparse(owner(one) or one) == ast.unparse(model) for one in script.method_calls("clip_grad_norm_")):
            continue  # this one is for a model that is wrapped otherwise
        bound = argument(call, 1, "max_norm")
        simple = bound is not None and len(call.args) + len(call.keywords) == 2 and isinstance(model, ast.Name)
        code = f"{ast.unparse(model)}.clip_grad_norm_({ast.unparse(bound)})" if bound is not None else ""
        yield script.fault(call, "", *((replace(call, code),) if simple else ()))


@rule(
    "SW602",
    "scaled-gradients-clipped",
    message="""Gradients are clipped while they are still scaled: the bound is as many times too small as the loss is
    scaled.""",
    why="GradScaler multiplies the loss by 65,536 at first; clipping needs scaler.unscale_(optimizer) before it.",
    fix="call scaler.unscale_(optimizer) before clipping",
)
def scaled_gradients_clipped(script: Script) -> Iterator[Fault]:
    """clip_grad_* between scaler.scale(loss).backward() and scaler.step(), and no unscale_ above it."""
    for step in script.method_calls("step"):
        if not is_scaler(script, owner(step)) or not step.args:
            continue
        scaler, function = owner(step), script.scope(step)
        same = [call for call in script.calls if script.scope(call) is function and call.lineno <= step.lineno]
        unscaled = [
            call.lineno
            for call in same
            if called_name(call) == "unscale_" and ast.unparse(owner(call) or call) == ast.unparse(scaler or call)
        ]
        scaled = [
            call.lineno
            for call in same
            if called_name(call) == "scale" and ast.unparse(owner(call) or call) == ast.unparse(scaler or call)
        ]
        for call in same:
            if call.lineno < max(scaled, default=0):
                continue  # of another scaler or another backward
            if script.is_torch(call, *_CLIPS) and not any(line < call.lineno for line in unscaled):
                made = script.origin(scaler)
                off = isinstance(made, ast.Call) and keyword(made, "enabled")
                if not is_constant(off or None, False):
                    yield script.fault(call)


@rule(
    "SW603",
    "scaler-never-updated",
    message="scaler.update() is missing: the second step raises RuntimeError.",
    why='"step() has already been called since the last update()": update() ends each step and adapts the scale.',
    fix="call scaler.update() after scaler.step(optimizer)",
)
def scaler_never_updated(script: Script) -> Iterator[Fault]:
    """scaler.step() in a script without an update() of the scaler."""
    updated = any(_updates_a_scaler(script, call) for call in script.method_calls("update"))
    for step in script.method_calls("step"):
        made = script.origin(owner(step))
        off = isinstance(made, ast.Call) and is_constant(keyword(made, "enabled"), False)
        if is_scaler(script, owner(step)) and step.args and not updated and not off:
            yield script.fault(step)


def _updates_a_scaler(script: Script, call: ast.Call) -> bool:
    """Whether a scaler is updated by ``call``, or nothing shows what is."""
    made = script.origin(owner(call))
    unknown = not isinstance(made, ast.Call) and not call.args and not call.keywords
    return unknown or is_scaler(script, owner(call))


@rule(
    "SW604",
    "bf16-loss-scaled",
    severity="warning",
    message="The loss is scaled for bfloat16, which needs no scaling.",
    why="""bfloat16 has the exponents of float32, so gradients do not vanish. The scaler still searches all of them for
    infinities in each step, and doubles its scale every 2,000 steps until that alone makes infinities, and steps are
    skipped.""",
    fix="leave GradScaler out, or give it enabled=False",
)
def bf16_loss_scaled(script: Script) -> Iterator[Fault]:
    """GradScaler() where every autocast in the script has dtype=torch.bfloat16."""
    casts = script.torch_calls("autocast")
    types = [argument(call, 1, "dtype") for call in casts]
    several = [script.values(one) for one in types if isinstance(one, ast.Name)]
    if not casts or {script.name(script.origin(one)) for one in types} != {"torch.bfloat16"}:
        return
    if any(script.name(one) != "torch.bfloat16" for values in several for one in values):
        return
    for call in script.torch_calls("GradScaler"):
        if keyword(call, "enabled") is None and any(
            is_scaler(script, owner(one)) for one in script.method_calls("scale")
        ):
            yield script.fault(call)


@rule(
    "SW605",
    "scaler-not-sharded",
    message="Each rank looks for infinities in its own shards: one skips the step that the others take.",
    why="""Under FSDP1 a gradient is spread over ranks. torch's GradScaler does not agree over ranks on a skip, and the
    shards drift apart; ShardedGradScaler reduces the finding.""",
    fix="use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
)
def scaler_not_sharded(script: Script) -> Iterator[Fault]:
    """torch.amp.GradScaler in a script that wraps in FullyShardedDataParallel."""
    if not script.torch_calls("FullyShardedDataParallel") or script.mentions("ShardedGradScaler"):
        return
    for call in script.torch_calls("GradScaler"):
        if not is_constant(keyword(call, "enabled"), False) and not script.torch_calls("DistributedDataParallel"):
            yield script.fault(call)


@rule(
    "SW606",
    "schedule-steps-too-often",
    message="The schedule advances with every micro batch, the optimizer with every n-th: it ends n times too early.",
    why="scheduler.step() counts optimizer steps; here it is called n times for each of them.",
    fix="move scheduler.step() into the if, behind optimizer.step()",
)
def schedule_steps_too_often(script: Script) -> Iterator[Fault]:
    """scheduler.step() in each iteration, optimizer.step() under `if i % n == 0` of the same loop."""
    steps = [call for call in optimizer_steps(script) if every_n(script, call) is not None]
    for call in script.method_calls("step"):
        loops = script.loops(call)
        if not is_scheduler(script, owner(call)) or conditional(script, call) or not loops:
            continue
        backwards = [one for one in script.trains if script.loops(one)[:1] == loops[:1]]
        if backwards and any(script.loops(step)[:1] == loops[:1] for step in steps):
            yield script.fault(call)


@rule(
    "SW607",
    "clipped-past-accelerate",
    message="Gradients are clipped while they are still scaled for fp16: the bound is far too small.",
    why="""With mixed_precision='fp16' the Accelerator scales the loss; accelerator.clip_grad_norm_ unscales before it
    clips.""",
    fix="call accelerator.clip_grad_norm_(model.parameters(), max_norm)",
)
def clipped_past_accelerate(script: Script) -> Iterator[Fault]:
    """torch.nn.utils.clip_grad_norm_ in a script whose Accelerator uses fp16."""
    made = [call for call in script.calls if script.name(call.func) == "accelerate.Accelerator"]
    half = any(getattr(keyword(call, "mixed_precision"), "value", "") == "fp16" for call in made)
    if not half or script.mentions("unscale_gradients"):
        return
    for call in script.torch_calls(*_CLIPS):
        for one in script.trains:
            if script.is_accelerator(one.func) and script.scope(one) is script.scope(call):
                code = f"{ast.unparse(owner(one) or one)}.{called_name(call)}"
                known = {one.arg for one in call.keywords} <= {"parameters", "max_norm", "norm_type", "clip_value"}
                yield script.fault(call, "", *((replace(call.func, code),) if known else ()))
                break


@rule(
    "SW608",
    "clipped-before-backward",
    message="Gradients are clipped before this step's backward(): what the optimizer uses is not clipped.",
    why="Clipping changes the .grad that is there; the backward() below adds to it or writes it anew.",
    fix="clip between backward() and step()",
)
def clipped_before_backward(script: Script) -> Iterator[Fault]:
    """clip_grad_* above the only backward() of a loop body, with no other below."""
    for call in script.torch_calls(*_CLIPS):
        loops = script.loops(call)
        backwards = [one for one in script.trains if script.loops(one)[:1] == loops[:1]]
        steps = [one for one in optimizer_steps(script) if script.loops(one)[:1] == loops[:1]]
        if not loops or not backwards or not steps or conditional(script, call):
            continue
        first, last = min(one.lineno for one in backwards), max(one.lineno for one in steps)
        if call.lineno < first < last and not any(step.lineno < first for step in steps):
            yield script.fault(call)
