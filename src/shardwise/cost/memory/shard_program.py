"""Allocations and frees of FSDP2's gathers and reductions, in `cost.memory.step_program`."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.memory.allocation_trace import BUFFERS, GATHER, GRADIENTS, REDUCE, TEMPORARIES
from shardwise.cost.memory.cost_inputs import CostInputs
from shardwise.cost.memory.local_shapes import FP32, UnitWeights
from shardwise.cost.memory.loss_program import LossWriter


@dataclass(slots=True)
class Visit:
    """Execution of a layer group: ``number`` of its units at once, and its saved allocations."""

    piece: int
    number: int
    saved: list[list[int]]
    gathered: list[int]
    copies: int = -1
    exchanged: int = -1


class ShardWriter(LossWriter):
    """Traces sharded weights and gradients, and stores the handles of live allocations while the trace is built."""

    def __init__(self, setting: CostInputs, visits: list[Visit]) -> None:
        super().__init__(setting)
        self.shards = setting.layout.shards
        self.visits = visits
        self.root = [i for i, piece in enumerate(setting.pieces) if not piece.is_block]
        self.root_gathered: list[int] = []
        self.root_gradients: list[int] = []
        self.gradients: list[int] = []
        self.waiting: dict[tuple[int, int], int] = {}
        self.last_reduce = -1
        self.pieces: list[int] = []
        self.flat = -1
        self.fetched: list[int] = []
        self.summed: list[int] = []
        self.adds = self.reduces = False

    def _gather(self, group: list[int], *, ahead: bool, number: int = 1) -> list[int]:
        """Trace unsharded weights on the default stream.

        ``ahead`` keeps the all-gather's output until the next.
        """
        trace, output = self.trace, -1
        if number == 1:
            output = self._send(group)
            self._await_gather()
        elif not self.s.layout.keeps_weights:
            return []
        full = [trace.alloc(size * number, BUFFERS) for i in group for size in self.s.weights[i].gathered]
        if number == 1 and ahead:
            output, self.last_gather = self.last_gather, output
        trace.free(output)
        return full

    def _send(self, group: list[int]) -> int:
        """Trace the all-gather's input and output on its stream; the input is freed at once."""
        trace, layout = self.trace, self.s.layout
        if layout.shard_ranks == 1:
            return -1
        weights = [self.s.weights[i] for i in group]
        moved = [trace.alloc(sum(w.parameters for w in weights), BUFFERS, GATHER)] if layout.offloads else []
        cast = trace.alloc(sum(w.shard_sent for w in weights), BUFFERS, GATHER) if layout.width < FP32 else -1
        output = trace.alloc(sum(w.sent for w in weights), BUFFERS, GATHER)
        if not layout.is_cuda and not layout.in_place:  # gloo gathers into a separate buffer
            self.flat = trace.alloc(sum(w.sent for w in weights), BUFFERS)
        trace.free(cast, *moved)
        return output

    def _await_gather(self) -> None:
        """Free gloo's buffer of a gather: until somebody waits for it, it may live."""
        self.trace.free(self.flat)
        self.flat = -1

    def _take_fetched(self, visit: Visit) -> list[int]:
        if visit.number > 1:
            return []
        output = self.fetched.pop() if self.fetched else self._send([visit.piece])
        self._await_gather()
        gathered = [self.trace.alloc(size, BUFFERS) for size in self.s.weights[visit.piece].gathered]
        self.trace.free(output)
        return gathered

    def _prefetch(self, position: int) -> None:
        """Trace the all-gather of the next block in backward."""
        before = [v for v in self.visits[:position] if self.s.pieces[v.piece].is_block and v.number == 1]
        if before and not self.fetched and not before[-1].gathered:
            self.fetched.append(self._send([before[-1].piece]))

    def _finish(self, visit: Visit, full: list[int], *, last: bool) -> None:
        """Trace the end of a block's backward: free weights, store gradients in fp32 or reduce them."""
        trace, s, weights = self.trace, self.s, self.s.weights[visit.piece]
        if last or s.layout.pp == 1 or not s.layout.keeps_weights:
            visit.gathered = trace.free(*visit.gathered)
        key = self._key(visit)
        if not last:
            self._wait(key, weights.waiting * visit.number, full)
            return
        self._reduce(weights, [*full, self.waiting.pop(key, -1)], visit.number)

    def _finish_root(self, *, last: bool) -> None:
        trace, key = self.trace, (-1, 0)
        weights = [self.s.weights[i] for i in self.root]
        if last or self.s.layout.pp == 1 or not self.s.layout.keeps_weights:
            self.root_gathered = trace.free(*self.root_gathered)
        if not last:
            self._wait(key, sum(w.waiting for w in weights), self.root_gradients)
            self.root_gradients = []
            return
        before, size = self.last_reduce, sum(w.reduce_in for w in weights)
        if not self.pieces:
            trace.free(before)
        self.last_reduce = trace.alloc(size, BUFFERS)
        trace.free(*self.root_gradients, self.waiting.pop(key, -1))
        self.root_gradients = []
        referenced = trace.alloc(sum(w.last_gradient for w in weights[-1:]), BUFFERS)
        self._reduced(sum(w.reduce_out for w in weights))
        self._exchange(before, size)
        trace.free(referenced)
        self.pieces = trace.free(*self.pieces)
        trace.free(self.last_reduce)
        self.last_reduce = -1

    def _key(self, visit: Visit) -> tuple[int, int]:
        """Key of the gradients that wait for reduction; the root has one for all its units."""
        return (visit.piece, id(visit)) if self.s.pieces[visit.piece].is_block else (-1, 0)

    def _wait(self, key: tuple[int, int], size: int, full: list[int]) -> None:
        """Store unsharded gradients of a micro batch that does not reduce: cast to fp32 if needed."""
        if key in self.waiting:
            self.trace.free(*full)
        elif self.s.layout.width == FP32 and full:
            self.trace.free(*full)  # the same bytes under one handle
            self.waiting[key] = self.trace.alloc(size, BUFFERS)
        else:
            self.waiting[key] = self.trace.alloc(size, BUFFERS)
            self.trace.free(*full)

    def _reduce(self, weights: UnitWeights, full: list[int], number: int) -> None:
        trace = self.trace
        before = self.last_reduce
        if number == 1:
            if not self.pieces:
                trace.free(before)
            self.last_reduce = trace.alloc(weights.reduce_in, BUFFERS)
        trace.free(*full)
        referenced = trace.alloc(weights.last_gradient, BUFFERS)  # a variable of ``foreach_reduce`` still references it
        self._reduced(weights.reduce_out * number, number)
        if number == 1:
            self._exchange(before, weights.reduce_in)
        trace.free(referenced)

    def _exchange(self, before: int, sent: int) -> None:
        """Trace the pieces that gloo receives; they and what was sent live until the next unit's exchange begins.

        Where FSDP2 reads the sum at once (`ExchangedSum`), they are freed at once.
        """
        if self.s.layout.is_cuda or self.s.layout.shard_ranks == 1:
            return
        if self.pieces:
            self.trace.free(before, *self.pieces)
        pieces = self.trace.alloc(sent, BUFFERS)
        at_once = self.adds or self.s.layout.sums_replicas or self.s.layout.offloads or self.s.layout.pp > 1
        at_once = at_once or self.s.program.optimizer_in_backward
        self.pieces = self.trace.free(pieces) if at_once else [pieces]

    def _reduced(self, size: int, number: int = 1) -> None:
        """Trace this rank's reduced gradient: stored, accumulated, or copied to the host.

        Under hsdp the result of the all-reduce over replicas lives until the end of backward
        (``FSDPParamGroup._all_reduce_state``).
        """
        if self.adds and self.s.layout.sums_replicas and not self.s.layout.offloads:
            self.summed.append(self.trace.alloc(size, BUFFERS, REDUCE))
        elif self.s.layout.offloads or self.adds:
            self.trace.free(self.trace.alloc(size // number, BUFFERS, REDUCE))
        elif self.s.program.optimizer_in_backward:  # stepped and freed before the next unit's is reduced
            gradient = self.trace.alloc(size // number, GRADIENTS, REDUCE)
            self.trace.free(self.trace.alloc(self.s.temporaries, TEMPORARIES), gradient)
        else:
            self.gradients.append(self.trace.alloc(size, GRADIENTS, REDUCE))
