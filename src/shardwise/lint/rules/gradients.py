"""Rules about the loss and its gradients: scale, accumulation, reduction."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.lint.rank_tests import is_world_size
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Script, called_name, has_word, is_constant, keyword, owner
from shardwise.lint.training_calls import (
    conditional,
    divisions,
    every_n,
    loss_of,
    optimizer_steps,
)


@rule(
    "SW201",
    "loss-divided-by-world-size",
    message="""The loss is divided by the number of ranks, and DDP averages too: gradients are world_size times too
    small.""",
    why="DistributedDataParallel sums gradients over ranks and divides by world_size itself.",
    fix="leave the division out; the mean over the rank's own batch is what DDP expects",
)
def loss_divided_by_world_size(script: Script) -> Iterator[Fault]:
    """backward() of a loss divided by the world size, with DDP and no factor that undoes it."""
    multiplied = any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and (is_world_size(script, node.left) or is_world_size(script, node.right))
        for node in script.nodes
    )
    if not script.uses_ddp or multiplied or script.mentions("register_comm_hook", "all_reduce"):
        return
    for backward in script.trains:
        for divisor in divisions(script, loss_of(script, backward), script.scope(backward)):
            if is_world_size(script, divisor):
                yield script.fault(divisor)


@rule(
    "SW202",
    "loss-not-divided",
    message="Gradients of several micro batches are summed and the loss is not divided: they are n times too large.",
    why="""backward() adds to .grad. The sum of n means is n times the mean over the n micro batches: clipping cuts n
    times more, and SGD steps n times further.""",
    fix="divide the loss by the number of micro batches before backward()",
)
def loss_not_divided(script: Script) -> Iterator[Fault]:
    """A step every n micro batches, and a mean loss that nothing divides."""
    for step in optimizer_steps(script):
        if every_n(script, step) is None or not script.loops(step):
            continue
        loop = script.loops(step)[0]
        for backward in script.trains:
            if script.loops(backward)[:1] != [loop] or script.is_accelerator(backward.func):
                continue
            loss = loss_of(script, backward)
            made = script.origin(loss)
            if (
                _is_mean(script, made)
                and not list(divisions(script, loss, script.scope(backward)))
                and not _scaled(script, loop)
            ):
                yield script.fault(backward)


def _is_mean(script: Script, made: ast.expr | None) -> bool:
    """Whether an expression is surely a mean over the micro batch."""
    if not isinstance(made, ast.Call):
        return False
    if script.name(made.func).startswith("torch.nn.functional."):
        reduction = keyword(made, "reduction")
        return reduction is None or getattr(reduction, "value", "") == "mean"
    if called_name(made) == "mean":
        return True
    criterion = script.origin(made.func) if isinstance(made.func, ast.Name | ast.Attribute) else None
    if (
        isinstance(criterion, ast.Call)
        and script.name(criterion.func).startswith("torch.nn.")
        and "Loss" in called_name(criterion)
    ):
        reduction = keyword(criterion, "reduction")
        return reduction is None or getattr(reduction, "value", "") == "mean"
    return False


def _scaled(script: Script, loop: ast.AST) -> bool:
    """Whether gradients themselves are divided or multiplied in a loop."""
    grads = [node for node in ast.walk(loop) if isinstance(node, ast.Attribute) and node.attr == "grad"]
    methods = {called_name(call) for call in script.calls_in(loop)}
    return bool(grads) or bool(methods & {"_foreach_div_", "_foreach_mul_", "scale_gradients"})


@rule(
    "SW203",
    "step-every-micro-batch",
    message="""The loss is divided for accumulation, and the optimizer steps after every micro batch: nothing
    accumulates.""",
    why="""Each update uses one micro batch with gradients n times too small: the batch is not larger, the steps are
    smaller.""",
    fix="step and clear gradients only every n micro batches: if (i + 1) % n == 0",
)
def step_every_micro_batch(script: Script) -> Iterator[Fault]:
    """loss / accumulation_steps, and backward, step and zero_grad one after the other in each iteration."""
    for step in optimizer_steps(script):
        if conditional(script, step) or not script.loops(step) or script.mentions("accumulate"):
            continue
        loop = script.loops(step)[0]
        for backward in script.trains:
            if script.loops(backward)[:1] != [loop] or conditional(script, backward):
                continue
            for divisor in divisions(script, loss_of(script, backward), loop):
                if has_word(ast.unparse(divisor), "accum", "accumulation", "accumulate", "accumulations"):
                    yield script.fault(step)


@rule(
    "SW204",
    "gradients-cleared-too-often",
    message="""zero_grad() runs for every micro batch and step() for every n-th: all but the last one's gradients are
    lost.""",
    why="Accumulation lives in .grad, which zero_grad() clears before the step has used it.",
    fix="clear gradients right after the step, in the same if",
)
def gradients_cleared_too_often(script: Script) -> Iterator[Fault]:
    """zero_grad() in each iteration, step() under `if i % n == 0` of the same loop."""
    steps = [call for call in optimizer_steps(script) if every_n(script, call) is not None]
    for clear in script.method_calls("zero_grad"):
        loops = script.loops(clear)
        if conditional(script, clear) or not loops:
            continue
        for step in steps:
            backwards = [
                one for one in script.trains if script.loops(one)[:1] == loops[:1] and not conditional(script, one)
            ]
            if script.loops(step)[:1] == loops[:1] and backwards:
                yield script.fault(clear)
                break


@rule(
    "SW205",
    "gradients-never-cleared",
    message="Gradients are never cleared: each step uses the sum of all gradients since the start.",
    why="backward() adds to .grad, and neither zero_grad() nor .grad = None is in the script.",
    fix="call optimizer.zero_grad() after each step",
)
def gradients_never_cleared(script: Script) -> Iterator[Fault]:
    """A loop with backward() and step() in a script without zero_grad."""
    if script.mentions("zero_grad", "set_to_none", "grad", "zero_", "Trainer", "LightningModule"):
        return
    for step in optimizer_steps(script):
        loops = script.loops(step)
        if script.made_by(owner(step)).startswith("torch.optim.") and loops:
            together = [one for one in script.trains if script.loops(one)[:1] == loops[:1]]
            if together:
                yield script.fault(step)


@rule(
    "SW206",
    "no-sync-never-left",
    message="Every backward() is inside no_sync(): gradients are never reduced, and the ranks' weights drift apart.",
    why="DDP and FSDP reduce in the first backward after no_sync(); here the optimizer steps without one.",
    fix="leave the last micro batch of each step outside: with model.no_sync() if not last else nullcontext()",
)
def no_sync_never_left(script: Script) -> Iterator[Fault]:
    """`with model.no_sync():` around the only backward calls of a function that also steps."""
    for block in [node for node in script.nodes if isinstance(node, ast.With)]:
        entered = [item.context_expr for item in block.items]
        if not any(isinstance(one, ast.Call) and called_name(one) == "no_sync" for one in entered):
            continue
        function = script.scope(block)
        backwards = [one for one in script.trains if script.scope(one) is function]
        inner = [one for one in backwards if script.inside(one, block)]
        step = next((one for one in optimizer_steps(script) if script.scope(one) is function), None)
        free = [one for one in backwards if not _under_no_sync(script, one)]
        helpers = {called_name(call) for call in script.calls_in(function)} & set(script.functions)
        calls = any(script.inside(one, script.functions[name]) for name in helpers for one in script.trains)
        if inner and not free and step is not None and not calls and not conditional(script, block):
            yield script.fault(block)


def _under_no_sync(script: Script, node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.With)
        and any(
            isinstance(item.context_expr, ast.Call) and called_name(item.context_expr) == "no_sync"
            for item in one.items
        )
        for one in script.above(node)
    )


@rule(
    "SW207",
    "no-sync-without-forward",
    severity="warning",
    message="no_sync() is around backward() alone: DDP reduces gradients all the same.",
    why="DDP decides in forward() whether the next backward reduces; no_sync() that begins after it changes nothing.",
    fix="put the forward pass inside no_sync() too",
)
def no_sync_without_forward(script: Script) -> Iterator[Fault]:
    """`with ddp.no_sync(): loss.backward()`, nothing else in it."""
    for block in [node for node in script.nodes if isinstance(node, ast.With)]:
        entered = [item.context_expr for item in block.items]
        models = [owner(one) for one in entered if isinstance(one, ast.Call) and called_name(one) == "no_sync"]
        if not any("ddp" in script.wrapped(model, block) for model in models):
            continue
        calls = [call for one in block.body for call in script.calls_in(one)]
        if calls and all(called_name(call) in ("backward", "scale") for call in calls):
            yield script.fault(block)


@rule(
    "SW208",
    "accumulation-without-no-sync",
    severity="warning",
    message="DDP reduces all gradients in every micro batch; only the last one of a step needs it.",
    why="Without no_sync() each of the n backward passes of a step all-reduces every gradient: n times the traffic.",
    fix="run all but the last micro batch of a step under model.no_sync(), forward and backward",
)
def accumulation_without_no_sync(script: Script) -> Iterator[Fault]:
    """A DDP model, a step every n micro batches, and no no_sync in the script."""
    if not script.uses_ddp or script.mentions("no_sync", "require_backward_grad_sync", "accumulate"):
        return
    for step in optimizer_steps(script):
        test = every_n(script, step)
        loops = script.loops(step)
        if test is None or not loops:
            continue
        for backward in script.trains:
            if (
                script.loops(backward)[:1] == loops[:1]
                and not conditional(script, backward)
                and _through_ddp(script, loops[0])
            ):
                yield script.fault(backward)


def _through_ddp(script: Script, loop: ast.AST) -> bool:
    return any(
        "ddp" in script.wrapped(call.func, call)
        for call in script.calls_in(loop)
        if isinstance(call.func, ast.Name | ast.Attribute)
    )


@rule(
    "SW209",
    "backward-under-autocast",
    severity="warning",
    message="backward() runs under autocast: gradients of layers that are kept in float32 are rounded to 16 bits.",
    why="""PyTorch's documentation advises against it: backward operations already run in the type of their forward, but
    under autocast those of layers under autocast(enabled=False), and of custom functions, are cast anew.""",
    fix="end the autocast block after the loss, and call backward() outside",
)
def backward_under_autocast(script: Script) -> Iterator[Fault]:
    """backward() inside `with autocast(...)`."""
    for backward in script.trains:
        for one in script.above(backward):
            if isinstance(one, ast.FunctionDef):
                break
            entered = [script.origin(item.context_expr) for item in one.items] if isinstance(one, ast.With) else []
            casts = [context for context in entered if script.is_torch(context, "autocast")]
            off = any(isinstance(cast, ast.Call) and is_constant(keyword(cast, "enabled"), False) for cast in casts)
            if casts and not off:
                yield script.fault(backward)
            if casts:
                break


@rule(
    "SW210",
    "gradients-reduced-twice",
    message="Gradients of a DDP model are reduced once more by hand.",
    why="DDP has reduced and averaged them in backward(): a second sum makes them world_size times too large.",
    fix="leave the loop over gradients out, or do not wrap the model in DDP",
)
def gradients_reduced_twice(script: Script) -> Iterator[Fault]:
    """all_reduce(p.grad) for the parameters of a DDP model."""
    for call, model, _ in _reduced_gradients(script):
        if "ddp" in script.wrapped(model, call) and not script.mentions("no_sync"):
            yield script.fault(call)


@rule(
    "SW211",
    "gradients-summed-not-averaged",
    message="Gradients are summed over ranks and never divided: they are world_size times too large.",
    why="all_reduce() sums by default; the mean over all ranks' samples needs a division by world_size.",
    fix="use op=dist.ReduceOp.AVG, or divide by dist.get_world_size()",
)
def gradients_summed_not_averaged(script: Script) -> Iterator[Fault]:
    """all_reduce(p.grad) with the default SUM in a script that divides by no world size."""
    for call, model, loop in _reduced_gradients(script):
        operation = script.name(keyword(call, "op")) or (script.name(call.args[1]) if len(call.args) > 1 else "")
        divided = any(
            (isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult))
            or (isinstance(node, ast.Call) and called_name(node) in ("div_", "div", "mul_"))
            for node in ast.walk(script.scope(loop))
        )
        means = [one for one in script.trains if _is_mean(script, script.origin(loss_of(script, one)))]
        if operation.rpartition(".")[2] in ("", "SUM") and not divided and means and not script.wrapped(model, call):
            yield script.fault(call)


def _reduced_gradients(script: Script) -> Iterator[tuple[ast.Call, ast.expr, ast.For]]:
    """``all_reduce(p.grad)`` in a loop over ``model.parameters()``: the call, the model, the loop."""
    for call in script.calls:
        if script.collective(call) != "all_reduce" or not call.args:
            continue
        for loop in script.loops(call):
            model = script.parameters_of(loop.iter) if isinstance(loop, ast.For) else None
            if model is not None and ".grad" in ast.unparse(call.args[0]) and isinstance(loop, ast.For):
                yield call, model, loop


@rule(
    "SW212",
    "loss-divided-by-micro-batches-of-unequal-tokens",
    message="Each micro batch's mean is over its own tokens: tokens of short micro batches count more than others.",
    why="""With ignored labels (ignore_index) micro batches have different numbers of tokens, and the mean of means is
    not the mean over the tokens of the step, neither over micro batches nor over ranks.""",
    fix="sum the loss (reduction='sum') and divide by the tokens of the whole step on all ranks",
)
def loss_divided_by_micro_batches(script: Script) -> Iterator[Fault]:
    """cross_entropy(ignore_index=...) as a mean, divided by the number of accumulation steps."""
    for backward in script.trains:
        loss = loss_of(script, backward)
        function = script.scope(backward)
        divisors = [
            one
            for one in divisions(script, loss, function)
            if has_word(ast.unparse(one), "accum", "accumulation", "accumulate", "accumulations")
        ]
        if divisors and any(_ragged_mean(script, one) for one in _makers(script, loss, function)):
            yield script.fault(divisors[0])


def _makers(script: Script, loss: ast.expr | None, function: ast.AST) -> Iterator[ast.expr]:
    """Calls that the loss was computed by."""
    names = {part.id for part in ast.walk(loss) if isinstance(part, ast.Name)} if loss is not None else set()
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names:
                yield from (part for part in ast.walk(value) if isinstance(part, ast.Call))


def _ragged_mean(script: Script, call: ast.expr) -> bool:
    if not isinstance(call, ast.Call) or not _is_mean(script, call):
        return False
    criterion = script.origin(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else None
    made = call if script.name(call.func).startswith("torch.nn.functional.") else criterion
    return isinstance(made, ast.Call) and "ross" in called_name(made) and keyword(made, "ignore_index") is not None


@rule(
    "SW213",
    "accelerate-divides-already",
    message="The loss is divided twice by the accumulation steps: gradients are n times too small.",
    why="Accelerator(gradient_accumulation_steps=n).backward() divides the loss by n itself.",
    fix="leave the division to accelerator.backward()",
)
def accelerate_divides_already(script: Script) -> Iterator[Fault]:
    """loss / n before accelerator.backward(), where the Accelerator was given gradient_accumulation_steps."""
    for backward in script.trains:
        accelerator = script.origin(owner(backward))
        if not script.is_accelerator(backward.func) or not isinstance(accelerator, ast.Call):
            continue
        given = keyword(accelerator, "gradient_accumulation_steps")
        if given is None or is_constant(given, 1):
            continue
        for divisor in divisions(script, loss_of(script, backward), script.scope(backward)):
            same = ast.unparse(divisor) in (
                ast.unparse(given),
                f"{ast.unparse(owner(backward) or given)}.gradient_accumulation_steps",
            )
            if same or has_word(ast.unparse(divisor), "accum", "accumulation"):
                yield script.fault(divisor)


@rule(
    "SW214",
    "backward-past-accelerate",
    message="""loss.backward() goes past the Accelerator: the loss is neither scaled for fp16 nor divided for
    accumulation.""",
    why="""accelerator.backward() divides by gradient_accumulation_steps and scales for fp16; loss.backward() does
    neither.""",
    fix="call accelerator.backward(loss)",
)
def backward_past_accelerate(script: Script) -> Iterator[Fault]:
    """loss.backward() in a script whose Accelerator accumulates or uses fp16."""
    from shardwise.lint.fixes import replace

    accelerators = [call for call in script.calls if script.name(call.func) == "accelerate.Accelerator"]
    half = any(getattr(keyword(call, "mixed_precision"), "value", "") == "fp16" for call in accelerators)
    accumulates = any(
        keyword(call, "gradient_accumulation_steps") is not None
        and not is_constant(keyword(call, "gradient_accumulation_steps"), 1)
        for call in accelerators
    )
    names = {ast.unparse(one.targets[0]) for call in accelerators if isinstance(one := script.parent[call], ast.Assign)}
    if not (half or accumulates) or len(names) != 1 or any(script.is_accelerator(one.func) for one in script.trains):
        return
    for backward in script.trains:
        loss = loss_of(script, backward)
        divided = any(divisions(script, loss, script.scope(backward)))
        if not half and divided:  # by hand, as it has to be without the Accelerator's
            continue
        if not backward.args and loss is owner(backward) and isinstance(loss, ast.Name):
            name, known = min(names), {script.scope(call) for call in accelerators} | {script.tree}
            given = ", ".join([loss.id, *(ast.unparse(one) for one in backward.keywords)])
            edit = replace(backward, f"{name}.backward({given})")
            safe = not divided and known <= {script.scope(backward), script.tree}
            yield script.fault(backward, "", *((edit,) if safe else ()))


@rule(
    "SW215",
    "summed-loss-shown-as-mean",
    severity="warning",
    message="The loss that is shown is the sum over ranks: it is world_size times too large.",
    why="all_reduce() sums by default, and nothing divides by the number of ranks before the value is read.",
    fix="use op=dist.ReduceOp.AVG, or divide by dist.get_world_size()",
)
def summed_loss_shown(script: Script) -> Iterator[Fault]:
    """all_reduce(loss) with SUM of a mean loss, then loss.item(), and no division in the function."""
    for call in script.calls:
        if script.collective(call) != "all_reduce" or not call.args or not isinstance(call.args[0], ast.Name):
            continue
        name = call.args[0].id
        operation = script.name(keyword(call, "op")) or (script.name(call.args[1]) if len(call.args) > 1 else "")
        function = script.scope(call)
        divided = any(
            isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div) for node in ast.walk(function)
        )
        divided = divided or any(called_name(one) in ("div", "div_", "mean") for one in script.calls_in(function))
        read = any(
            called_name(one) == "item" and ast.unparse(owner(one) or one) == name and one.lineno >= call.lineno
            for one in script.calls_in(function)
        )
        made = script.origin(call.args[0])
        for _ in range(3):  # of `loss.detach().clone()`
            if isinstance(made, ast.Call) and called_name(made) in ("detach", "clone"):
                made = script.origin(owner(made))
        if operation.rpartition(".")[2] in ("", "SUM") and read and not divided and _is_mean(script, made):
            yield script.fault(call)
