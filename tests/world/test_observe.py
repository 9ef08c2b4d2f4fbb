"""`shardwise.observe` on two ranks: silent on loops that are right, and each fault named by its line."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwise
import shardwise.observation.observer as observer_module
from shardwise.receipts.receipt import Receipt
from tests.models import VOCAB, Decoder, decoder
from tests.worlds import run_each, run_world

Lines = dict[str, str]
FSDP1_ON_CPU = functools.partial(FSDP1, use_orig_params=True, device_id=torch.device("cpu"))


def batches(number: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro batches."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    for _ in range(number):
        ids = torch.randint(VOCAB, (2, 8), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def plain(**options: bool) -> Decoder:
    return decoder(**options).float()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sharded(model: Decoder, **options: Any) -> Decoder:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def no_context(last: bool) -> Any:
    return contextlib.nullcontext()


def train(
    model: Any,
    optimizer: Any,
    expect: Any = None,
    *,
    accum: int = 1,
    data: Any = None,
    call: Callable[..., torch.Tensor] | None = None,
    around: Callable[[bool], Any] = no_context,
    before_step: Callable[[], Any] | None = None,
    step: Callable[[], Any] | None = None,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    clear: Callable[[], Any] | None = None,
    steps: int = 3,
    observe: Callable[..., Any] = shardwise.observe,
    **stated: Any,
) -> Receipt:
    """Train as people do; ``around`` is entered with whether a micro batch is the last of its step."""
    found: list[Receipt] = []
    observer = observe(model, optimizer, expect, on_receipt=found.append, **stated)
    data = iter(data or batches(steps * accum))
    with observer:
        for _ in range(steps):
            for micro in range(accum):
                inputs, labels = next(data)
                with around(micro == accum - 1):
                    backward(loss_of((call or model)(inputs), labels) / accum)
            if before_step:
                before_step()
            (step or optimizer.step)()
            (clear or optimizer.zero_grad)()
    assert observer.receipt is not None
    assert [observer.receipt] * (dist.get_rank() == 0) == found
    return observer.receipt


def clip(model: nn.Module, norm: float = 0.1) -> Callable[[], Any]:
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


# loops that are right


def of_ddp(expect: Any = "ddp", *, options: dict[str, Any] | None = None, **more: Any) -> Receipt:
    model = DDP(plain(), **(options or {}))
    return train(model, adamw(model), expect, **more)


def with_no_sync() -> Receipt:
    model = DDP(plain(tied=True))
    quiet: Callable[[bool], Any] = lambda last: contextlib.nullcontext() if last else model.no_sync()  # noqa: E731
    found = train(
        model, adamw(model), "ddp", accum=3, around=quiet, before_step=clip(model), grad_accum=3, clip_norm=0.1
    )
    line = next(line for line in found.lines if line.name == "gradient reductions")
    assert line.found == "in 1 of 3 backwards"
    return found


def of_zero1() -> Receipt:
    model = DDP(plain())
    return train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3), "zero1")


def of_fsdp2(expect: Any = "fsdp", *, accum: int = 1, options: dict[str, Any] | None = None, **more: Any) -> Receipt:
    model = sharded(plain(tied=True), **(options or {}))

    def last_reduces(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return train(model, adamw(model), expect, accum=accum, around=last_reduces, before_step=clip(model), **more)


def of_fsdp1(expect: Any = "fsdp", *, use_orig_params: bool = True) -> Receipt:
    model = FSDP1(plain(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    return train(model, adamw(model), expect, before_step=lambda: model.clip_grad_norm_(0.1), clip_norm=0.1)


def frozen_with_sgd() -> Receipt:
    model = DDP(plain(frozen=True))
    used = [p for p in model.parameters() if p.requires_grad]
    return train(model, torch.optim.SGD(used, lr=0.1), "ddp")


def by_hand() -> Receipt:
    """No wrapper: the loop averages the gradients."""
    model = plain()

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        clip(model)()

    return train(model, adamw(model), "ddp", before_step=average)


def autocast() -> Receipt:
    return of_ddp(around=lambda last: torch.autocast("cpu", torch.bfloat16), precision="bf16")


def mixed_fsdp2() -> Receipt:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return of_fsdp2(options={"mp_policy": policy}, precision="bf16", accum=2, grad_accum=2)


def recompute(reentrant: bool) -> Receipt:
    inner = plain()
    for block in inner.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    model = DDP(inner)
    return train(model, adamw(model), "ddp", recompute=True)


class Noisy(nn.Module):
    """Batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)))


def batch_norm() -> Receipt:
    model = DDP(Noisy())
    return train(model, adamw(model), "ddp")


def evaluating() -> Receipt:
    """Every rank evaluates between steps, and trains on."""
    model = DDP(Noisy())
    optimizer = adamw(model)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(next(batches(1, seed=7))[0])
        model.train()

    return train(model, optimizer, "ddp", before_step=evaluate)


def two_optimizers() -> Receipt:
    model = DDP(plain())
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1)
    others = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2])

    def both(name: str) -> None:
        for one in (matrices, others):
            getattr(one, name)()

    step, clear = functools.partial(both, "step"), functools.partial(both, "zero_grad")
    return train(model, (matrices, others), "ddp", step=step, clear=clear)


def one_batch() -> Receipt:
    """The same micro batch on purpose, over and over."""
    return of_ddp(data=itertools.repeat(next(batches(1))))


def evaluating_with_gradients() -> Receipt:
    """Before each step, on the same data on each rank, past DDP, and without ``no_grad``."""
    model, number = DDP(Noisy()), itertools.count()

    def evaluate() -> None:
        model.eval()
        model.module(torch.full((2, 7), next(number)))
        model.train()

    def call(ids: torch.Tensor) -> torch.Tensor:
        evaluate()
        outputs = model(ids)
        evaluate()
        return outputs

    return train(model, adamw(model), "ddp", call=call, grad_accum=1)


def two_backwards() -> Receipt:
    """One forward with two losses, each with a backward of its own."""
    model = sharded(plain())

    def backward(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        (loss * 0.1).backward()

    return train(model, adamw(model), "fsdp", backward=backward, accum=2, grad_accum=2)


class Sensitive(nn.Module):
    """Its forward computes a derivative, as forces are of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(ids)
        (slope,) = torch.autograd.grad(outputs.square().sum(), self.inner.head.weight, create_graph=True)
        return outputs + slope.sum()


def derivative_in_the_forward() -> Receipt:
    model = DDP(Sensitive())
    found = train(model, adamw(model), "ddp", accum=2, grad_accum=2)
    assert [line.found for line in found.lines if line.name == "activation recompute"] == ["none"]
    return found


class Partly(Decoder):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.embed(ids))))


def unused_parameters() -> Receipt:
    torch.manual_seed(0)
    model = DDP(Partly(), find_unused_parameters=True)
    return train(model, adamw(model), "ddp")


def scaled_fp16() -> Receipt:
    """The scaler skips the second step, and the one after it is judged."""
    model = DDP(plain())
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    number = itertools.count(1)

    def step() -> None:
        if next(number) == 2:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        clip(model)()
        scaler.step(optimizer)
        scaler.update()

    backward: Callable[[torch.Tensor], Any] = lambda loss: scaler.scale(loss).backward()  # noqa: E731
    return train(model, optimizer, "ddp", step=step, backward=backward, accum=2, grad_accum=2, steps=4)


def scaled_fp16_fused() -> Receipt:
    """The optimizer's own step divides by the scale, and skips: the second one, and the one after it is judged."""
    model = DDP(plain())
    optimizer, scaler = (
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.amp.GradScaler("cpu", init_scale=2.0**10),
    )
    number = itertools.count(1)

    def step() -> None:
        if next(number) == 2:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()

    backward: Callable[[torch.Tensor], Any] = lambda loss: scaler.scale(loss).backward()  # noqa: E731
    return train(model, optimizer, "ddp", step=step, backward=backward, grad_accum=1, clip_norm=20.0, steps=4)


def scaled_fp16_fsdp2() -> Receipt:
    """The scaler skips the second step, whose forward does not count."""
    model = sharded(plain())
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    number = itertools.count(1)

    def step() -> None:
        if next(number) == 2:
            next(model.parameters()).grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()

    backward: Callable[[torch.Tensor], Any] = lambda loss: scaler.scale(loss).backward()  # noqa: E731
    return train(model, optimizer, "fsdp", step=step, backward=backward, grad_accum=1, steps=4)


def by_hooks() -> Receipt:
    model = plain()

    def reduce(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return train(model, adamw(model), "ddp", grad_accum=1)


def replicated(*, newer: bool) -> Receipt:
    """DDP that changes the module in place; newer versions have it by the code of FSDP2."""
    from torch.distributed._composable import replicate, replicate_with_fsdp

    model = plain()
    (replicate_with_fsdp.replicate if newer else replicate)(model)
    return train(model, adamw(model), "ddp", grad_accum=1)


def other_modes() -> Receipt:
    """A mode that is entered before the observed step and left after it stays on."""
    model = DDP(plain())
    optimizer, counter = adamw(model), FlopCounterMode(display=False)
    number = itertools.count(1)

    def step() -> None:
        turn = next(number)
        if turn == 2:
            counter.__enter__()
        optimizer.step()
        if turn == 2:
            counter.__exit__(None, None, None)

    found = train(model, optimizer, "ddp", step=step)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return found


def logging_the_loss() -> Receipt:
    return of_ddp(before_step=lambda: dist.all_reduce(torch.ones(1)))


def called_twice() -> Receipt:
    """Two forwards for one backward."""
    model = DDP(plain())
    return train(model, adamw(model), "ddp", call=lambda ids: model(ids) + model(ids.flip(0)), grad_accum=1)


def with_closures() -> Receipt:
    """The forward and the backward are inside the optimizer's step, as in Lightning's."""
    model = DDP(plain())
    optimizer = adamw(model)
    found: list[Receipt] = []
    with shardwise.observe(model, optimizer, "ddp", on_receipt=found.append, grad_accum=1, clip_norm=0.1) as observer:
        for inputs, labels in batches(3):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model(inputs), labels)  # noqa: B023
                loss.backward()
                clip(model)()
                return loss

            assert optimizer.step(closure) > 0
    assert observer.receipt is not None
    return observer.receipt


def compiled(*, outside: bool) -> Receipt:
    if outside:
        model: Any = torch.compile(DDP(plain()), backend="aot_eager")
    else:
        model = DDP(torch.compile(plain(), backend="aot_eager"))
    return train(model, adamw(model), "ddp", before_step=clip(model), clip_norm=0.1)


def nothing_expected() -> Receipt:
    """A loop on each rank alone is not judged by what nobody stated, apart from what ranks must share."""
    model = DDP(plain())
    return train(model, adamw(model))


CLEAN: dict[str, Callable[[], Receipt]] = {
    "ddp": of_ddp,
    "ddp, no_sync, tied, clipped": with_no_sync,
    "ddp as bucket view": functools.partial(of_ddp, options={"gradient_as_bucket_view": True}),
    "ddp static graph": functools.partial(of_ddp, options={"static_graph": True}),
    "ddp bf16 autocast": autocast,
    "ddp synchronises each time": functools.partial(of_ddp, accum=2, grad_accum=2),
    "ddp recompute": functools.partial(recompute, False),
    "ddp recompute, reentrant": functools.partial(recompute, True),
    "ddp batch norm": batch_norm,
    "ddp evaluating": evaluating,
    "ddp evaluating with gradients": evaluating_with_gradients,
    "ddp derivative in the forward": derivative_in_the_forward,
    "ddp two optimizers": two_optimizers,
    "ddp one batch": one_batch,
    "ddp unused parameters": unused_parameters,
    "ddp fp16": scaled_fp16,
    "ddp fp16, fused": scaled_fp16_fused,
    "ddp in place": functools.partial(replicated, newer=False),
    "ddp in place, newer": functools.partial(replicated, newer=True),
    "by hooks": by_hooks,
    "fsdp2 fp16": scaled_fp16_fsdp2,
    "ddp frozen, sgd": frozen_with_sgd,
    "ddp logging": logging_the_loss,
    "ddp called twice": called_twice,
    "ddp zeroes its gradients": functools.partial(of_ddp, accum=2),
    "ddp and another mode": other_modes,
    "ddp in closures": with_closures,
    "ddp around a compiled model": functools.partial(compiled, outside=False),
    "ddp compiled": functools.partial(compiled, outside=True),
    "by hand": by_hand,
    "nothing expected": nothing_expected,
    "zero1": of_zero1,
    "fsdp2": of_fsdp2,
    "fsdp2, accumulating": functools.partial(of_fsdp2, accum=3, grad_accum=3, clip_norm=0.1),
    "fsdp2 as zero2": functools.partial(of_fsdp2, "zero2", options={"reshard_after_forward": False}),
    "fsdp2 two backwards": two_backwards,
    "fsdp2 bf16": mixed_fsdp2,
    "fsdp2 offloading": functools.partial(
        of_fsdp2, "fsdp+offload", options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    ),
    "fsdp1": of_fsdp1,
    "fsdp1 flat": functools.partial(of_fsdp1, use_orig_params=False),
}


def run_clean(name: str) -> tuple[Lines, int]:
    found = CLEAN[name]()
    return wrong(found), sum(line.ok is True for line in found.lines)


def wrong(receipt: Receipt) -> Lines:
    return {line.name: f"planned {line.planned}, found {line.found}" for line in receipt.lines if line.ok is False}


def test_no_alarm_when_all_is_right() -> None:
    found = run_each(run_clean, 2, [(name,) for name in CLEAN], timeout_s=170)
    alarms = {name: ranks[0][0] for name, ranks in zip(CLEAN, found, strict=True) if ranks[0][0]}
    assert not alarms
    counts = {name: ranks[0][1] for name, ranks in zip(CLEAN, found, strict=True)}  # of lines that were judged
    assert 3 <= counts.pop("nothing expected") <= 5
    assert min(counts.values()) >= 6
    assert all(ranks[0] == ranks[1] for ranks in found)


# faults


def fsdp_asked_ddp_run() -> Receipt:
    return of_ddp("fsdp")


def no_sync_around_the_backward_alone() -> Receipt:
    """The forward, outside of it, has decided already."""
    model = DDP(plain())

    def backward(loss: torch.Tensor) -> None:
        with model.no_sync():
            loss.backward()

    return train(model, adamw(model), "ddp", accum=2, backward=backward)


def never_synchronised() -> Receipt:
    model = DDP(plain())
    return train(model, adamw(model), "ddp", around=lambda last: model.no_sync())


def past_the_wrapper() -> Receipt:
    model = DDP(plain())
    return train(model, adamw(model), "ddp", call=model.module)


def group_not_held() -> Receipt:
    model = DDP(plain())
    some = [p for name, p in model.named_parameters() if "head" not in name]
    return train(model, torch.optim.AdamW(some), "ddp")


def held_twice() -> Receipt:
    model = DDP(plain())
    both = adamw(model), torch.optim.SGD(model.module.head.parameters(), lr=0.1)
    return train(model, both, "ddp", step=lambda: [one.step() for one in both], clear=both[0].zero_grad)


def optimizer_before_sharding() -> Receipt:
    """The optimizer steps tensors that the model does not use any more."""
    model = plain()
    optimizer = adamw(model)
    return train(sharded(model), optimizer, "fsdp", clear=model.zero_grad)


def bf16_asked_fp32_run() -> Receipt:
    return of_ddp(precision="bf16")


def fp32_asked_bf16_run() -> Receipt:
    return of_ddp(around=lambda last: torch.autocast("cpu", torch.bfloat16), precision="fp32")


def untied() -> Receipt:
    inner = plain(tied=True)
    inner.head.weight = nn.Parameter(inner.head.weight.detach().clone())
    model = DDP(inner)
    return train(model, adamw(model), "ddp", tied=[("embed.weight", "head.weight")])


def tie_broken_later() -> Receipt:
    """Tied when the loop began; a reload gives the head a weight of its own."""
    inner = plain(tied=True)
    model = DDP(inner)

    def reload() -> None:
        inner.head.weight = nn.Parameter(inner.head.weight.detach().clone())

    return train(model, adamw(model), before_step=reload)


def same_sampler() -> Receipt:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (3, 2, 8), generator=generator)
    return of_ddp(data=[(row[:, :-1], row[:, 1:]) for row in ids])


def clipped_by_local_norms() -> Receipt:
    model = sharded(plain())

    def clip_locally() -> None:
        local = [p.grad.to_local() for p in model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in local]))
        for gradient in local:
            gradient.mul_(0.1 / norm)

    return train(model, adamw(model), "fsdp", before_step=clip_locally, clip_norm=0.1)


def not_clipped() -> Receipt:
    return of_ddp(clip_norm=1e-3)


def drifting_buffer() -> Receipt:
    model = DDP(Noisy(), forward_sync_buffers=False)
    return train(model, adamw(model), "ddp")


def drifting_buffer_fsdp2() -> Receipt:
    model = fully_shard(Noisy())
    return train(model, adamw(model), "fsdp")


def dropout_left_off() -> Receipt:
    model = DDP(Noisy())
    return train(model, adamw(model), "ddp", before_step=model.eval)


def zero1_asked_whole_state() -> Receipt:
    return of_ddp("zero1")


def recompute_asked_none_run() -> Receipt:
    return of_ddp(recompute=True)


def fewer_micro_batches() -> Receipt:
    return of_ddp(accum=2, grad_accum=4)


def other_weights_on_each_rank() -> Receipt:
    """Gradients are averaged, and the ranks began with weights of their own."""
    torch.manual_seed(dist.get_rank())
    model = Decoder()

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= 2

    return train(model, adamw(model), "ddp", before_step=average)


def root_not_sharded() -> Receipt:
    """`fully_shard` on the blocks and not on the model: the embedding and the head are not reduced."""
    model = plain()
    for block in model.blocks:
        fully_shard(block)
    return train(model, adamw(model), "fsdp")


def parameter_ignored() -> Receipt:
    inner = plain()
    DDP._set_params_and_buffers_to_ignore_for_model(inner, ["head.weight"])
    model = DDP(inner)
    return train(model, adamw(model), "ddp")


def offload_asked_none_run() -> Receipt:
    return of_fsdp2("fsdp+offload")


def resharding_asked_none_run() -> Receipt:
    return of_fsdp2("fsdp", options={"reshard_after_forward": False})


def fsdp1_clipped_by_local_norms() -> Receipt:
    """``clip_grad_norm_`` of torch.nn.utils in place of FSDP1's own."""
    model = FSDP1_ON_CPU(plain())
    return train(model, adamw(model), "fsdp", before_step=clip(model))


FAULTS: dict[Callable[[], Receipt], str] = {
    fsdp_asked_ddp_run: "wrapper",
    no_sync_around_the_backward_alone: "gradient reductions",
    never_synchronised: "gradient reductions",
    past_the_wrapper: "forwards through DDP",
    group_not_held: "held by the optimizer",
    held_twice: "held by the optimizer",
    optimizer_before_sharding: "held by the optimizer",
    bf16_asked_fp32_run: "compute dtype",
    fp32_asked_bf16_run: "compute dtype",
    untied: "tied weights",
    tie_broken_later: "tied weights",
    same_sampler: "samples across ranks",
    clipped_by_local_norms: "gradient scaling",
    fsdp1_clipped_by_local_norms: "gradient scaling",
    not_clipped: "gradient norm",
    drifting_buffer: "buffers across ranks",
    drifting_buffer_fsdp2: "buffers across ranks",
    dropout_left_off: "training mode",
    zero1_asked_whole_state: "optimizer state",
    recompute_asked_none_run: "activation recompute",
    fewer_micro_batches: "micro batches per step",
    other_weights_on_each_rank: "weights across ranks",
    root_not_sharded: "elements reduced per step",
    parameter_ignored: "gradients across ranks",
    offload_asked_none_run: "offload",
    resharding_asked_none_run: "resharded after forward",
}
# what a fault also makes wrong
BESIDE = {
    fsdp_asked_ddp_run: {"parameters", "optimizer state"},
    never_synchronised: {"elements reduced per step", "gradients across ranks", "weights across ranks"},
    past_the_wrapper: {
        "gradient reductions",
        "elements reduced per step",
        "gradients across ranks",
        "weights across ranks",
    },
    clipped_by_local_norms: {"gradient norm"},
    tie_broken_later: {"gradient scaling"},  # the gradient of the weight that was replaced is gone
    # each block is a root of its own then, and a root keeps its weights
    root_not_sharded: {
        "parameters",
        "resharded after forward",
        "gradients across ranks",
        "weights across ranks",
    },
    parameter_ignored: {"weights across ranks", "elements reduced per step"},
}


def run_fault(number: int) -> Lines:
    return wrong([*FAULTS][number]())


def test_every_fault_is_named_by_its_line() -> None:
    found = run_each(run_fault, 2, [(number,) for number in range(len(FAULTS))], timeout_s=170)
    for (fault, name), (first, second) in zip(FAULTS.items(), found, strict=True):
        assert first == second, fault.__name__
        assert name in first, f"{fault.__name__}: {first}"
        assert first.keys() <= {name} | BESIDE.get(fault, set()), f"{fault.__name__}: {first}"


# what observing does not do


class Dropping(nn.Module):
    """A decoder with dropout, so that the random numbers count, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(ids))


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    parts = [
        len(part._forward_pre_hooks) + len(part._forward_hooks) + len(part._backward_hooks) for part in model.modules()
    ]
    return sum(parts) + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def trained(kind: str, *, observed: bool) -> list[torch.Tensor]:
    """Gradients of each step and the weights after them, in float64."""
    torch.manual_seed(0)
    model: Any = Dropping()
    torch.manual_seed(100 + dist.get_rank())
    if kind == "fsdp2":
        for block in model.inner.blocks:
            fully_shard(block)
        model = fully_shard(model)
    elif kind == "ddp":
        model = DDP(model)
    elif kind == "fsdp1":
        model = FSDP1_ON_CPU(model)
    optimizer = adamw(model)
    before, kept = hooks_of(model, optimizer), []
    observer = shardwise.observe(model, optimizer, on_receipt=lambda _: None) if observed else None
    assert (hooks_of(model, optimizer) > before) == observed
    for index, (inputs, labels) in enumerate(batches(16)):
        loss_of(model(inputs), labels).backward()
        if index % 2:
            clip(model)()
            kept += [shardwise_local(p.grad).clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    assert observer is None or observer.receipt is not None
    assert hooks_of(model, optimizer) == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return [*kept, *(shardwise_local(p.detach()).clone() for p in model.parameters()), torch.get_rng_state()]


def shardwise_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def both(kind: str) -> tuple[bool, int]:
    alone, observed = trained(kind, observed=False), trained(kind, observed=True)
    return len(alone) == len(observed) and all(map(torch.equal, alone, observed)), len(alone)


BITS = ("ddp", "fsdp2", "fsdp1", "none")


def raises_on_both() -> str:
    model = DDP(plain())
    with pytest.raises(shardwise.ShardwiseError) as caught:
        train(model, adamw(model), "fsdp", on_difference="error")
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return str(caught.value)


def left_early() -> None:
    """One step, and the loop ends: nothing stays, and there is no receipt."""
    model = DDP(plain())
    optimizer = adamw(model)
    before = hooks_of(model, optimizer)
    with shardwise.observe(model, optimizer) as observer:
        loss_of(model(next(batches(1))[0]), next(batches(1))[1]).backward()
        optimizer.step()
    assert observer.receipt is None
    assert hooks_of(model, optimizer) == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def unreadable() -> list[str]:
    """Facts that one rank cannot read end nothing: there is no receipt, and the log says why."""
    model, said = DDP(plain()), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    if dist.get_rank() == 1:
        observer_module.collect = failing
    optimizer = adamw(model)
    observer = shardwise.observe(model, optimizer, "fsdp", on_difference="error")
    for inputs, labels in batches(3):
        loss_of(model(inputs), labels).backward()
        optimizer.step()
    assert observer.receipt is None
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return said


def failing(*_: Any) -> None:
    raise ValueError("no facts here")


def hybrid() -> list[Lines]:
    """What was asked for, and what was not, on two by two ranks."""
    two_by_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    flat = init_device_mesh("cpu", (4,))
    cases = (("hsdp", two_by_two), ("hsdp", flat), ("fsdp", two_by_two))
    return [wrong(of_fsdp2(expect, options={"mesh": mesh}, accum=2)) for expect, mesh in cases]


def ends() -> tuple[list[tuple[bool, int]], list[Lines], str, list[str]]:
    left_early()
    return [both(kind) for kind in BITS], hybrid(), raises_on_both(), unreadable()


def test_bits_stay_and_an_observation_ends() -> None:
    """A difference raises on every rank if asked to; facts that cannot be read do not stop a run."""
    ranks = run_world(ends, 4, timeout_s=170)
    for bits, *_ in ranks:
        assert [same for same, _ in bits] == [True] * len(BITS)
        assert all(number > 20 for _, number in bits)
    for _, (right, flat, hybrid_run), raised, _ in ranks:
        assert not right
        assert flat.keys() == {"parameters"}
        assert hybrid_run.keys() == {"parameters"}
        assert "observed loop: wrapper: planned FSDP2 or FSDP1, found DDP" in raised
    why = "rank 1: ValueError: no facts here"
    assert ranks[0][3] == [f"observe: no receipt, as facts of the loop cannot be read: {why}"]
    assert not any(said for *_, said in ranks[1:])
