"""Agreement message of all ranks after a step's last backward, before the optimizer steps.

It carries the loss and the signs of a silently wrong gradient: how many parameters got no
gradient on a rank, and in which order sharded units were reduced.
"""

from __future__ import annotations

import itertools
import json
import zlib

import torch
import torch.distributed as dist
from torch import nn

from shardwise.distributed.control_message import Meeting
from shardwise.distributed.places import Ints, first_in_group
from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.errors import TrainingError
from shardwise.model.read import clean_name
from shardwise.parallel.apply import Applied
from shardwise.parallel.data_parallel.ddp import Replicated, finish_reduction
from shardwise.parallel.data_parallel.unit_forwards import left_order
from shardwise.parallel.data_parallel.unit_order import orders_of
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.plan import Plan


class Agreement:
    """Agreement of all ranks on one session's gradients."""

    def __init__(self, applied: Applied, plan: Plan, ranks: Ranks) -> None:
        self._applied, self._plan, self._ranks = applied, plan, ranks
        self._orders = orders_of(applied.outer)
        self._missing: dict[int, nn.Parameter] = {}
        self._given: set[int] | None = None  # parameters with a gradient before the first padding micro batch
        self._message: Meeting | None = None
        self._loss: tuple[dist.Work, torch.Tensor] | None = None
        self._first = first_in_group(plan.dims, "tp", "pp")  # of each rank's part: they reduce the same parameters

    def begin_step(self) -> None:
        """Reset the state of the previous step."""
        self._missing, self._message, self._loss = {}, None, None
        self._given = None
        for order in self._orders:
            order.begin_step()
            order.watch_strays()

    def end_step(self, *, done: bool = True) -> None:
        """Stop reporting until the next step begins; one that was not ``done`` will not be."""
        for order in self._orders:
            order.end_step(done=done)

    def begin_micro(self, *, last: bool, padding: bool) -> None:
        """Prepare for a micro batch; parameters that only padding reaches have no gradient."""
        outer = self._applied.outer
        if padding and self._given is None:
            self._given = {id(p) for p in self._applied.module.parameters() if p.grad is not None}
            for order in self._orders:
                order.before_padding()
        if last and isinstance(outer, Replicated) and self._plan.grad_accum > 1:
            outer.mark()

    def begin_backward(self) -> None:
        """Check before each backward for changes that FSDP2 cannot follow.

        Raises:
            ModelError: a unit's output was changed in place; names the unit.
        """
        for order in self._orders:
            order.check_views()

    def finish_backward(self) -> None:
        """Reduce, after each backward, the parameters that DDP still waits for."""
        self._missing |= {id(p): p for p in finish_reduction(self._applied.outer)}
        if self._given is not None and isinstance(self._applied.outer, Replicated):
            trained = (p for p in self._applied.module.parameters() if p.requires_grad)
            self._missing |= {id(p): p for p in trained if id(p) not in self._given}

    def send(self, loss_sum: torch.Tensor) -> None:
        """Start the message; ``loss_sum`` (0-d, float64) is this rank's part of the loss."""
        if self._ranks.control is None:
            return
        for order in self._orders:
            self._missing |= {id(p): p for p in order.without_gradient()}
        digest = 0
        for order in self._orders:
            digest = zlib.crc32(order.digest().to_bytes(4), digest)
        on_cpu = loss_sum.device.type == "cpu"
        strays = sum(len(order.strays()) for order in self._orders)
        left = sum(len(order.left) for order in self._orders)
        loss = int(loss_sum.view(torch.int64)) if on_cpu else 0  # its bits, in a message of integers
        fields = [len(self._missing), digest, strays, left, loss]
        self._message = Meeting(fields, self._ranks.control, "the end of a step")
        if not on_cpu:  # the host does not wait for the device
            reduced = dist.all_reduce(loss_sum, async_op=True)
            assert reduced is not None
            self._loss = reduced, loss_sum

    def arrive(self) -> None:
        """Wait for the message only."""
        if self._message is not None:
            self._message.wait()

    def settle(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Return the loss of all ranks; reset gradients that no rank has to ``None``.

        Raises:
            TrainingError: on all ranks, if gradients were not reduced alike.
        """
        self.end_step()
        if self._message is None:
            return loss_sum
        rows, self._message = self._message.rows(), None
        if self._loss is not None:
            self._loss[0].wait()
        else:
            loss_sum.copy_(torch.from_numpy(rows[:, 4].copy()).view(torch.float64).sum())
        if rows[:, 3].any():
            self._refuse_left(rows[:, 3].nonzero()[0].tolist())
        if rows[:, 2].any():
            self._refuse_strays()
        self._check_order(rows[:, 1])
        if rows[:, 0].any():
            self._leave_alone()
        return loss_sum

    def _refuse_left(self, ranks: list[int]) -> None:
        mine = json.dumps([name for order in self._orders for name in order.left])
        names = [name for text in gather_text(mine, self._ranks) for name in json.loads(text)]
        where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{', ...' if ranks[4:] else ''}"
        raise TrainingError(f"on {where}, {left_order(names[0])}{self._kept()}")

    def _kept(self) -> str:
        return "" if self._plan.optimizer_in_backward else "; no weight was changed in this step"

    def _refuse_strays(self) -> None:
        mine = json.dumps([name for order in self._orders for name in order.strays()])
        names = list(dict.fromkeys(name for text in gather_text(mine, self._ranks) for name in json.loads(text)))
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        raise TrainingError(
            f"{', '.join(names[:2])}{more}: the loss uses sharded weights outside of the forward of their block (a "
            f"penalty on model.parameters(), torch.func.functional_call), and such gradients are not reduced under "
            f"{self._plan.strategy}; compute it inside of the block, or use ddp or zero1"
        )

    def _check_order(self, digests: Ints) -> None:
        apart = digests != digests[self._first]
        if not apart.any():
            return
        mine = json.dumps([name for order in self._orders for name in order.reductions()])
        other = int(apart.argmax())
        one = int(self._first[other])
        lists = [json.loads(text) for text in gather_text(mine, self._ranks)]
        pairs = itertools.zip_longest(lists[one], lists[other], fillvalue="nothing")
        at, (here, there) = next((at, pair) for at, pair in enumerate(pairs, 1) if pair[0] != pair[1])
        kept = "" if self._plan.optimizer_in_backward else "; no weight was changed"
        raise TrainingError(
            f"ranks {one} and {other} reduced other gradients under {self._plan.strategy}: reduction {at} was of "
            f"'{here}' on rank {one} and of '{there}' on rank {other}{kept}. Which parts of the model "
            "run depends on a rank's samples in a way that sharding cannot follow; use ddp or zero1"
        )

    def _leave_alone(self) -> None:
        """Remove the zeros of parameters without a gradient on any rank.

        An optimizer then leaves them unchanged, as in one
        process.

        Raises:
            TrainingError: on all ranks, if the backward has stepped them already.
        """
        ownership, pipeline = ownership_of(self._applied.module), self._applied.pipeline
        tied = {name for pair in pipeline.tied for name in pair} if pipeline is not None else set()
        named = [(clean_name(name), p) for name, p in self._applied.module.named_parameters()]
        mine = {
            name if ownership is None else ownership.canonical(name): p
            for name, p in named
            if id(p) in self._missing and name not in tied
        }
        lists = [json.loads(text) for text in gather_text(json.dumps([*mine]), self._ranks)]
        nobody: dict[int, set[str]] = {}
        parts = self._first.tolist()
        for part, names in zip(parts, lists, strict=True):
            nobody[part] = nobody[part] & set(names) if part in nobody else set(names)
        if self._plan.optimizer_in_backward and any(nobody.values()):
            names = sorted({name for names in nobody.values() for name in names})
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise TrainingError(
                f"{', '.join(names[:3])}{more}: no rank has a gradient in this step, and "
                "optimizer.in_backward has stepped them by zeros; freeze them with "
                "requires_grad_(False), or set optimizer.in_backward to false"
            )
        for name in nobody[parts[self._ranks.rank]]:
            mine[name].grad = None
