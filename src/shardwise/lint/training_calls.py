"""What training loops are made of: optimizers, schedulers, scalers, loaders, accumulation."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.lint.script import Loop, Script, called_name, has_word, keyword, owner


def is_optimizer(script: Script, node: ast.expr | None) -> bool:
    """Whether ``node`` is an optimizer: by what made it, else by its name."""
    made = script.made_by(node)
    if made:
        return (made.startswith("torch.optim.") and "lr_scheduler" not in made) or "Optimizer" in made
    return node is not None and has_word(ast.unparse(node), "opt", "optim", "optimizer")


def is_scheduler(script: Script, node: ast.expr | None) -> bool:
    """Whether ``node`` is a scheduler of the learning rate."""
    made = script.made_by(node)
    if made.startswith(("torch.", "transformers.")):
        return "lr_scheduler" in made or made.endswith(("_schedule", "_schedule_with_warmup", "get_scheduler"))
    return not made and node is not None and has_word(ast.unparse(node), "scheduler", "sched")


def is_scaler(script: Script, node: ast.expr | None) -> bool:
    """Whether ``node`` is torch's GradScaler."""
    return script.made_by(node).endswith("GradScaler")


def optimizer_steps(script: Script) -> list[ast.Call]:
    """``optimizer.step()`` and ``scaler.step(optimizer)``."""
    return [
        call
        for call in script.method_calls("step")
        if is_optimizer(script, owner(call)) or (is_scaler(script, owner(call)) and call.args)
    ]


def loss_of(script: Script, backward: ast.Call) -> ast.expr | None:
    """The expression whose gradient is taken: ``a`` of ``a.backward()`` or of ``scaler.scale(a).backward()``."""
    if backward.args:
        return backward.args[0]
    found = owner(backward)
    if isinstance(found, ast.Call) and called_name(found) == "scale" and found.args:
        return found.args[0]
    return found


def every_n(script: Script, node: ast.AST) -> ast.If | None:
    """The ``if step % n == 0`` around ``node`` within its innermost loop."""
    for one in script.above(node):
        if isinstance(one, Loop | ast.FunctionDef | ast.Lambda):
            return None
        if isinstance(one, ast.If) and any(isinstance(part, ast.Mod) for part in ast.walk(one.test)):
            return one
    return None


def conditional(script: Script, node: ast.AST) -> bool:
    """Whether an ``if`` decides about ``node`` within its innermost loop."""
    for one in script.above(node):
        if isinstance(one, Loop | ast.FunctionDef | ast.Lambda):
            return False
        if isinstance(one, ast.If | ast.IfExp | ast.Try):
            return True
    return False


def divisions(script: Script, loss: ast.expr | None, within: ast.AST) -> Iterator[ast.expr]:
    """What a loss is divided by before its backward pass, in ``within``."""
    if loss is None:
        return
    text = ast.unparse(loss)
    todo: list[ast.AST] = [loss]
    for node in ast.walk(within):
        match node:
            case ast.AugAssign(target=target, op=ast.Div(), value=divisor) if ast.unparse(target) == text:
                yield divisor
            case ast.Assign(targets=[target], value=value) if ast.unparse(target) == text:
                todo.append(value)
    for one in todo:
        for part in ast.walk(one):
            match part:
                case ast.BinOp(op=ast.Div(), right=right):
                    yield right
                case ast.Call(func=ast.Attribute(attr="div" | "div_"), args=[right]):
                    yield right


def iterated(script: Script, loop: ast.AST) -> ast.expr | None:
    """What a loop goes through: ``loader`` of ``for i, batch in enumerate(tqdm(loader))``."""
    if not isinstance(loop, ast.For):
        return None
    found: ast.expr = loop.iter
    while isinstance(found, ast.Call) and called_name(found) in ("enumerate", "tqdm", "iter", "zip", "islice"):
        if not found.args:
            return None
        found = found.args[0]
    return found


def loader_of(script: Script, loop: ast.AST) -> ast.Call | None:
    """The ``DataLoader(...)`` that a loop goes through."""
    found = script.origin(iterated(script, loop))
    return found if script.is_torch(found, "DataLoader") and isinstance(found, ast.Call) else None


def training_loaders(script: Script) -> Iterator[tuple[ast.Call, ast.For, ast.Call]]:
    """Loaders of the loops that train: the ``DataLoader(...)``, the loop, its backward call."""
    for backward in script.trains:
        for loop in script.loops(backward):
            loader = loader_of(script, loop)
            if loader is not None and isinstance(loop, ast.For):
                yield loader, loop, backward
                break


def sampler_of(script: Script, loader: ast.Call) -> ast.expr | None:
    """What the loader's sampler was made by: the call; ``None`` without a sampler."""
    given = keyword(loader, "sampler") or (loader.args[3] if len(loader.args) > 3 else None)
    held = script.origin(given)
    if isinstance(held, ast.IfExp):
        held = held.body
    return None if isinstance(held, ast.Constant) else held


def updates(script: Script, function: ast.AST) -> Iterator[ast.Call]:
    """Optimizer steps within ``function``."""
    return (call for call in optimizer_steps(script) if script.inside(call, function))
