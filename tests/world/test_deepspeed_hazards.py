"""Models that DeepSpeed would train wrongly, hang on or crash on: each is that of one process, or stopped by name.

The reference is one process in float64 without Shardwise: what no micro batch of a step has used has no gradient there,
so that it does not move at all (no decay, no momentum), and its optimizer's count of steps stands still.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.worlds import WorldError, run_world

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install 'shardwise[deepspeed]')",
)
LIMIT = 5e-6
STEPS = 5
WHOLE = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero1+offload", "deepspeed-zero2+offload")
CUT = ("deepspeed-zero3", "deepspeed-zero3+offload")
Weights = dict[str, torch.Tensor]
BRANCHES = ("left", "right", "wide", "scale")
Uses = Callable[[int, int, int], set[str]]  # step, micro batch of the step, rank


def plan_of(strategy: str, **options: Any) -> Any:
    import torch.distributed as dist

    from shardwise.plan.dims import dims_for
    from shardwise.plan.plan import Plan
    from shardwise.plan.strategy import parse_strategy

    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), dist.get_world_size()), **options)


class Branches(nn.Module):
    """Branches that a batch asks for: two of equal shape, a wider one and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, 6)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.wide = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6))
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.head = nn.Linear(6, 3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        uses = [name for name, flag in zip(BRANCHES, given[0, 4:].tolist(), strict=True) if flag]
        x = torch.tanh(self.stem(given[:, :4]))
        for name in uses:
            x = x * self.scale if name == "scale" else x + torch.tanh(getattr(self, name)(x))
        return self.head(x)


def batches_of(uses: Uses, world: int, accum: int, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro batches in the order in which they are dealt: one for each rank, then the next micro batch of the step."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for step in range(1, steps + 1):
        for micro in range(accum):
            for rank in range(world):
                flags = torch.tensor([float(name in uses(step, micro, rank)) for name in BRANCHES]).expand(2, 4)
                x = torch.randn(2, 4, generator=generator)
                made.append((torch.cat([x, flags], 1), torch.randn(2, 3, generator=generator)))
    return made


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.startswith(("right", "head"))]},
        {"params": [*model.right.parameters(), *model.head.parameters()], "lr": 0.03, "weight_decay": 0.2},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1)
    if kind == "momentum":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05)
    if kind == "mixed":  # one group has momentum, and the other no state at all
        return torch.optim.SGD([{**groups[0], "momentum": 0.9}, groups[1]], lr=0.1)
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels.to(outputs.dtype)).square().sum()


def one_process(kind: str, batches: list[Any], window: int, clip: float | None) -> list[Weights]:
    """The weights after each step, float64, without Shardwise."""
    model = Branches().double()
    optimizer, found = optimizer_of(kind, model), []
    for start in range(0, len(batches), window):
        here = batches[start : start + window]
        optimizer.zero_grad()
        for given, labels in here:
            (loss_of(model(given.double()), labels) / (2 * len(here))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def furthest(found: Weights, expected: Weights) -> tuple[float, str]:
    """The largest error over the largest element of all, and where it is."""
    scale = max(float(value.abs().max()) for value in expected.values())
    return max((float((found[n].double() - v).abs().max()) / scale, n) for n, v in expected.items())


def often(step: int, micro: int, rank: int) -> set[str]:
    return {"wide", *(["left"] if step % 2 else ["right"]), *(["scale"] if micro == 0 and step != 3 else [])}


def by_rank(step: int, micro: int, rank: int) -> set[str]:
    """Both ranks use both in the first two steps; afterwards each has one of its own."""
    if step < 3:
        return {"left", "right", "wide"}
    return {("left", "right")[rank % 2], *(["wide"] if rank == 0 else [])}


def early(step: int, micro: int, rank: int) -> set[str]:
    """Used in the first micro batch and not in the last, and by nobody from step 2 on."""
    return {"left", *(["right"] if micro == 0 else []), *(["wide", "scale"] if step == 1 else [])}


def never(step: int, micro: int, rank: int) -> set[str]:
    return {"left", "scale"}


def at_once(step: int, micro: int, rank: int) -> set[str]:
    return {("left", "right")[rank]}


def one_more(step: int, micro: int, rank: int) -> set[str]:
    return {"left", *(["wide"] if rank == 0 and step == 4 else [])}


TOGETHER: dict[str, Uses] = {"often": often, "early": early, "never": never}
PATTERNS: dict[str, Uses] = {**TOGETHER, "by_rank": by_rank, "at_once": at_once, "one_more": one_more}


def trained(cases: list[tuple[str, str, int, str]]) -> list[str]:
    """Runs each case, and returns what was off."""
    import torch.distributed as dist

    from shardwise.run.start import start

    wrong = []
    for strategy, pattern, accum, kind in cases:
        world, clip = dist.get_world_size(), 0.5 if accum == 2 else None
        batches = batches_of(PATTERNS[pattern], world, accum)
        expected = one_process(kind, batches, world * accum, clip)
        session = start(plan_of(strategy, grad_accum=accum), receipts=False)
        model = Branches()
        model, optimizer = session.prepare(model, optimizer_of(kind, model))
        engine, worst = session.applied.engine, (0.0, "")
        for number, step in enumerate(session.steps(batches, count=len)):
            for micro in step:
                step.backward(loss_of(model(micro.inputs), micro.labels))
            step.update(optimizer, clip_norm=clip)
            worst = max(worst, furthest(dict(engine.weights()), expected[number]))
            if engine.stage < 3:  # those that compute
                worst = max(worst, furthest({n: p.detach() for n, p in engine.parameters.items()}, expected[number]))
        session.close()
        if session.steps_done != STEPS or not worst[0] < LIMIT:
            wrong.append(f"{strategy} {pattern} x{accum} {kind}: {session.steps_done} steps, off by {worst}")
    return wrong


@pytest.mark.turns(3)
def test_what_a_step_does_not_use_does_not_move() -> None:
    kinds = ("sgd", "momentum", "adamw")
    cases = [(s, p, 1 + (i + j) % 2, kinds[(i + j) % 3]) for i, s in enumerate(WHOLE) for j, p in enumerate(PATTERNS)]
    cases += [(s, p, 2 - i, kinds[(i + j) % 3]) for i, s in enumerate(CUT) for j, p in enumerate(TOGETHER)]
    for wrong in run_world(trained, 2, cases):
        assert not wrong, "\n".join(wrong)


def apart(strategy: str, pattern: str, patience_s: float) -> None:
    from shardwise.parallel.engines import deepspeed_order as deepspeed_walk
    from shardwise.run.start import start

    deepspeed_walk.PATIENCE_S = patience_s
    session = start(plan_of(strategy), receipts=False)
    model = Branches()
    model, optimizer = session.prepare(model, optimizer_of("sgd", model))
    for step in session.steps(batches_of(PATTERNS[pattern], 2, 1), count=len):
        for micro in step:
            step.backward(loss_of(model(micro.inputs), micro.labels))
        step.update(optimizer)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "strategy, pattern, said",
    [
        ("deepspeed-zero3", "at_once", "rank 0 runs 'left' where rank 1 runs 'right': deepspeed-zero3 gathers"),
        ("deepspeed-zero3", "by_rank", "rank 0 runs 'wide'.* where rank 1 runs 'head'|rank 1 runs 'right'"),
        ("deepspeed-zero3+offload", "one_more", "rank 0 runs 'wide', which the micro batches before .* use deepspeed"),
    ],
)
def test_ranks_that_run_different_modules_under_zero_3_are_stopped_by_name(
    strategy: str, pattern: str, said: str
) -> None:
    with pytest.raises(WorldError, match=said) as raised:
        run_world(apart, 2, strategy, pattern, 3.0)
    assert "died without a traceback" not in str(raised.value)


def resumed(folder: str, saving: str, loading: list[str], kind: str) -> list[str]:
    """Save after two steps under one strategy, go on under others; returns what is not one process's."""
    import torch.distributed as dist

    from shardwise.run.start import start
    from tests.world.test_deepspeed_engine import full

    batches = batches_of(often, dist.get_world_size(), 1)
    expected = one_process(kind, batches, dist.get_world_size(), None)

    def run(strategy: str, save: bool) -> tuple[float, str]:
        session = start(plan_of(strategy), receipts=False)
        model = Branches()
        model, optimizer = session.prepare(model, optimizer_of(kind, model))
        if not save:
            session.load(folder)
        worst = (0.0, "")
        for step in session.steps(batches, count=len):
            for micro in step:
                step.backward(loss_of(model(micro.inputs), micro.labels))
            step.update(optimizer)
            worst = max(worst, furthest(full(session), expected[step.number - 1]))
            if save and step.number == 2:
                session.save(folder)
        session.close()
        return worst

    found = {f"{saving} saving": run(saving, True)} | {f"{saving} to {one}": run(one, False) for one in loading}
    return [f"{what} {kind}: off by {error}" for what, error in found.items() if not error[0] < LIMIT]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "saving, loading, kind",
    [
        ("deepspeed-zero1", ["deepspeed-zero1", "fsdp"], "mixed"),
        ("deepspeed-zero2+offload", ["deepspeed-zero2+offload", "deepspeed-zero3"], "adamw"),
        ("fsdp", ["deepspeed-zero3+offload"], "adamw"),
    ],
)
def test_groups_and_parameters_with_other_state_are_saved_and_loaded(
    saving: str, loading: list[str], kind: str, tmp_path: Any
) -> None:
    for wrong in run_world(resumed, 2, str(tmp_path), saving, loading, kind):
        assert not wrong, "\n".join(wrong)


class Scene:
    """A loop of one's own: what it does to a model at the start, in the loss and after a step.

    ``leaves`` it in the middle of a step, for another one.
    """

    leaves = False

    limit = LIMIT

    def start(self, model: Any, optimizer: Any) -> None: ...

    def build(self) -> Any:
        return Branches()

    def loss(self, model: Any, given: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(model(given), labels)

    def after(self, number: int, model: Any, optimizer: Any) -> None: ...


class Twice(Scene):
    def loss(self, model: Any, given: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(model(given) - model(given.flip(0)) / 2, labels)


class Submodules(Scene):
    def loss(self, model: Any, given: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(model.head(torch.tanh(model.stem(given[:, :4]))), labels)


class Evaluated(Scene):
    """All ranks look at other branches between the steps."""

    def after(self, number: int, model: Any, optimizer: Any) -> None:
        dtype = next(iter(model.parameters())).dtype
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 8, dtype=dtype))
        model.train()


class Scheduled(Scene):
    def start(self, model: Any, optimizer: Any) -> None:
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)

    def after(self, number: int, model: Any, optimizer: Any) -> None:
        self.scheduler.step()


class Reset(Scene):
    def after(self, number: int, model: Any, optimizer: Any) -> None:
        if number == 2:
            with torch.no_grad():
                model.head.weight.fill_(0.1)


class FrozenLater(Scene):
    def after(self, number: int, model: Any, optimizer: Any) -> None:
        model.left.requires_grad_(number != 2)


class Left(Scene):
    """A step is left after the first of two backwards, with branches that the next one does not use."""

    leaves = True


SCENES: dict[str, type[Scene]] = {
    one.__name__: one for one in (Scene, Twice, Submodules, Evaluated, Scheduled, Reset, FrozenLater, Left)
}


def played(cases: list[tuple[str, str, str, int]]) -> list[str]:
    """Each scene under each strategy, against one process; what is off, or what was raised."""
    import torch.distributed as dist

    from shardwise.run.start import start

    wrong = []
    for strategy, scene, kind, accum in cases:
        world = dist.get_world_size()
        batches = batches_of(often, world, accum)
        mine, other = SCENES[scene](), SCENES[scene]()
        reference = other.build().double()
        plain = optimizer_of(kind, reference)
        other.start(reference, plain)
        session = start(plan_of(strategy, grad_accum=accum), receipts=False)
        model = mine.build()
        model, optimizer = session.prepare(model, optimizer_of(kind, model))
        mine.start(model, optimizer)
        worst = (0.0, "")
        try:
            for step in session.steps(batches_of(PATTERNS["early"], world, accum), count=len) if mine.leaves else ():
                for micro in step:
                    step.backward(mine.loss(model, micro.inputs, micro.labels))
                    break
                break
            for step in session.steps(batches, count=len):
                for micro in step:
                    step.backward(mine.loss(model, micro.inputs, micro.labels))
                step.update(optimizer)
                worst = max(
                    worst,
                    furthest(
                        dict(session.applied.engine.weights()),
                        one_step(
                            other,
                            reference,
                            plain,
                            batches[(step.number - 1) * world * accum : step.number * world * accum],
                        ),
                    ),
                )
                mine.after(step.number, model, optimizer)
                other.after(step.number, reference, plain)
        except Exception as error:
            wrong.append(f"{strategy} {scene} {kind} x{accum}: {type(error).__name__} {error}")
        session.close()
        if not worst[0] < mine.limit:
            wrong.append(f"{strategy} {scene} {kind} x{accum}: off by {worst}")
    return wrong


def one_step(scene: Scene, model: nn.Module, optimizer: torch.optim.Optimizer, window: list[Any]) -> Weights:
    optimizer.zero_grad()
    for given, labels in window:
        (scene.loss(model, given.double(), labels) / (2 * len(window))).backward()
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.turns(3)
def test_a_loop_of_ones_own_is_that_of_one_process() -> None:
    cases = [(s, scene, "momentum", 2) for i, s in enumerate(WHOLE) for scene in list(SCENES)[i % 2 :: 2]]
    cases += [(s, scene, "adamw", 2) for i, s in enumerate(CUT) for scene in list(SCENES)[i::2] if scene != "Reset"]
    for wrong in run_world(played, 2, cases):
        assert not wrong, "\n".join(wrong)


def refused(kind: str, strategy: str) -> None:
    from shardwise.run.start import start

    session = start(plan_of(strategy), receipts=False)
    model = Branches()
    if kind == "unfrozen":
        model.left.requires_grad_(False)
    model, optimizer = session.prepare(model, optimizer_of("sgd", model))
    for step in session.steps(batches_of(often, 2, 1), count=len):
        for micro in step:
            loss = loss_of(model(micro.inputs), micro.labels)
            if step.number == 3 and session.ranks.rank == 1 and kind == "loss":
                loss = loss * float("nan")
            step.backward(loss)
            if step.number == 3 and session.ranks.rank == 1 and kind == "gradient":
                model.head.weight.register_hook(lambda gradient: gradient * float("nan"))
        step.update(optimizer)
        if step.number == 2 and kind == "unfrozen":
            model.left.requires_grad_(True)
        if step.number == 2 and kind == "reset":
            with torch.no_grad():
                model.head.weight.zero_()


@pytest.mark.parametrize(
    "kind, strategy, said",
    [
        ("unfrozen", "deepspeed-zero2", "left.weight, left.bias was frozen when the session was prepared"),
        ("loss", "deepspeed-zero1+offload", "step 3: the loss is nan"),
        ("gradient", "deepspeed-zero2+offload", "'head.weight' has a hook, and deepspeed-zero2.offload reduces"),
        ("reset", "deepspeed-zero3", "head.weight was changed in place, but deepspeed-zero3 keeps"),
    ],
)
def test_what_cannot_be_right_is_said_on_all_ranks(kind: str, strategy: str, said: str) -> None:
    with pytest.raises(WorldError, match=said) as raised:
        run_world(refused, 2, kind, strategy)
    text = str(raised.value)
    assert "[rank 0] Traceback" in text and "[rank 1] Traceback" in text and "still in" not in text, text


def narrow(strategies: list[str]) -> list[str]:
    """In bf16: what is never used stays to the bit, and the rest is near one process in float64."""
    import torch.distributed as dist

    from shardwise.run.start import start

    wrong = []
    for strategy in strategies:
        for pattern in ("never", "early"):
            batches = batches_of(PATTERNS[pattern], dist.get_world_size(), 2)
            expected = one_process("momentum", batches, dist.get_world_size() * 2, None)[-1]
            session = start(plan_of(strategy, grad_accum=2, precision="bf16"), receipts=False)
            model = Branches()
            model, optimizer = session.prepare(model, optimizer_of("momentum", model))
            for step in session.steps(batches, count=len):
                for micro in step:
                    step.backward(loss_of(model(micro.inputs.bfloat16()).float(), micro.labels))
                step.update(optimizer)
                if step.number == 1:
                    early = {n: w.clone() for n, w in session.applied.engine.weights() if n.startswith("wide")}
            found = {name: weight.clone() for name, weight in session.applied.engine.weights()}
            session.close()
            wrong += [f"{strategy} {pattern}: {n} moved" for n, w in early.items() if not torch.equal(found[n], w)]
            error = furthest(found, expected)
            wrong += [] if error[0] < 0.02 else [f"{strategy} {pattern}: off by {error}"]
    return wrong


@pytest.mark.turns(3)
def test_in_bf16_what_is_not_used_does_not_move() -> None:
    for wrong in run_world(narrow, 2, ["deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero1+offload", *CUT]):
        assert not wrong, "\n".join(wrong)
