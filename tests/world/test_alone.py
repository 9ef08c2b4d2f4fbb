"""What one rank does alone: an evaluation, a save, a forward more or less: one sentence each, never a hang."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.distributed import control_message as meeting
from shardwise.errors import ShardwiseError
from shardwise.run.start import start
from shardwise.train.session import Session
from tests.worlds import WorldError, run_world

WIDTH, STEPS = 6, 4


class Small(nn.Module):
    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng_state = torch.Generator().manual_seed(1)
    shapes = ((2, WIDTH), (2, 3))
    return [tuple(torch.randn(s, generator=rng_state, dtype=torch.float64) for s in shapes) for _ in range(number)]  # type: ignore[misc]


Forwards = Callable[[Session, nn.Module, int, torch.Tensor], list[torch.Tensor]]


def trained(strategy: str, forwards: Forwards, *, normed: bool = False) -> Session:
    """A session after some steps, of whose micro batches ``forwards`` calls the model."""
    session = start(strategy, receipts=False)
    model = Small(normed=normed)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in session.steps(batches(STEPS * session.dp), count=len):
        for micro in step:
            outputs = forwards(session, model, step.number, micro.inputs)
            step.backward(sum((one - micro.labels).square().sum() for one in outputs))
        step.update(optimizer)
    return session


def once(session: Session, model: nn.Module, number: int, x: torch.Tensor) -> list[torch.Tensor]:
    return [model(x)]


def evaluates_late(session: Session, model: nn.Module, number: int, x: torch.Tensor) -> list[torch.Tensor]:
    if session.ranks.is_main and number == 3:
        with torch.no_grad():
            model(x)
    return [model(x)]


def calls_more(session: Session, model: nn.Module, number: int, x: torch.Tensor) -> list[torch.Tensor]:
    return [model(x), model(x)] if session.ranks.is_main and number == 3 else [model(x)]


def calls_less(session: Session, model: nn.Module, number: int, x: torch.Tensor) -> list[torch.Tensor]:
    return [model(x)] if session.ranks.is_main and number == 3 else [model(x), model(x)]


def hasten() -> None:
    meeting.HERE_S, meeting.ANNOUNCE_S, meeting.LIMIT_S = 0.2, 0.5, 3


def in_a_step(strategy: str, forwards: Forwards) -> None:
    hasten()
    trained(strategy, forwards)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("forwards", "strategy", "world", "where"),
    [
        (evaluates_late, "hsdp", 4, "an evaluation"),
        (calls_more, "zero2", 2, "a forward of a step"),
        (calls_less, "fsdp", 2, "step.backward"),
    ],
)
def test_what_one_rank_does_alone_in_a_late_step(forwards: Forwards, strategy: str, world: int, where: str) -> None:
    """The others wait in a collective of FSDP2, and cannot answer."""
    with pytest.raises(WorldError) as error:
        run_world(in_a_step, world, strategy, forwards)
    text = str(error.value)
    assert "in_a_step after" not in text, text
    assert f"TrainingError: rank 0 is at {where}, and rank" in text
    assert "did not come there within 3 s. A forward" in text


def sentence(action: Callable[[], object]) -> str:
    try:
        action()
    except ShardwiseError as error:
        return str(error)
    return ""


def evaluate(session: Session) -> None:
    outer = session.applied.outer.eval()
    with torch.no_grad():
        outer(torch.zeros(2, WIDTH, dtype=torch.float64))


def after_the_loop(strategy: str, action: Callable[[Session], object], *, normed: bool = False) -> str:
    """Rank 0 does it alone; the others leave."""
    session = trained(strategy, once, normed=normed)
    found = sentence(lambda: action(session)) if session.ranks.is_main else ""
    session.close()
    return found


def save(session: Session) -> None:
    session.save("never written")


def alone() -> dict[str, str]:
    hasten()
    return {
        "fsdp eval": after_the_loop("fsdp", evaluate),
        "fsdp save": after_the_loop("fsdp", save),
        "ddp save": after_the_loop("ddp", save),
        "ddp eval": after_the_loop("ddp", evaluate),
        "batch norm": after_the_loop("ddp", evaluate, normed=True),
    }


def test_what_rank_0_does_when_the_others_have_left() -> None:
    found = run_world(alone, 2)[0]
    assert found.pop("ddp eval") == ""  # whole weights: rank 0 needs nobody
    for case, text in found.items():
        where = "session.save" if "save" in case else "an evaluation"
        assert text.startswith(f"rank 1 has left the session, and rank 0 waits at {where}. "), (case, text)
        assert "out of `if session.ranks.is_main`" in text


def now_and_then(session: Session, model: nn.Module, number: int, x: torch.Tensor) -> list[torch.Tensor]:
    return [model(x), model(-x)] if number % 2 else [model(x)]


def later_and_then(session: Session, model: nn.Module, number: int, x: torch.Tensor) -> list[torch.Tensor]:
    return [model(x)] if number % 2 else [model(x), model(-x)]


def uneven(session: Session, model: nn.Module, number: int, x: torch.Tensor) -> list[torch.Tensor]:
    """All evaluate in the step, and one comes late."""
    if session.ranks.is_main and number == 3:
        time.sleep(1.0)
    with torch.no_grad():
        model(x)
    return [model(x)]


def full(p: Any) -> torch.Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def together() -> dict[str, Any]:
    hasten()
    meeting.LIMIT_S = 60  # nobody is to be given up here, on a busy machine either
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    found: dict[str, Any] = {}
    for strategy in ("fsdp", "zero2"):
        for forwards in (now_and_then, later_and_then, uneven):
            weights = []
            for kind in ("ddp", strategy):
                session = trained(kind, forwards)
                assert session.ranks.control is not dist.group.WORLD  # which FSDP2 uses
                weights.append(
                    [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in session.module.parameters()]
                )
                session.close()
            worst = max(float((one - other).abs().max()) for one, other in zip(*weights, strict=True))
            found[f"{strategy} {forwards.__name__}"] = worst
    return {"errors": found, "said": said}


def test_what_all_ranks_do_now_and_then() -> None:
    rank_0, rank_1 = run_world(together, 2)
    for found in (rank_0, rank_1):
        assert all(error < 1e-12 for error in found["errors"].values()), found
    assert rank_0["said"] == []
    assert rank_1["said"], "nothing was said while rank 0 was late"
    assert all("rank 1 has waited for 0.5 s at an evaluation: rank 0 has not come there" in t for t in rank_1["said"])
