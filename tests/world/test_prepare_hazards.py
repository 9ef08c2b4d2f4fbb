"""Models whose parameters and buffers are not the plain ones: each is right under a strategy, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ModelError
from shardwise.model.read import clean_name
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.lora_options import AdapterOptions
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.contract import ragged
from tests.families import family
from tests.models import VOCAB, WIDTH, Block, ragged_batches
from tests.worlds import run_each, run_world

LIMIT = 1e-9


class Model(nn.Module):
    """The decoder of `tests.models`, to which a case adds what is odd; ``extra`` takes part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def extra(self, x: torch.Tensor) -> Any:
        return x

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.extra(x))


def plain(seed: int, kind: type[Model] = Model) -> Model:
    torch.manual_seed(seed)
    return kind().double()


class Buffers(Model):
    """A buffer of each layout and dtype that the forward reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(torch.initial_seed())
        base = torch.rand(WIDTH)
        self.kind = kind
        if kind == "expand":
            odd = torch.rand(1, 1).expand(6, WIDTH)
        elif kind == "expand in the middle":
            odd = torch.rand(2, 1, WIDTH).expand(2, 3, WIDTH)
        elif kind == "overlap":
            odd = torch.rand(WIDTH + 3).unfold(0, WIDTH, 1)
        elif kind == "transposed":
            odd = torch.rand(WIDTH, 4).t()
        elif kind == "channels_last":
            odd = torch.rand(2, 3, 4, WIDTH).to(memory_format=torch.channels_last)
        elif kind == "sparse":
            odd = torch.sparse_coo_tensor(torch.randint(WIDTH, (1, 5)), torch.rand(5), (WIDTH,)).coalesce()
        elif kind == "csr":
            odd = torch.diag(base * (base > 0.5)).to_sparse_csr()
        elif kind == "complex":
            odd = torch.complex(base, base.flip(0))
        elif kind == "quantized":
            odd = torch.quantize_per_tensor(base, 0.01, 0, torch.quint8)
        elif kind == "0-d":
            odd = torch.rand(())
        elif kind == "empty":
            odd = torch.rand(0, 3)
        else:
            odd = (base * 3).to(getattr(torch, kind))
        self.register_buffer("odd", odd)

    def extra(self, x: torch.Tensor) -> Any:
        odd: Any = self.odd
        odd = odd.to_dense() if self.kind in ("sparse", "csr") else odd
        odd = odd.dequantize() if self.kind == "quantized" else odd
        odd = torch.view_as_real(odd) if odd.is_complex() else odd
        return x * (1 + odd.to(x.dtype).sum() / 100)


BUFFERS = (
    "expand", "expand in the middle", "overlap", "transposed", "channels_last", "sparse", "csr", "complex", "quantized",
    "0-d", "empty", "bool", "uint16", "uint32", "int16", "float8_e4m3fn", "bfloat16",
)  # fmt: skip


def with_buffer(kind: str) -> Callable[[int], Model]:
    def make(seed: int) -> Model:
        torch.manual_seed(seed)
        model = Buffers(kind)
        odd: Any = model.odd
        del model.odd
        model.double().register_buffer("odd", odd)
        return model

    return make


def full(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    kind = tensor.dtype if tensor.dtype.is_complex else torch.float64  # gloo gathers few dtypes
    return tensor.detach().to(kind).full_tensor()


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters that this rank has a part of, and its buffers."""
    home = ownership_of(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    found = {clean_name(name): full(tensor) for name, tensor in named}
    return found if home is None else {home.canonical(name): tensor for name, tensor in found.items()}


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)


def alone(model: nn.Module, optimizer: Any, batches: list[Any], per_window: int) -> dict[str, torch.Tensor]:
    """One process over each global batch, without Shardwise."""
    for begin in range(0, len(batches), per_window):
        window = batches[begin : begin + per_window]
        count = sum(int((labels != -100).sum()) for _, labels in window)
        torch.stack([token_loss_sum(model(inputs), labels) for inputs, labels in window]).sum().div(count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return held(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def outcome(
    strategy: str,
    make: Callable[[int], nn.Module],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    after: Callable[[nn.Module], None] = lambda model: None,
    accum: int = 2,
    batches_of: Callable[[int], list[Any]] = ragged_batches,
) -> str:
    """``right``, or the sentence that refuses it before the first step; anything else raises."""
    session = start(strategy, receipts=False, grad_accum=accum)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    model = make(3 if session.ranks.is_main else 5)
    model, optimizer = _prepared(session, model, optimizer_of, batches_of(1)[0][0])
    if isinstance(optimizer, str):
        return optimizer
    after(model)
    batches = batches_of(2 * session.dp * accum)  # the receipt is of the second step
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        try:
            step.update(optimizer)
        except ModelError as error:
            assert step.number == 1, error
            return f"refused: {error}"
    found = held(session.module)
    reference = make(3)
    after(reference)
    expected = alone(reference, optimizer_of(reference), batches, session.dp * accum)
    worst = max(float((numbers(found[n]) - numbers(expected[n])).abs().sum()) for n in found if found[n].numel())
    if worst > LIMIT:
        return f"WRONG by {worst:.1e}"
    assert probe.receipt is not None
    session.close()
    return "right" if probe.receipt.ok else f"FALSE ALARM {[line for line in probe.receipt.lines if not line.ok]}"


def _prepared(session: Session, model: nn.Module, optimizer_of: Any, sample: Any) -> tuple[nn.Module, Any]:
    try:
        return session.prepare(model, optimizer_of(model), sample)
    except ModelError as error:
        return model, f"refused: {error}"
    except Exception as error:
        return model, f"RAW: {type(error).__name__} {error}"


def buffers(strategy: str, kinds: tuple[str, ...] = BUFFERS) -> dict[str, str]:
    return {kind: outcome(strategy, with_buffer(kind)) for kind in kinds}


class Weights(Model):
    """Parameters of an odd layout or dtype; those that a forward uses take part in the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        base = torch.rand(WIDTH)
        odd: Any = None
        if kind == "channels_last":
            self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
            odd = nn.Parameter(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        elif kind == "transposed":
            odd = nn.Parameter(torch.rand(WIDTH, 4).t())
        elif kind == "expand":
            odd = nn.Parameter(torch.rand(1).expand(WIDTH))
        elif kind == "sparse":
            odd = nn.Parameter(torch.eye(WIDTH).to_sparse())
        elif kind == "complex":
            odd = nn.Parameter(torch.complex(base, base.flip(0)))
        elif kind == "quantized":
            odd = nn.Parameter(torch.quantize_per_tensor(base.float(), 0.01, 0, torch.quint8), requires_grad=False)
        elif kind == "shared view":
            odd = nn.Parameter(self.head.weight.data[:1])
        elif kind == "shared buffer":
            self.register_buffer("prototype", self.head.weight.data[0])
        elif kind == "interleaved":
            both = torch.rand(WIDTH, 4)
            odd, self.even = nn.Parameter(both[:, 1::2]), nn.Parameter(both[:, ::2])
        elif kind == "one storage":
            both = torch.rand(2 * WIDTH)
            odd, self.even = nn.Parameter(both[WIDTH:]), nn.Parameter(both[:WIDTH])
        elif kind == "lazy":
            self.late = nn.LazyLinear(3)
        elif kind.startswith("frozen "):
            odd = nn.Parameter((base * 3).to(getattr(torch, kind.partition(" ")[2])), requires_grad=False)
        if odd is not None:
            self.odd = odd

    def extra(self, x: torch.Tensor) -> Any:
        factor = self.conv(x.detach()[:, None, :1]).sum()
        for name in ("odd", "even", "prototype"):
            odd: Any = getattr(self, name, None)
            if odd is not None:
                odd = odd.dequantize() if odd.is_quantized else odd
                odd = torch.view_as_real(odd * (1 + 2j)) if odd.is_complex() else odd
                factor = factor + odd.to(x.dtype).square().sum()
        return x * (1 + factor / 100)


WEIGHTS = (
    "channels_last", "transposed", "expand", "sparse", "complex", "quantized", "shared view", "shared buffer",
    "interleaved", "one storage", "lazy", "frozen bool", "frozen int64", "frozen uint16", "frozen float8_e4m3fn",
    "frozen complex64",
)  # fmt: skip


def with_weight(kind: str) -> Callable[[int], Model]:
    def make(seed: int) -> Model:
        torch.manual_seed(seed)
        default, kept = torch.get_default_dtype(), torch.float64
        torch.set_default_dtype(kept)
        try:
            return Weights(kind)
        finally:
            torch.set_default_dtype(default)

    return make


def weights(strategy: str, kinds: tuple[str, ...] = WEIGHTS) -> dict[str, str]:
    return {kind: outcome(strategy, with_weight(kind)) for kind in kinds}


REFUSED = {
    ("buffers", "quantized"): "buffer 'odd' is quantized",
    ("weights", "expand"): "parameter 'odd' has several elements in one place",
    ("weights", "sparse"): "parameter 'odd' is sparse",
    ("weights", "quantized"): "parameter 'odd' is quantized",
    ("weights", "lazy"): "late.weight, late.bias have no shape yet",
}
REFUSED_BUT_BY_DDP = {
    ("weights", "complex"): "parameter 'odd' is complex",
    ("weights", "shared view"): "'odd' and 'head.weight' share memory",
    ("weights", "shared buffer"): "'prototype' and 'head.weight' share memory",
}


def judge(found: dict[str, str], case: str, strategy: str) -> None:
    refused = REFUSED if strategy == "ddp" else REFUSED | REFUSED_BUT_BY_DDP
    for kind, result in found.items():
        said = refused.get((case, kind))
        as_it_should = result == "right" if said is None else result.startswith("refused: ") and said in result
        assert as_it_should, (case, strategy, kind, result)


def odd(case: str, strategy: str) -> dict[str, str]:
    """Buffers lie whole on each rank, whatever is done to parameters: plans that share fsdp's code share the kinds."""
    if case == "weights":
        return weights(strategy)
    share = ["zero2", "fsdp+offload", "hsdp"]
    return buffers(strategy, BUFFERS[share.index(strategy) :: 3] if strategy in share else BUFFERS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("world", "strategies"),
    [
        (2, ["ddp", "fsdp"]),
        pytest.param(2, ["zero1", "zero2"], marks=pytest.mark.turns(3)),
        pytest.param(2, ["fsdp+offload"], marks=pytest.mark.turns(3)),
        pytest.param(4, ["hsdp"], marks=pytest.mark.turns(3)),
    ],
)
def test_odd_tensors(world: int, strategies: list[str]) -> None:
    calls = [(case, strategy) for case in ("buffers", "weights") for strategy in strategies]
    for call, ranks in zip(calls, run_each(odd, world, calls, timeout_s=300.0), strict=True):
        for found in ranks:
            assert found
            judge(found, *call)


class OwnCheckpoint(Model):
    """Recomputes each block by itself in its backward."""

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def own_checkpoint(strategy: str) -> str:
    return outcome(strategy, partial(plain, kind=OwnCheckpoint))


def test_a_models_own_checkpoint_around_each_block() -> None:
    assert run_each(own_checkpoint, 2, [("ddp",), ("fsdp",)]) == [["right"] * 2] * 2


def hooked(kind: str, seed: int) -> nn.Module:
    """A model whose parameters have hooks: linear ones, and such as are right on the whole gradient alone."""
    model = family("own", layers=2, seed=seed)
    named = dict(model.named_parameters())
    by_size = sorted(named, key=lambda name: (named[name].numel(), name))
    for name in {next(iter(named)), by_size[0], by_size[-1], [n for n in named if named[n].ndim == 2][-2]}:
        add_hook(named[name], kind)
    return model


def add_hook(parameter: Any, kind: str) -> Any:
    mask = torch.arange(parameter.numel()).reshape(parameter.shape) % 3 == 0

    def in_place(gradient: torch.Tensor) -> None:
        gradient.mul_(mask)

    def after(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(parameter.grad.norm())

    if kind == "mask":
        return parameter.register_hook(lambda gradient: gradient * mask)
    if kind == "in place":
        return parameter.register_hook(in_place)
    if kind == "norm":
        return parameter.register_hook(lambda gradient: gradient / gradient.norm())
    if kind == "two":
        parameter.register_hook(torch.sign)
        return parameter.register_hook(lambda gradient: gradient * mask)
    if kind == "removed":
        return parameter.register_hook(torch.sign).remove()
    return parameter.register_post_accumulate_grad_hook(after)


HOOKS = ("mask", "in place", "norm", "two", "removed", "after")


def hooks(strategy: str, kinds: tuple[str, ...] = HOOKS) -> dict[str, str]:
    """Before `prepare`, and after it, where a handle must still remove what it stands for."""

    def later(model: nn.Module) -> None:
        parameter = next(model.parameters())
        for handle in (add_hook(parameter, "norm"), add_hook(parameter, "mask")):
            gone = handle
        gone.remove()

    found = {kind: outcome(strategy, partial(hooked, kind), batches_of=ragged) for kind in kinds}
    if "pp" in strategy:  # the first parameter of a stage is another on each
        return found
    found["later"] = outcome(strategy, lambda seed: family("own", layers=2, seed=seed), after=later, batches_of=ragged)
    return found


def changed(kind: str, model: nn.Module) -> None:
    """What people do to a model that is prepared already."""
    inner: Any = getattr(model, "module", model)
    if kind == "replaced":
        inner.head = nn.Linear(WIDTH, VOCAB, bias=False).double()
    elif kind == "added":
        inner.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        inner.extra = lambda x: x + inner.bias
    elif kind == "unfrozen":
        inner.head.requires_grad_(True)
    else:
        inner.teacher = nn.Linear(3, 3, bias=False).requires_grad_(False)
        nn.init.ones_(inner.teacher.weight)


def frozen_head(seed: int) -> Model:
    model = plain(seed)
    model.head.requires_grad_(False)
    return model


def changes(strategy: str) -> dict[str, str]:
    found = {}
    for kind in ("teacher", "added", "replaced", "unfrozen"):
        make = frozen_head if kind == "unfrozen" else plain
        found[kind] = outcome(strategy, make, after=partial(changed, kind))
    return found


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hsdp"])
def test_models_changed_after_prepare(strategy: str) -> None:
    for found in run_world(changes, 4 if strategy == "hsdp" else 2, strategy):
        assert found.pop("teacher") == "right", found
        for kind, result in found.items():
            name = "bias" if kind == "added" else "head.weight"
            assert result.startswith(f"refused: {name}: added, replaced or unfrozen after"), (kind, result)


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_hooks_of_parameters(strategy: str) -> None:
    for found in run_world(hooks, 2, strategy):
        after = found["after"]
        if strategy in ("zero2", "fsdp"):
            assert "register_post_accumulate_grad_hook, which expects the full parameter" in found.pop("after"), after
        assert set(found.values()) == {"right"}, found


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["hsdp", "fsdp+tp2", "fsdp+pp2"])
def test_hooks_of_parameters_of_cut_models(strategy: str) -> None:
    for found in run_world(hooks, 4, strategy, ("norm",)):
        assert set(found.values()) == {"right"}, found


def own_keys(strategy: str) -> list[dict[str, Any]]:
    session = start(strategy, receipts=False)
    model = plain(0)
    groups = [
        {"params": list(model.embed.parameters()), "name": "embed", "lr_scale": 0.5},
        {"params": [*model.blocks.parameters(), *model.head.parameters()], "name": "rest", "lr_scale": 1.0},
    ]
    outer, optimizer = session.prepare(model, torch.optim.AdamW(groups, lr=0.1))
    for group in optimizer.param_groups:
        group["lr"] *= group["lr_scale"]
    for step in session.steps(ragged_batches(4)):
        step.run(outer, token_loss_sum)
        step.update(optimizer)
    state: Any = optimizer
    inner = state.optim.param_groups
    assert [group["lr"] for group in inner] == [0.05, 0.1]
    return [{key: value for key, value in group.items() if key in ("name", "lr_scale")} for group in inner]


def test_keys_of_ones_own_stay_in_the_groups() -> None:
    expected = [{"name": "embed", "lr_scale": 0.5}, {"name": "rest", "lr_scale": 1.0}]
    assert run_world(own_keys, 2, "zero1") == [expected, expected]


def partly_held(strategy: str) -> str:
    session = start(strategy, receipts=False, lora=AdapterOptions(rank=4))
    model = plain(0)
    with pytest.raises(ModelError) as error:
        session.prepare(model, torch.optim.SGD(model.blocks[1].parameters(), lr=0.1))
    return str(error.value)


def test_adapters_beside_weights_that_the_optimizer_does_not_hold() -> None:
    for said in run_world(partly_held, 2, "ddp+lora"):
        assert said.startswith(
            "the optimizer does not hold blocks.0.up.weight, blocks.0.down.weight, but they have adapters"
        )
