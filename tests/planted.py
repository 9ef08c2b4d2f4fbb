"""Numbers that are not finite, planted in one place of a small model, its data or its loss; and what finds them.

Each place is one row of one batch of the loader, reached by a token whose embedding carries a mark through the
residual stream, so that a module of the user's own makes the number for that sample alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardwise.model.read import clean_name
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.nonfinite.nonfinite_error import NonFiniteError
from tests.models import AttentionBlock

VOCAB, WIDTH, LENGTH, ROWS, BLOCKS = 24, 16, 8, 4, 4
MARK, MARKED = 1000.0, VOCAB - 1  # the token whose embedding carries the mark


class Fault(nn.Module):
    """Module of a user's own that goes wrong where the mark is. ``kind`` says how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.quiet = nn.Softmax(-1)
        self.hits: list[list[int]] = []
        self.widen = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.widen.weight)
        self.widen.weight.data *= 100.0 if kind == "overflow" else 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marked = x[..., :1] > MARK / 2
        x = x + 1e-3 * self.widen(x)
        if self.kind == "log":
            return x + torch.log(torch.where(marked, 0.0 * x[..., :1], 1.0 + 0.0 * x[..., :1]))
        if self.kind == "sqrt":  # finite, and its derivative is not
            return x + torch.sqrt(torch.where(marked, 0.0 * x[..., :1], 1.0 + x[..., :1] ** 2))
        if self.kind == "random":  # divides by what dropout leaves: of few samples nothing
            kept = functional.dropout(torch.ones_like(x[..., :1]), 0.01)
            self.hits.append((kept == 0).any(1).flatten().nonzero().flatten().tolist())
            return x / kept
        if self.kind == "masked":  # a row that may look at nothing is not a number, and nothing reads it
            scores = torch.full((x.shape[1], x.shape[1]), -torch.inf, device=x.device).triu(0)
            return torch.where(torch.ones_like(x, dtype=torch.bool), x, (self.quiet(scores) @ x).detach())
        return x


class Block(AttentionBlock):
    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, 0.0)
        self.fault = Fault(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.fault(x))


class Model(nn.Module):
    """Decoder over tokens with a column of numbers beside them; block ``at`` has the fault."""

    def __init__(self, kind: str, at: int, healthy: str = "") -> None:
        super().__init__()
        kinds = {0: healthy, at: kind}
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.project = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Block(kinds.get(index, "")) for index in range(BLOCKS))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        with torch.no_grad():
            self.embed.weight[MARKED] = 0.0
            self.embed.weight[MARKED, 0] = MARK

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.project(pixels)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def summed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def by_length(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A user's loss: each sample's mean over its labels, of which one sample has none."""
    each = functional.cross_entropy(outputs.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (each.sum(1) / (labels != -100).sum(1)).sum()


def squares(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((outputs.mean((1, 2)) - labels) ** 2).sum()


@dataclass(frozen=True)
class Place:
    """One planted number: in row ``row`` of batch ``batch`` of the loader, or in a weight; and what must be said.

    ``weight`` is a parameter that holds it before the step on ``holder`` (every rank that has that part: ``None``).
    """

    name: str
    strategy: str
    reason: str
    module: str
    world: int = 2
    accum: int = 3
    kind: str = ""
    at: int = 1
    batch: int = 0
    row: int = 2
    column: str = ""
    number: float = float("nan")
    weight: str = ""
    holder: int | None = None
    loss: Any = summed
    by_hand: bool = False
    healthy: str = ""
    operation: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def plan(self) -> Plan:
        dims = dims_for(parse_strategy(self.strategy), self.world)
        return Plan(strategy=self.strategy, dims=dims, grad_accum=self.accum, **self.options)


WORLD_2 = [
    Place("NaN in a column, ddp", "ddp", "data", "project", batch=9, column="pixels"),
    Place("inf in a column, fsdp", "fsdp", "data", "project", batch=6, row=0, column="pixels", number=float("inf")),
    Place("NaN in a column, pp", "ddp+pp2", "data", "project", batch=4, column="pixels"),
    Place("NaN in the labels, zero1", "zero1", "data", "(loss)", batch=11, row=3, column="labels", loss=squares),
    Place("row of the embedding, zero1", "zero1", "weight", "embed", weight="embed.weight", batch=8),
    Place("attention weight, fsdp", "fsdp", "weight", "blocks.2.attention.q", weight="blocks.2.attention.q.weight"),
    Place("attention weight, one rank of ddp", "ddp", "weight", "blocks.2.attention.q",
          weight="blocks.2.attention.q.weight", holder=1),
    Place("norm weight, zero2", "zero2", "weight", "blocks.0.norm2", weight="blocks.0.norm2.weight",
          number=float("inf")),
    Place("head, tensor parallel", "ddp+tp2", "weight", "head", weight="head.weight"),
    Place("fp16 overflow, ddp", "ddp", "overflow", "blocks.1.fault.widen", kind="overflow", batch=10,
          options={"precision": "fp16"}),
    Place("fp16 overflow, fsdp", "fsdp", "overflow", "blocks.1.fault.widen", kind="overflow", batch=7, row=1,
          options={"precision": "fp16"}),
    Place("fp16 overflow, zero1", "zero1", "overflow", "blocks.3.fault.widen", kind="overflow", at=3, batch=11, row=1,
          options={"precision": "fp16"}),
    Place("log(0), ddp", "ddp", "forward", "blocks.1.fault", kind="log", batch=9),
    Place("log(0), recompute", "fsdp", "forward", "blocks.1.fault", kind="log", batch=8,
          options={"recompute": "full"}),
    Place("log(0), tensor parallel", "ddp+tp2", "forward", "blocks.1.fault", kind="log", batch=5),
    Place("log(0), last stage", "ddp+pp2", "forward", "blocks.3.fault", kind="log", at=3, batch=4),
    Place("log(0), first stage", "fsdp+pp2", "forward", "blocks.0.fault", kind="log", at=0, batch=3, row=0),
    Place("log(0), loop by hand", "fsdp", "forward", "blocks.2.fault", kind="log", at=2, batch=9, by_hand=True),
    Place("division by zero in a loss, ddp", "ddp", "loss", "(loss)", batch=9, column="no labels", loss=by_length),
    Place("division by zero in a loss, zero2", "zero2", "loss", "(loss)", batch=10, row=1, column="no labels",
          loss=by_length),
    Place("division by zero in a loss, by hand", "ddp", "loss", "(loss)", batch=7, row=1, column="no labels",
          loss=by_length, by_hand=True),
    Place("square root of zero, ddp", "ddp", "backward", "blocks.1.fault", kind="sqrt", batch=6,
          operation="SqrtBackward0"),
    Place("square root of zero, fsdp", "fsdp", "backward", "blocks.1.fault", kind="sqrt", batch=9, row=3,
          operation="SqrtBackward0"),
    Place("square root of zero, recompute", "fsdp", "backward", "blocks.1.fault", kind="sqrt", batch=11,
          operation="SqrtBackward0", options={"recompute": "selective"}),
    Place("square root of zero, tensor parallel", "ddp+tp2", "backward", "blocks.1.fault", kind="sqrt", batch=3,
          operation="SqrtBackward0"),
    Place("square root of zero, pipeline", "ddp+pp2", "backward", "blocks.1.fault", kind="sqrt", batch=4,
          operation="SqrtBackward0"),
    Place("beside a masked row that nothing reads", "ddp", "forward", "blocks.2.fault", kind="log", at=2, batch=9,
          healthy="masked"),
    Place("compiled blocks", "ddp", "forward", "blocks.1.fault", kind="log", batch=9, options={"compile": True}),
]  # fmt: skip
WORLD_4 = [
    Place("last rank, zero1", "zero1", "forward", "blocks.1.fault", world=4, kind="log", batch=15),
    Place("norm weight, hsdp", "hsdp", "weight", "last", world=4, weight="last.weight"),
    Place("log(0), hsdp", "hsdp", "forward", "blocks.1.fault", world=4, kind="log", batch=18),
    Place("log(0), fsdp+tp2", "fsdp+tp2", "forward", "blocks.1.fault", world=4, kind="log", batch=9),
    Place("NaN in a column, fsdp+tp2", "fsdp+tp2", "data", "project", world=4, batch=7, column="pixels"),
    Place("square root of zero, fsdp+pp2", "fsdp+pp2", "backward", "blocks.3.fault", world=4, at=3, kind="sqrt",
          batch=9, operation="SqrtBackward0"),
]  # fmt: skip


def batches_of(place: Place) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Two steps of batches; the planted one is in the second step, except where the first fails as well."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(2 * place.accum * place.plan.dims.dp):
        ids = torch.randint(MARKED, (ROWS, LENGTH + 1), generator=generator)
        pixels, labels = torch.randn((ROWS, LENGTH, 2), generator=generator), ids[:, 1:].clone()
        if place.loss is squares:
            labels = torch.randn(ROWS, generator=generator)
        if number == place.batch:
            if place.kind or place.weight == "embed.weight":
                ids[place.row, 3] = MARKED
            if place.column == "pixels":
                pixels[place.row, 1, 0] = place.number
            if place.column == "labels":
                labels[place.row] = place.number
            if place.column == "no labels":
                labels[place.row] = -100
        made.append(({"ids": ids[:, :-1].contiguous(), "pixels": pixels}, labels))
    return made


def spoil(module: nn.Module, place: Place, rank: int) -> None:
    """Put the number into one element of the weight."""
    if place.holder not in (None, rank):
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if clean_name(name) == place.weight:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if local.numel():
                    local.view(-1)[-1] = place.number  # of the embedding: in the row of the mark


def found_at(place: Place) -> dict[str, Any]:
    """Train until the planted number stops the run; what is said of it, on this rank."""
    torch.manual_seed(0)
    session = start(place.plan, receipts=False)
    batches = batches_of(place)
    model = Model(place.kind, place.at, place.healthy)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), batches[0][0])
    torch.manual_seed(session.place.dp)
    try:
        for step in session.steps(batches):
            if step.number == 2 and place.weight:
                spoil(session.module, place, session.ranks.rank)
            if place.by_hand:
                for micro in step:
                    step.backward(place.loss(model(**micro.inputs), micro.labels))
            else:
                step.run(model, place.loss)
            step.update(optimizer, clip_norm=1.0)
    except NonFiniteError as error:
        source = {} if error.source is None else error.source.model_dump(mode="json")
        return {**source, "text": str(error)}
    finally:
        session.close()
    return {"reason": "nothing was found"}


def expected(place: Place) -> dict[str, Any]:
    """Fields of the source that the place decides."""
    dims, accum = place.plan.dims, place.accum
    here = {"reason": place.reason, "module": place.module, "step": 1 + place.batch // (accum * dims.dp)}
    if place.operation:
        here["operation"] = place.operation
    if place.weight:
        here |= {"parameters": [place.weight], "step": 2}
        return here | ({} if place.holder is None else {"rank": place.holder, "ranks": [place.holder]})
    within = place.batch % (accum * dims.dp)
    first = next(rank for rank in range(place.world) if dims.place(rank).dp == within % dims.dp)
    if dims.pp > 1 and (place.at >= BLOCKS // 2 if place.kind else place.module == "head"):
        first = next(
            rank for rank in range(place.world) if dims.place(rank).dp == within % dims.dp and dims.place(rank).pp
        )
    rows = None if place.by_hand and place.reason == "loss" else [place.row]
    here |= {"batch": place.batch, "rows": rows, "micro_batch": 1 + within // dims.dp, "rank": first}
    return here | ({"column": place.column} if place.reason == "data" else {})


BYTE = ord("~")  # in one sample of a corpus


class ByteModel(nn.Module):
    """Model over bytes, whose fault is reached by the one sample with a `BYTE`; ``loud`` makes its loss large alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.loud = kind == "loud"
        self.embed = nn.Embedding(257, WIDTH)
        self.blocks = nn.ModuleList(Block(kind if index == 1 else "") for index in range(2))
        self.head = nn.Linear(WIDTH, 257)
        with torch.no_grad():
            self.embed.weight[BYTE] = 0.0
            self.embed.weight[BYTE, 0] = MARK

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        outputs = self.head(nn.functional.layer_norm(x, (WIDTH,)))
        return outputs * torch.where((ids == BYTE).any(1), 100.0, 1.0)[:, None, None] if self.loud else outputs


def byte_model(kind: str) -> ByteModel:
    return ByteModel(kind)


class SpoilingSGD(torch.optim.SGD):
    """Optimizer whose update in step 3 divides by zero in one weight."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"][-1:]:
                count = self.state[parameter].setdefault("count", torch.zeros_like(parameter))
                count += 1
                parameter /= torch.where(count == 3, 0.0, 1.0)
        return found
