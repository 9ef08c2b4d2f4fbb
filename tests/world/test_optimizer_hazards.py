"""What people do with optimizers, scalers and averages in loops of their own, in float64 against one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, swa_utils

from shardwise.errors import ModelError, TrainingError
from shardwise.model.read import clean_name
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests import optimizers as own
from tests.cli.configs import train, write_config
from tests.contract import both_here, here
from tests.kept import kept
from tests.models import decoder, ragged_batches
from tests.worlds import run_each, run_world

optim = torch.optim
Make = Callable[[nn.Module], Optimizer]
Weights = dict[str, torch.Tensor]
STEPS = 3


def plain(make: Make, per_step: int, steps: int = STEPS) -> Weights:
    """One process, without Shardwise; computed once for all ranks and strategies."""
    name = str(make) if isinstance(make, Of) else make.__name__  # type: ignore[attr-defined]
    return kept(("optimizers", type(make).__name__, name, per_step, steps), lambda: _plain(make, per_step, steps))


def _plain(make: Make, per_step: int, steps: int) -> Weights:
    model = decoder()
    optimizer = make(model)
    batches = ragged_batches(steps * per_step)
    for number in range(steps):
        optimizer.zero_grad()
        window = batches[number * per_step : (number + 1) * per_step]
        count = sum(int((labels != -100).sum()) for _, labels in window)
        loss = sum(token_loss_sum(model(inputs), labels) for inputs, labels in window) / max(count, 1)
        loss.backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def full_weights(session: Session) -> Weights:
    live = session.module.named_parameters()
    full = ((n, p.full_tensor() if isinstance(p, DTensor) else p) for n, p in live)
    return {clean_name(name): p.detach().clone() for name, p in full}


def trained(strategy: str, make: Make) -> Session:
    session = start(strategy, receipts=False)
    model = decoder()
    outer, optimizer = session.prepare(model, make(model))
    for step in session.steps(ragged_batches(STEPS * session.dp)):
        step.run(outer, token_loss_sum)
        step.update(optimizer)
    return session


def error_here(session: Session, expected: Weights) -> float:
    """`error` of this rank's part of the weights: a test must look at all ranks."""
    both = {clean_name(n): (here(p.detach()), expected[clean_name(n)]) for n, p in session.module.named_parameters()}
    pairs = {name: both_here(*pair) for name, pair in both.items()}
    assert all(mine.shape == theirs.shape for mine, theirs in pairs.values()) and pairs.keys() == expected.keys()
    pairs = {name: pair for name, pair in pairs.items() if pair[0].numel()}
    return error({name: mine for name, (mine, _) in pairs.items()}, {n: theirs for n, (_, theirs) in pairs.items()})


def error(found: Weights, expected: Weights) -> float:
    assert found.keys() == expected.keys()
    worst = torch.stack([(found[n] - expected[n]).abs().max() for n in found]).max()
    assert worst.isfinite()  # NaN is no number that a limit could be held against
    return float(worst)


class Of:
    """A class of optimizers with its options, over all parameters of a model."""

    def __init__(self, kind: Callable[..., Optimizer], **options: Any) -> None:
        self.kind, self.options = kind, options

    def __call__(self, model: nn.Module) -> Optimizer:
        return self.kind(self.params(model), **self.options)

    def params(self, model: nn.Module) -> Iterable[Any]:
        return list(model.parameters())

    def __str__(self) -> str:
        return f"{self.kind.__name__}({self.options})"


class Matrices(Of):
    def params(self, model: nn.Module) -> Iterable[Any]:
        return [p for p in model.parameters() if p.ndim == 2]


def in_groups(model: nn.Module) -> Optimizer:
    """Three groups that differ in all that can differ, and the embedding in none."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    norms = [p for n, p in named if "norm" in n]
    biases = [p for n, p in named if n.endswith("bias") and "norm" not in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "lr": 0.5}, {"params": biases}]
    return optim.AdamW(groups, lr=0.01, weight_decay=0.0)


def mixed_momentum(model: nn.Module) -> Optimizer:
    head, rest = list(model.parameters())[-1:], list(model.parameters())[:-1]
    return optim.SGD([{"params": head, "momentum": 0.0}, {"params": rest, "momentum": 0.9}], lr=0.1)


def cached(model: nn.Module) -> Optimizer:
    return own.Cached(model, 1.5)


RIGHT: list[Make] = [
    Of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Of(optim.SGD, lr=0.01, maximize=True),
    Of(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    Of(optim.AdamW, lr=0.01, fused=True, amsgrad=True),
    Of(optim.AdamW, lr=0.01, foreach=True),
    Of(optim.AdamW, lr=torch.tensor(0.01)),
    Of(optim.RMSprop, lr=0.001, momentum=0.5, centered=True),
    Of(optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    Of(optim.Adadelta, lr=0.1),
    Of(optim.NAdam, lr=0.01),
    Of(optim.RAdam, lr=0.01),
    Of(optim.Adamax, lr=0.01),
    Of(optim.ASGD, lr=0.01),
    Of(own.Lion),
    Of(own.LAMB),
    in_groups,
    mixed_momentum,
]
WHOLE: list[Make] = [Of(own.LARS), Of(optim.Rprop, lr=0.01), Of(optim.Adafactor, lr=0.01), Of(optim.SGD, fused=True)]


def right(strategy: str, makes: list[Make]) -> list[tuple[str, float]]:
    found = []
    for make in makes:
        session = trained(strategy, make)
        found.append((str(make), error_here(session, plain(make, session.dp))))
    return found


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_optimizers_step_as_in_one_process(strategy: str) -> None:
    full = strategy in ("ddp", "zero1")
    makes = [*RIGHT, *(WHOLE if full else [])] + ([cached] if strategy == "ddp" else [])
    for rows in run_world(right, 2, strategy, makes):
        assert [row for row in rows if row[1] > 1e-12] == []


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["hsdp", "zero1"])
def test_optimizers_step_as_in_one_process_on_four_ranks(strategy: str) -> None:
    makes = [*RIGHT[:4], Of(own.LAMB), in_groups, mixed_momentum]
    for rows in run_world(right, 4, strategy, makes):
        assert [row for row in rows if row[1] > 1e-12] == []


def refusal(strategy: str, make: Make) -> str:
    session = start(strategy, receipts=False)
    model = decoder()
    try:
        session.prepare(model, make(model))
    except ModelError as error:
        return str(error)
    finally:
        session.close()
    return ""


def refusals(strategy: str, makes: list[Make]) -> list[str]:
    return [refusal(strategy, make) for make in makes]


SHARDS = {
    Of(own.Clipping): "Clipping steps a part of a parameter otherwise than the whole .*use ddp or zero1",
    Of(own.LARS): "LARS steps a part of a parameter otherwise than the whole .*use ddp or zero1",
    Of(own.LocalLAMB): "LocalLAMB steps a part of a parameter otherwise",
    Of(own.DAdaptation): "DAdaptation steps a part .*use ddp, or",
    Of(optim.Rprop): "Rprop cannot step the sharded parameters of .*use ddp or zero1",
    Of(
        optim.Adafactor
    ): "Adafactor cannot step the sharded parameters of .*: PyTorch's Adafactor does not .* a part; use",
    Of(optim.SGD, fused=True): "SGD cannot step the sharded parameters of .*: PyTorch's SGD.fused=True. does not",
    Of(optim.LBFGS): "LBFGS.step needs a closure",
    Of(optim.AdamW, differentiable=True): "differentiable=True",
    Of(optim.AdamW, capturable=True): "AdamW cannot step tiny parameters on trial .*capturable",
    cached: "Cached.mine keeps parameters from before session.prepare",
}
"""What is refused where parameters are cut, and with which words."""

FINE = [Of(own.LAMB), Of(own.Lion), Of(own.Langevin), Matrices(optim.Muon, lr=0.01)]


@pytest.mark.turns(3)
@pytest.mark.parametrize(("world", "strategy"), [(2, "fsdp"), (2, "zero2"), (4, "hsdp")])
def test_optimizers_that_would_read_numbers_off_a_shard(world: int, strategy: str) -> None:
    for texts in run_world(refusals, world, strategy, [*SHARDS, *FINE]):
        for text, words in zip(texts, SHARDS.values(), strict=False):
            assert re.search(words, text), text
        assert not any(texts[len(SHARDS) :]), texts


def test_sums_over_parameters_under_zero1() -> None:
    makes: list[Make] = [Of(own.DAdaptation), Of(optim.LBFGS), Of(own.LARS), *FINE]
    for texts in run_world(refusals, 2, "zero1", makes):
        assert "DAdaptation takes a sum over several parameters, and zero1 gives each rank some" in texts[0]
        assert "needs a closure" in texts[1]
        assert not any(texts[2:]), texts


class SparseEmbedding(Of):
    """With the embedding's gradients as sparse tensors."""

    def params(self, model: nn.Module) -> Iterable[Any]:
        model.embed.sparse = True  # type: ignore[union-attr]
        return [model.embed.weight] if self.kind is optim.SparseAdam else super().params(model)  # type: ignore[union-attr]


SPARSE = [SparseEmbedding(optim.SGD, lr=0.1), SparseEmbedding(optim.Adagrad), SparseEmbedding(optim.SparseAdam)]


def test_sparse_gradients_are_right_or_refused() -> None:
    for strategy in ("ddp", "zero1"):
        for rows in run_world(right, 2, strategy, SPARSE):
            assert [row for row in rows if row[1] > 1e-12] == []
    for texts in run_world(refusals, 2, "fsdp", [*SPARSE, Of(optim.SparseAdam)]):
        assert all("'embed' is an embedding with sparse=True, and fsdp cannot" in text for text in texts[:-1]), texts
        assert "SparseAdam steps sparse gradients alone" in texts[-1]


def scaled(strategy: str, make: Make, accum: int, overflow: Callable[[int], bool], sabotage: bool = False) -> Any:
    """Six steps in fp16, of which some overflow on one rank: weights, scales, receipt."""
    session = start(strategy, receipts=False, precision="fp16", grad_accum=accum)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    model = decoder().float()
    outer, optimizer = session.prepare(model, make(model))
    assert session.scaler is not None
    session.scaler.load_state_dict({**session.scaler.state_dict(), "scale": 1024.0})
    if sabotage:
        optimizer.step = lambda *args, **options: None  # type: ignore[method-assign]
    scales, changed, before = [], [], full_weights(session)
    for step in session.steps(ragged_batches(6 * session.dp * accum)):
        for micro in step:
            loss = token_loss_sum(outer(micro.inputs), micro.labels)
            if overflow(step.number) and session.ranks.rank == 1:
                loss = loss + (loss - loss.detach()) * 1e30
            step.backward(loss)
        gradient = model.head.weight.grad
        if step.number == 4 and isinstance(gradient, DTensor) and gradient.device_mesh.get_coordinate()[-1] == 0:
            gradient.to_local()[0, 0] = torch.inf  # after the reduction, in one shard
        step.update(optimizer, clip_norm=1.0)
        now = full_weights(session)
        scales.append(session.scaler.get_scale())
        changed.append(any(not torch.equal(now[n], before[n]) for n in now))
        before = now
    wrong = [line.name for line in probe.receipt.lines if line.ok is False] if probe.receipt is not None else None
    return before, scales, changed, wrong


def second(number: int) -> bool:
    return number == 2


def never(number: int) -> bool:
    return False


def overflows(strategy: str) -> list[Any]:
    """All four ways under ddp and fsdp; each optimizer and each accumulation once under the others."""
    sgd, adam = Of(optim.SGD, lr=0.1), Of(optim.AdamW, lr=0.01, fused=True)
    ways = [(sgd, 1), (adam, 2)] + ([(sgd, 2), (adam, 1)] if strategy in ("ddp", "fsdp") else [])
    return [scaled(strategy, make, accum, second)[1:] for make, accum in ways]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("world", "strategy"), [(2, "ddp"), (2, "zero1"), (2, "zero2"), (2, "fsdp"), (4, "hsdp"), (4, "zero1")]
)
def test_a_step_that_overflows_is_skipped_by_all_and_no_receipt_stops_it(world: int, strategy: str) -> None:
    ranks = run_world(overflows, world, strategy)
    assert all(rows == ranks[0] for rows in ranks)
    for scales, changed, wrong in ranks[0]:
        again = strategy not in ("ddp", "zero1")  # of step 4, on one rank's shard
        assert scales == [1024.0, 512.0, 512.0, *[256.0 if again else 512.0] * 3]
        assert changed == [True, False, True, not again, True, True]
        assert wrong == []


def sabotaged(strategy: str) -> list[str] | None:
    return scaled(strategy, Of(optim.AdamW, lr=0.01), 1, never, sabotage=True)[3]


@pytest.mark.parametrize(("strategy", "line"), [("fsdp", "optimizer steps on"), ("zero1", "broadcast per step")])
def test_an_optimizer_that_never_steps_under_fp16_is_found(strategy: str, line: str) -> None:
    assert all(line in (wrong or []) for wrong in run_world(sabotaged, 2, strategy))


def spoilt(
    strategy: str, folder: str, precision: str, spoil: Callable[[Session], None] | None
) -> tuple[str, list[str]]:
    """The last step spoils the weights, and then they are saved: what is said, and what is in the folder."""
    session = start(strategy, receipts=False, precision=precision)  # type: ignore[arg-type]
    model = decoder().float()
    outer, optimizer = session.prepare(model, optim.AdamW(model.parameters(), lr=0.01, fused=True))
    said = ""
    for step in session.steps(ragged_batches(2 * session.dp)):
        if step.number == 2 and spoil is None:
            optimizer.param_groups[0]["lr"] = 1e308
        step.run(outer, token_loss_sum)
        step.update(optimizer)
        if step.number == 2 and spoil is not None:
            spoil(session)
        try:
            session.save(folder)
        except TrainingError as error:
            said = str(error)
    session.close()
    return said, sorted(path.name for path in Path(folder).glob("step-*"))


def one_element(session: Session) -> None:
    """A single NaN, on the last rank that has some of the parameter alone."""
    parameter = next(p for n, p in session.module.named_parameters() if n.endswith("up.weight"))
    if session.ranks.rank == 1:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        with torch.no_grad():
            local[-1, -1] = torch.nan


def large(session: Session) -> None:
    """Weights whose squares would overflow are numbers all the same; so are the smallest ones."""
    with torch.no_grad():
        for parameter in session.module.parameters():
            parameter.fill_(3e38)


def frozen_mask(session: Session) -> None:
    """What is not trained may be infinite on purpose."""
    parameter = next(session.module.parameters()).requires_grad_(False)
    with torch.no_grad():
        parameter.fill_(-torch.inf)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_weights_that_are_not_finite_are_not_saved(strategy: str, tmp_path: Path) -> None:
    cases: list[tuple[str, Callable[[Session], None] | None, str]] = [
        ("fp32", None, "20 more); they are not saved"),
        ("bf16", one_element, "(blocks.0.up.weight); they are not saved"),
        ("fp32", large, ""),
        ("fp32", frozen_mask, ""),
    ]
    calls = [(strategy, str(tmp_path / str(n)), precision, spoil) for n, (precision, spoil, _) in enumerate(cases)]
    for (_, _, words), ranks in zip(cases, run_each(spoilt, 2, calls), strict=True):
        for said, names in ranks:
            assert words in said, said
            assert bool(said) == bool(words), said
            assert names == ["step-00000001", "step-00000002"][: 1 if words else 2]


def loss_with_penalty(model: nn.Module, embed: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
    """The loss, and the square of its gradient with respect to what the embedding gave."""
    found: list[torch.Tensor] = []
    hook = embed.register_forward_hook(lambda module, args, output: found.append(output))
    loss = token_loss_sum(model(inputs), labels)
    hook.remove()
    (gradient,) = torch.autograd.grad(loss, found[0], create_graph=True)
    return loss + gradient.square().sum()


def penalty(strategy: str) -> float | str:
    session = start(strategy, receipts=False)
    model, one = decoder(), decoder()
    outer, optimizer = session.prepare(model, optim.SGD(model.parameters(), lr=0.1))
    batches, alone = ragged_batches(3 * session.dp), optim.SGD(one.parameters(), lr=0.1)
    try:
        for step in session.steps(batches):
            for micro in step:
                step.backward(loss_with_penalty(outer, session.module.embed, *micro))  # type: ignore[arg-type]
            step.update(optimizer)
    except ModelError as refused:
        return str(refused)
    for number in range(3):
        alone.zero_grad()
        window = batches[number * session.dp : (number + 1) * session.dp]
        count = sum(int((labels != -100).sum()) for _, labels in window)
        (sum(loss_with_penalty(one, one.embed, *batch) for batch in window) / count).backward()  # type: ignore[union-attr]
        alone.step()
    return error(full_weights(session), {n: p.detach() for n, p in one.named_parameters()})


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_gradient_penalty_is_right_or_refused(strategy: str) -> None:
    for found in run_world(penalty, 2, strategy):
        if isinstance(found, str):
            assert strategy in ("zero2", "fsdp")
            assert "create_graph=True" in found and "use ddp or zero1" in found
        else:
            assert strategy in ("ddp", "zero1")
            assert found < 1e-12


def averaged(strategy: str) -> tuple[float, str]:
    """A moving average kept by one line, against `AveragedModel` in one process; and what a copy says."""
    make, decay = Of(optim.AdamW, lr=0.01), 0.9
    session = start(strategy, receipts=False)
    model, one = decoder(), decoder()
    outer, optimizer = session.prepare(model, make(model))
    live = [p.detach() for p in session.module.parameters()]
    ema = [p.clone() for p in live]
    batches = ragged_batches(STEPS * session.dp)
    for step in session.steps(batches):
        step.run(outer, token_loss_sum)
        step.update(optimizer)
        torch._foreach_lerp_(ema, live, 1 - decay)
    expected = swa_utils.AveragedModel(one, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay))
    expected.update_parameters(one)  # it begins with a copy
    alone = make(one)
    for number in range(STEPS):
        alone.zero_grad()
        window = batches[number * session.dp : (number + 1) * session.dp]
        count = sum(int((labels != -100).sum()) for _, labels in window)
        (sum(token_loss_sum(one(inputs), labels) for inputs, labels in window) / count).backward()
        alone.step()
        expected.update_parameters(one)
    said = ""
    try:
        swa_utils.AveragedModel(outer)
    except ModelError as refused:
        said = str(refused)
    names = [name for name, _ in expected.module.named_parameters()]
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in ema]
    return error(dict(zip(names, full, strict=True)), dict(expected.module.named_parameters())), said


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_moving_average_of_the_weights(strategy: str) -> None:
    for worst, said in run_world(averaged, 2, strategy):
        assert worst < 1e-12
        assert ("cannot be copied" in said and "_foreach_lerp_" in said) == (strategy in ("zero2", "fsdp")), said


def penalty_and_average(strategy: str) -> tuple[float | str, tuple[float, str]]:
    return penalty(strategy), averaged(strategy)


@pytest.mark.turns(3)
def test_a_gradient_penalty_and_a_moving_average_where_weights_are_cut_and_copied() -> None:
    for refused, (worst, said) in run_world(penalty_and_average, 4, "hsdp"):
        assert "create_graph=True" in str(refused) and "use ddp or zero1" in str(refused)
        assert worst < 1e-12
        assert "cannot be copied" in said and "_foreach_lerp_" in said


def gone_on(strategy: str, folder: str) -> list[tuple[str, float]]:
    """Three steps in one go, and with a save and a load after the second: weights, and fp16's scale."""
    found = []
    cases: list[tuple[Make, str]] = [
        (mixed_momentum, "fp32"),
        (Of(optim.Adagrad, lr=0.01, initial_accumulator_value=0.1), "fp32"),
        (Of(optim.AdamW, lr=0.01, fused=True), "fp16"),
    ]
    for number, (make, precision) in enumerate(cases):
        ends = []
        for limits in ([3], [2, 1]):
            for limit in limits:
                session = start(strategy, receipts=False, precision=precision)  # type: ignore[arg-type]
                model = decoder() if precision == "fp32" else decoder().float()
                outer, optimizer = session.prepare(model, make(model))
                if session.scaler is not None:
                    session.scaler.load_state_dict({**session.scaler.state_dict(), "scale": 1024.0})
                if len(limits) == 2:
                    session.load(f"{folder}/{number}")
                for step in session.steps(ragged_batches(3 * session.dp), limit=limit):
                    for micro in step:
                        loss = token_loss_sum(outer(micro.inputs), micro.labels)
                        blown = precision == "fp16" and step.number == 2
                        step.backward(loss + (loss - loss.detach()) * 1e30 if blown else loss)
                    step.update(optimizer)
                if len(limits) == 2:
                    session.save(f"{folder}/{number}")
                scale = 0.0 if session.scaler is None else session.scaler.get_scale()
                last = {**full_weights(session), "scale": torch.tensor(scale)}
                session.close()
            ends.append(last)
        assert ends[0]["scale"] == (0.0 if precision == "fp32" else 512.0)
        found.append((f"{make} {precision}", error(ends[1], ends[0])))
    return found


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_optimizer_state_and_the_scale_go_on_after_a_load(strategy: str, tmp_path: Path) -> None:
    for rows in run_world(gone_on, 2, strategy, str(tmp_path)):
        assert [row for row in rows if row[1] > 0.0] == []


def scheduled(strategy: str, *, before: bool) -> float:
    """A schedule that was built from the optimizer before `prepare`, or from what that returned."""
    session = start(strategy, receipts=False)
    model, one = decoder(), decoder()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done) if before else None
    outer, optimizer = session.prepare(model, optimizer)  # type: ignore[assignment]
    schedule = schedule or optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)
    batches = ragged_batches(STEPS * session.dp)
    for step in session.steps(batches):
        step.run(outer, token_loss_sum)
        step.update(optimizer)
        schedule.step()
    for number in range(STEPS):
        one.zero_grad()
        window = batches[number * session.dp : (number + 1) * session.dp]
        count = sum(int((labels != -100).sum()) for _, labels in window)
        (sum(token_loss_sum(one(inputs), labels) for inputs, labels in window) / count).backward()
        optim.SGD(one.parameters(), lr=0.1 * 0.5**number).step()
    return error(full_weights(session), {n: p.detach() for n, p in one.named_parameters()})


def schedules(strategies: list[str]) -> list[float]:
    return [scheduled(s, before=b) for s in strategies for b in (False, s != "zero1")]


def test_schedules_built_before_and_after_prepare() -> None:
    for worst in run_world(schedules, 2, ["ddp", "zero1", "zero2", "fsdp"]):
        assert max(worst) < 1e-12


@pytest.mark.turns(3)
def test_a_run_whose_last_step_spoils_its_weights_saves_nothing(tmp_path: Path) -> None:
    optimizer = {"factory": "tests.optimizers:Spoils", "warmup_steps": 0}
    config = write_config(tmp_path, optimizer=optimizer, train={"steps": 1}, parallel={"nproc": 1})
    out, err = train(config, exit_code=1)
    assert "step 1: the update has left weights that are not finite (embed.weight and " in out + err
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
