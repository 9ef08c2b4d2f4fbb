"""`shardwise.check_gradients` on two ranks: right loops are found right, and each fault is named."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.receipts.receipt import Receipt
from tests.models import VOCAB, decoder
from tests.world.test_observe import Noisy, sharded
from tests.worlds import run_each, run_world

IGNORED = -100


def batches(number: int, *, ragged: bool, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """This rank's micro batches; ragged ones count different numbers of labels, on each rank and in each."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * seed + rank)
    made = []
    for micro in range(number):
        ids = torch.randint(VOCAB, (2, 9), generator=generator)
        labels = ids[:, 1:].clone()
        if ragged:
            labels[0, 2 + micro + rank :] = IGNORED
            labels[1, 4 + 2 * micro :] = IGNORED
        made.append({"ids": ids[:, :-1], "labels": labels})
    return made


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def sum_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["ids"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def labels_of(window: list[dict[str, torch.Tensor]], *, on_all_ranks: bool) -> float:
    number = torch.tensor(float(sum(int((b["labels"] != IGNORED).sum()) for b in window)))
    if on_all_ranks:
        dist.all_reduce(number)
    return float(number)


def train(
    model: Any,
    loss: Callable[..., Any] = mean_loss,
    *,
    accum: int = 1,
    ragged: bool = False,
    weight: Callable[[list[Any]], float] | None = None,
    around: Callable[[bool], Any] = lambda last: contextlib.nullcontext(),
    after_backward: Callable[[], Any] = lambda: None,
    before_step: Callable[[], Any] = lambda: None,
    take: Callable[[Any], torch.Tensor] = lambda found: found,
    clears: bool = True,
    **options: Any,
) -> Receipt:
    """Train as people do: one changed line; ``weight`` is what the loop multiplies each loss by."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found: list[Receipt] = []
    compute_loss = shardwise.check_gradients(model, optimizer, loss, on_report=found.append, **options)
    for seed in range(options.get("step", 1) + 1):
        window = batches(accum, ragged=ragged, seed=seed)
        factor = 1 / accum if weight is None else weight(window)
        for micro, batch in enumerate(window):
            with around(micro == accum - 1):
                (take(compute_loss(model, batch)) * factor).backward()
            after_backward()
        before_step()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
    assert compute_loss.report is not None
    assert [compute_loss.report] * (dist.get_rank() == 0) == found
    return compute_loss.report


def of_ddp(*args: Any, make: Callable[[], nn.Module] = decoder, **options: Any) -> Receipt:
    return train(DDP(make()), *args, **options)


def no_sync(**options: Any) -> Receipt:
    model = DDP(decoder(tied=True))
    quiet: Callable[[bool], Any] = lambda last: contextlib.nullcontext() if last else model.no_sync()  # noqa: E731
    return train(model, accum=3, around=quiet, before_step=clip(model), **options)


def clip(model: nn.Module, norm: float = 0.1) -> Callable[[], Any]:
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


def of_fsdp2(*, make: Callable[[], nn.Module] = decoder, wrap: dict[str, Any] | None = None, **options: Any) -> Receipt:
    model = sharded(make(), **(wrap or {}))

    def last_reduces(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return train(model, accum=3, around=last_reduces, before_step=clip(model), **options)


def of_fsdp1() -> Receipt:
    model = FSDP1(decoder().float(), use_orig_params=True, device_id=torch.device("cpu"))
    return train(model, accum=2, before_step=lambda: model.clip_grad_norm_(0.1))


def average(model: nn.Module, by: float, skip: str = "nothing") -> None:
    for name, parameter in model.named_parameters():
        if skip not in name:
            dist.all_reduce(parameter.grad)
            parameter.grad /= by


def by_hand(by: float = 2.0, skip: str = "nothing", norm: float | None = None) -> Receipt:
    model = decoder()

    def finish() -> None:
        average(model, by, skip)
        if norm is not None:
            clip(model, norm)()

    return train(model, before_step=finish, clip_norm=norm)


def normalised(window: list[Any]) -> float:
    return dist.get_world_size() / labels_of(window, on_all_ranks=True)


def own_tokens(window: list[Any]) -> float:
    return 1 / labels_of(window, on_all_ranks=False)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(ids))


def dropout() -> Receipt:
    model = DDP(Dropping())
    torch.manual_seed(100 + dist.get_rank())
    return train(model, accum=2)


def dropout_and_a_sum() -> Receipt:
    model = DDP(Dropping())
    torch.manual_seed(100 + dist.get_rank())
    return train(model, sum_loss, accum=2, weight=normalised)


def recompute() -> Receipt:
    inner = decoder()
    for block in inner.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return train(DDP(inner))


def scaled_fp16(*, stated: bool = True) -> Receipt:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = DDP(decoder().float())

    def unscale() -> None:
        for p in model.parameters():
            p.grad /= scaler.get_scale()
        clip(model)()

    return train(model, take=scaler.scale, before_step=unscale, scaler=scaler if stated else None)


def as_dict(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": mean_loss(model, batch), "logits": batch["ids"]}


def twice(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
    """Two forwards of the model for one loss."""
    logits = model(batch["ids"]) + model(batch["ids"].flip(1)).flip(1)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), None


def squares(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """No cross entropy: a mean over rows."""
    return model(batch["ids"]).square().mean()


def bf16(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch["ids"])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())


def normed(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The weight is computed by a hook or a parametrization, from others and from buffers that each forward changes."""
    inner = decoder()
    kind(inner.head)
    kind(inner.blocks[0].up)
    return inner


def older_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(module)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.score = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x)


def gan() -> Receipt:
    """Two models with an optimizer each; the critic's loss is checked, and the generator's backward goes through it."""
    critic, maker = DDP(Critic()), nn.Linear(4, 4).double()
    steps = {part: torch.optim.SGD(part.parameters(), lr=0.1) for part in (critic, maker)}

    def critic_loss(model: Any, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(-model(real)).mean() + nn.functional.softplus(model(fake)).mean()

    checked = shardwise.check_gradients(critic, steps[critic], critic_loss, on_report=lambda _: None, step=2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        noise = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        steps[critic].zero_grad()
        checked(critic, noise.flip(0), maker(noise).detach()).backward()
        steps[critic].step()
        steps[maker].zero_grad()
        nn.functional.softplus(-critic.module(maker(noise))).mean().backward()
        steps[maker].step()
    assert checked.report is not None
    return checked.report


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RIGHT: dict[str, Callable[[], Receipt]] = {
    "ddp": of_ddp,
    "ddp, no_sync, tied, clipped": no_sync,
    "ddp, third step": functools.partial(no_sync, step=3),
    "ddp fp32": functools.partial(of_ddp, make=lambda: decoder().float(), accum=2),
    "ddp, frozen part": functools.partial(of_ddp, make=lambda: decoder(frozen=True)),
    "ddp, ragged, by the labels of all ranks": functools.partial(
        of_ddp, sum_loss, accum=3, ragged=True, weight=normalised
    ),
    "ddp, dropout": dropout,
    "ddp, dropout, summed": dropout_and_a_sum,
    "ddp, batch norm": functools.partial(of_ddp, make=lambda: Noisy().double(), accum=2),
    "ddp, recompute": recompute,
    "ddp, spectral norm": functools.partial(
        of_ddp, make=lambda: normed(torch.nn.utils.parametrizations.spectral_norm), accum=2
    ),
    "ddp, weight norm by hooks": functools.partial(of_ddp, make=lambda: normed(older_weight_norm)),
    "ddp, scaler": scaled_fp16,
    "ddp, a dict": functools.partial(of_ddp, as_dict, take=lambda found: found["loss"]),
    "ddp, two forwards": functools.partial(of_ddp, twice, take=lambda found: found[0]),
    "ddp, no labels": functools.partial(of_ddp, squares, accum=2),
    "ddp, bf16": functools.partial(of_ddp, bf16, make=lambda: decoder().float()),
    "ddp, compiled": functools.partial(of_ddp, make=lambda: torch.compile(decoder(), backend="aot_eager")),
    "two models": gan,
    "by hand": by_hand,
    "by hand, clipped": functools.partial(by_hand, norm=0.1),
    "fsdp2": of_fsdp2,
    "fsdp2, tied": functools.partial(of_fsdp2, make=lambda: decoder(tied=True)),
    "fsdp2 bf16": functools.partial(of_fsdp2, make=lambda: decoder().float(), wrap={"mp_policy": MIXED}),
    "fsdp2, ragged, by the labels of all ranks": functools.partial(
        of_fsdp2, loss=sum_loss, ragged=True, weight=normalised
    ),
    "fsdp1": of_fsdp1,
}


def text_of(receipt: Receipt) -> list[str]:
    return [f"{line.name}: {line.found}" for line in receipt.lines if line.ok is False]


def run_right(name: str) -> tuple[list[str], str]:
    receipt = RIGHT[name]()
    return text_of(receipt), next(line.found for line in receipt.lines if line.name == "gradient")


def test_right_loops_are_found_right() -> None:
    found = run_each(run_right, 2, [(name,) for name in RIGHT], timeout_s=170)
    assert {name: ranks[0] for name, ranks in zip(RIGHT, found, strict=True) if ranks[0][0]} == {}
    assert {name: ranks[0][1] for name, ranks in zip(RIGHT, found, strict=True) if "right" not in ranks[0][1]} == {}
    assert all(first == second for first, second in found)


# faults


def never_synchronised() -> Receipt:
    model = DDP(decoder())
    return train(model, around=lambda last: model.no_sync())


def parameter_ignored() -> Receipt:
    inner = decoder()
    DDP._set_params_and_buffers_to_ignore_for_model(inner, ["head.weight"])
    return train(DDP(inner))


def cleared_between() -> Receipt:
    """Gradients are cleared after each micro batch but the last."""
    model, number = DDP(decoder()), iter(range(100))

    def clear() -> None:
        if next(number) % 3 < 2:
            model.zero_grad()

    return train(model, accum=3, after_backward=clear)


def other_weights() -> Receipt:
    model = decoder()
    with torch.no_grad():
        model.head.weight += dist.get_rank() * 1e-3
    return train(model, before_step=lambda: average(model, 2.0))


FAULTS: dict[str, tuple[Callable[[], Receipt], str]] = {
    "mean of means": (functools.partial(of_ddp, accum=3, ragged=True), "a mean of means"),
    "mean of means, fp32": (
        functools.partial(of_ddp, make=lambda: decoder().float(), accum=3, ragged=True),
        "a mean of means",
    ),
    "mean of means, fsdp2": (functools.partial(of_fsdp2, ragged=True), "a mean of means"),
    "own tokens": (
        functools.partial(of_ddp, sum_loss, accum=3, ragged=True, weight=own_tokens),
        "each rank divides by its own tokens",
    ),
    "not divided by accumulation": (
        functools.partial(of_ddp, accum=3, weight=lambda window: 1.0),
        "multiplies each loss by 1, where the mean over 3 micro batches needs 0.3333: gradients are 3 × too large",
    ),
    "divided twice": (
        functools.partial(of_ddp, accum=3, weight=lambda window: 1 / 9),
        "where the mean over 3 micro batches needs 0.3333: gradients are 3 × too small",
    ),
    "summed over ranks": (functools.partial(by_hand, 1.0), "2 × too large: dp 2"),
    "averaged twice": (functools.partial(by_hand, 4.0), "2 × too small: dp 2"),
    "never synchronised": (never_synchronised, "not averaged over dp"),
    "a parameter not synchronised": (parameter_ignored, "the gradient of head.weight is not averaged over dp"),
    "a parameter forgotten by hand": (
        functools.partial(by_hand, 2.0, "head"),
        "the gradient of head.weight is not averaged over dp",
    ),
    "cleared between": (cleared_between, "what accumulates before the last one is lost"),
    "never cleared": (functools.partial(of_ddp, clears=False, step=2), "zero_grad is missing"),
    "other weights": (other_weights, "weights across ranks: 1 of"),
}


def run_fault(name: str) -> list[str]:
    return text_of(FAULTS[name][0]())


def test_every_fault_is_named() -> None:
    found = run_each(run_fault, 2, [(name,) for name in FAULTS], timeout_s=170)
    for (name, (_, cause)), (first, second) in zip(FAULTS.items(), found, strict=True):
        assert first == second, name
        assert any(cause in line for line in first), f"{name}: {first}"


# what checking does not do


def trained(*, checked: bool, fsdp: bool) -> list[torch.Tensor]:
    """Gradients of each step, weights, buffers and random numbers after three steps of two micro batches."""
    torch.manual_seed(0)
    inner: Any = nn.Sequential(Noisy().double())
    model = sharded_root(inner) if fsdp else DDP(inner)
    torch.manual_seed(100 + dist.get_rank())
    optimizer, kept = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    loss: Any = mean_loss
    if checked:
        loss = shardwise.check_gradients(model, optimizer, mean_loss, step=2, on_report=lambda _: None)
    for seed in range(3):
        for batch in batches(2, ragged=True, seed=seed):
            loss(model, batch).backward()
        kept += [local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert not checked or loss.report is not None
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not optimizer._optimizer_step_pre_hooks
    return [*kept, *(local(t.detach()).clone() for t in [*model.parameters(), *model.buffers()]), torch.get_rng_state()]


def sharded_root(model: nn.Module) -> Any:
    return fully_shard(model)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same_bits(*, fsdp: bool) -> tuple[bool, int]:
    alone, checked = trained(checked=False, fsdp=fsdp), trained(checked=True, fsdp=fsdp)
    return len(alone) == len(checked) and all(map(torch.equal, alone, checked)), len(alone)


def raises() -> str:
    with pytest.raises(shardwise.ShardwiseError) as caught:
        of_ddp(accum=3, ragged=True, on_difference="error")
    return str(caught.value)


def not_comparable() -> list[str]:
    """What cannot be replayed is unknown, with the reason; nothing is said to be wrong."""
    model = DDP(decoder())
    own = torch.Generator().manual_seed(0)

    def live(unused: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return mean_loss(model, batch)

    def random(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return mean_loss(model, batch) * (1 + float(torch.rand(1, generator=own)))

    def coupled(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["ids"]).flatten(1).std(0).mean()

    reports = [train(model, loss) for loss in (live, random, coupled)] + [scaled_fp16(stated=False)]
    assert all(line.ok is not False for report in reports for line in report.lines)
    return [next(line.found for line in report.lines if line.name == "gradient") for report in reports]


def flat() -> str:
    model = FSDP1(decoder().float(), use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(shardwise.ShardwiseError) as caught:
        shardwise.check_gradients(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss)
    return str(caught.value)


def ends() -> tuple[list[tuple[bool, int]], str, list[str]]:
    assert "FSDP1 has use_orig_params = False" in flat()
    return [same_bits(fsdp=fsdp) for fsdp in (False, True)], raises(), not_comparable()


def test_bits_stay_and_what_cannot_be_replayed_is_unknown() -> None:
    for bits, raised, (live, random, coupled, scaled) in run_world(ends, 2, timeout_s=170):
        assert [same for same, _ in bits] == [True, True]
        assert all(number > 15 for _, number in bits)
        assert "a mean of means" in raised
        assert "calls the model that trains" in live
        assert "the replay has another loss" in random
        assert "neither the mean nor the sum" in coupled
        assert "give scaler=" in scaled


def test_impossible_settings_are_named_together() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(shardwise.ShardwiseError) as caught:
        shardwise.check_gradients(model, object(), mean_loss, step=0, clip_norm=-1, on_difference="stop")
    for part in ("on_difference = 'stop'", "step = 0", "clip_norm = -1", "optimizer has no step hooks"):
        assert part in str(caught.value)


def test_one_process_is_checked_too() -> None:
    """Without ranks: accumulation that is not divided."""
    model, found = decoder(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = shardwise.check_gradients(model, optimizer, mean_loss, on_report=found.append)
    ids = torch.randint(VOCAB, (3, 2, 9), generator=torch.Generator().manual_seed(0))
    for row in ids:
        loss(model, {"ids": row[:, :-1], "labels": row[:, 1:]}).backward()
    optimizer.step()
    assert any("needs 0.3333: gradients are 3 × too large" in line for line in text_of(found[0]))


def test_a_model_that_does_not_fit_is_unknown_with_its_size() -> None:
    """Its last parameter has 2**45 elements on one that is stored, and no gradient."""
    model, found = decoder(), []
    model.table = nn.Parameter(torch.zeros(1).expand(2**45))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = shardwise.check_gradients(model, optimizer, mean_loss, on_difference="error", on_report=found.append)
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    loss(model, {"ids": ids[:, :-1], "labels": ids[:, 1:]}).backward()
    optimizer.step()
    (line,) = found[0].lines
    assert line.ok is None
    assert line.found.startswith("unknown: copies of 35,184,372,0")
    assert "in float64 take 1792.00 TiB on a host with 1 ranks" in line.found
    assert not optimizer._optimizer_step_pre_hooks
