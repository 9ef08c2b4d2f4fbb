"""Allocation trace of two steps of a rank, by stream and category, for the allocator model.

The order is that of this package's program: FSDP2 on each block and on the rest (root), DDP with gradients in its
buckets, autocast for unsharded weights, one loss over fp32 logits. Of a long row of equal blocks the first two and the
last two are traced op by op, those between as one, so that the length of the trace does not depend on depth; live bytes
are the same at every peak, because between them they only rise or only fall.

FSDP2 (torch.distributed.fsdp, ``_fsdp_collectives.py`` of 2.13): all-gather inputs and outputs are allocated on a
separate stream, and an output lives until the next unit is gathered; unsharded weights are copied out of it on the
default stream; reduced gradients are allocated on the reduce-scatter stream, whose fp32 input, on the default stream,
lives until the next unit's. Blocks freed on one stream cannot be used by another.

Not counted: buffers of the model, inputs and labels, workspaces of matrix libraries, and tensors that the user's loop
keeps alive.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.cost.memory.activations import OpBytes, UnitBytes
from shardwise.cost.memory.allocation_trace import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    AllocationTrace,
)
from shardwise.cost.memory.cost_inputs import CostInputs
from shardwise.cost.memory.local_shapes import FP32
from shardwise.cost.memory.saved_pieces import kept_logits, saved_pieces, state_pieces
from shardwise.cost.memory.shard_program import ShardWriter, Visit
from shardwise.plan.plan import Recompute


def write_program(setting: CostInputs) -> AllocationTrace:
    """Trace load, two full steps and the end of the second.

    The phases are ``load``, ``first_step``, ``forward``, … ``resume``.
    """
    writer = _Writer(setting)
    writer.trace.phase("load")
    writer.load()
    writer.trace.alloc(setting.average, BUFFERS)
    for first in (True, False):
        if first:
            writer.trace.phase("first_step")
        writer.step(first=first)
    writer.trace.phase("save")  # tensors are written in place, or pass through the host one at a time
    writer.trace.phase("resume")
    if not setting.layout.is_cuda:  # a shard that is read, before it is copied to its parameter
        largest = max((w.largest for w in setting.weights), default=0) * FP32
        writer.trace.free(writer.trace.alloc(largest, TEMPORARIES))
    return writer.trace


class _Writer(ShardWriter):
    """Traces the whole step."""

    def __init__(self, setting: CostInputs) -> None:
        super().__init__(setting, list(_visits(setting)))
        self.made = -1
        blocks = [visit for visit in self.visits if setting.pieces[visit.piece].is_block]
        self.kept = blocks[-1] if blocks and setting.layout.keeps_last else None

    def load(self) -> None:
        """Trace the load: units materialize one after the other, each is sharded at once, root last.

        The root is materialized as one unit. Rank 0 builds the full model on the host, where the optimizer references
        it until all units are sharded: on a CPU that is the same memory.
        """
        trace, layout, s = self.trace, self.s.layout, self.s
        pairs = list(zip(s.weights, s.pieces, strict=True))
        keeps = self.shards and not layout.is_cuda
        built = trace.alloc(sum(w.full * p.count for w, p in pairs), PARAMETERS) if keeps else -1
        blocks = [([v.piece], v.number) for v in self.visits if s.pieces[v.piece].is_block]
        copies = 2 if s.program.reference == "copy" else 1  # the reference, frozen, is stored as the policy is
        for group, number in [*blocks, (self.root, 1)] * copies:
            weights = [s.weights[i] for i in group]
            full = trace.alloc(sum(w.full for w in weights), BUFFERS) if self.shards and not keeps else -1
            if not layout.offloads:
                for unit in weights:
                    trace.alloc(unit.parameters * number, PARAMETERS)
            trace.free(full)
        trace.free(built)
        trace.alloc(s.received * s.micro, ACTIVATIONS)
        if s.has_buckets:
            trace.alloc(sum(w.gradients * p.count for w, p in pairs), GRADIENTS)
            trace.alloc(min(layout.buckets, sum(w.full * p.count for w, p in pairs)), BUFFERS)

    def step(self, *, first: bool) -> None:
        """Trace micro batches, the optimizer, and the release of gradients."""
        s, trace = self.s, self.trace
        if first and s.program.optimizer_in_backward and not s.layout.offloads:  # grows while the first backward runs
            trace.alloc(s.optimizer, OPTIMIZER)
        always = self.shards and not s.waits
        turns = self._turns()
        for index, others in enumerate(turns):
            if not first:
                trace.phase("forward")
            crowd = self._crowd(others)
            self.forward()
            if not first:
                trace.phase("backward")
            last = index == len(turns) - 1 and not s.reduces_late
            self.backward(last=always or last, again=index > 0 and always)
            trace.free(*crowd)
        if s.reduces_late:
            for visit in reversed(self.visits):
                if s.pieces[visit.piece].is_block:
                    self._finish(visit, [], last=True)
            self._finish_root(last=True)
        if not first:
            trace.phase("optimizer")
        if not s.layout.offloads:
            if first and not s.program.optimizer_in_backward:
                self._state()
            trace.free(trace.alloc(s.temporaries, TEMPORARIES))
        trace.free(*self.gradients)
        self.gradients = []
        self.waiting = {}

    def _turns(self) -> tuple[int, ...]:
        """Micro batches that are traced: how many others are in flight beside each.

        The first one, at the maximum in flight; in a pipeline the same with gradients that wait for reduction, which
        1F1B reaches after one backward and one more forward; and the last one, alone.
        """
        number, in_flight = self.s.program.grad_accum, self.s.in_flight
        if number == 1:
            return (0,)
        if in_flight == 1 or number == 2:
            return (in_flight - 1, 0)
        return (in_flight - 1, in_flight - 1 if number > in_flight else in_flight - 2, 0)

    def _crowd(self, others: int) -> list[int]:
        """Trace what other micro batches in flight have saved."""
        logits = self.trace.alloc(kept_logits(self.s) * others, LOGITS)
        return [logits, *(self.trace.alloc(size, ACTIVATIONS) for size in saved_pieces(self.s, others))]

    def _state(self) -> None:
        """Trace the optimizer's state: at once, or a tensor for each state of each block."""
        for size in state_pieces(self.s):
            self.trace.alloc(size, OPTIMIZER)

    # forward

    def forward(self) -> None:
        """Trace one micro batch up to its logits."""
        trace = self.trace
        if self.shards and not self.root_gathered:
            self.root_gathered = self._gather(self.root, ahead=self.s.layout.is_cuda)
        for visit in self.visits:
            is_block = self.s.pieces[visit.piece].is_block
            if self.shards and is_block and not visit.gathered:
                visit.gathered = self._gather([visit.piece], ahead=self.s.layout.is_cuda, number=visit.number)
            visit.saved = self._forward_unit(visit)
            if is_block and not self.s.layout.keeps_weights and visit is not self.kept:
                trace.free(*visit.gathered)
                visit.gathered = []
        logits = self.logits()
        self.made = trace.alloc(self.s.sent * self.s.micro, ACTIVATIONS)
        if self.s.program.loss_chunks > 1 and logits:
            self.chunked_loss(logits)
        else:
            narrow = trace.alloc(logits * self.s.layout.width, LOGITS)
            trace.free(*self.late)
            self.late = []
            self.loss(narrow, logits)
        if self.s.program.reference != "none":
            self._reference(logits)

    def _reference(self, logits: float) -> None:
        """Trace the forward of the frozen reference beside what the policy has saved; nothing of it is saved.

        The order is TRL's: the policy's forward, then ``compute_ref_log_probs`` under ``no_grad``. Sharded weights are
        gathered for a block and freed; a base without its adapters uses those that the policy keeps gathered. The
        log-probabilities of its logits are made as those of the policy.
        """
        trace, layout, own = self.trace, self.s.layout, self.s.program.reference == "copy"
        root = self._gather(self.root, ahead=True) if self.shards and own else []
        for visit in self.visits:
            if visit.number > 1:
                continue  # equal to those beside it
            weights, is_block = self.s.weights[visit.piece], self.s.pieces[visit.piece].is_block
            gathers = self.shards and is_block and (own or not visit.gathered)
            gathered = self._gather([visit.piece], ahead=True) if gathers else []
            gathered.append(trace.alloc(weights.widened + weights.copies * layout.autocasts, BUFFERS))
            self._pass(self.s.bytes[visit.piece])
            trace.free(*gathered)
        made = logits / self.s.program.loss_chunks
        found = trace.alloc(made * layout.width, LOGITS)
        if not self.s.program.fused_loss:
            trace.free(trace.alloc(made * FP32, LOGITS))
        trace.free(found, self.last_gather, *root)
        self.last_gather = -1

    def _copies(self, visit: Visit, number: int) -> None:
        """Trace autocast's low-precision weights.

        Backward keeps them, or under recompute autocast's cache until forward ends.
        """
        if not self.s.layout.autocasts:
            return
        handle = self.trace.alloc(self.s.weights[visit.piece].copies * number, BUFFERS)
        if self._mode(visit) == "none":
            visit.copies = handle
        else:
            self.late.append(handle)

    def _mode(self, visit: Visit) -> Recompute:
        return self.s.pieces[visit.piece].recompute

    def _is_away(self, visit: Visit) -> bool:
        """Return whether what the unit saves is in host memory until its backward."""
        return self.s.program.saves_on_host and self.s.pieces[visit.piece].is_block

    def _forward_unit(self, visit: Visit) -> list[list[int]]:
        trace, unit, micro, number = self.trace, self.s.bytes[visit.piece], self.s.micro, visit.number
        if self._mode(visit) != "none":
            kept = []
            for _ in range(number):  # one by one: freed blocks between them leave holes
                self._copies(visit, 1)
                kept.append(trace.alloc(0 if self._is_away(visit) else unit.kept * micro, ACTIVATIONS))
            if number == 1:
                dequantized = trace.alloc(self.s.weights[visit.piece].widened, BUFFERS)
                self._pass(unit)
                trace.free(dequantized)
            return [kept]
        self._copies(visit, number)
        if self._is_away(visit):
            visit.exchanged = trace.alloc(self.s.weights[visit.piece].exchanged * number, BUFFERS)
            dequantized = trace.alloc(self.s.weights[visit.piece].widened, BUFFERS)
            self._pass(unit)
            trace.free(dequantized)
            return [[] for _ in unit.ops]
        if number > 1:
            visit.exchanged = trace.alloc(self.s.weights[visit.piece].exchanged * number, BUFFERS)
            return [[trace.alloc(op.saved * micro * number, ACTIVATIONS)] for op in unit.ops]
        visit.exchanged = trace.alloc(self.s.weights[visit.piece].exchanged * number, BUFFERS)
        saved, dequantized = [], trace.alloc(self.s.weights[visit.piece].widened, BUFFERS)
        for op in unit.ops:
            moment = trace.alloc(op.temporary * micro, ACTIVATIONS)
            saved.append([trace.alloc(op.saved * micro, ACTIVATIONS)])
            trace.free(moment)
        trace.free(dequantized)
        return saved

    def _pass(self, unit: UnitBytes) -> None:
        """Trace ops without saved results: each result lives until the next op has run.

        The stream between them lives throughout.
        """
        before, stream = -1, self.trace.alloc(unit.input * self.s.micro, ACTIVATIONS)
        for op in unit.ops:
            moment = self.trace.alloc(op.temporary * self.s.micro, ACTIVATIONS)
            here = self.trace.alloc(op.saved * self.s.micro, ACTIVATIONS)
            self.trace.free(moment, before)
            before = here
        self.trace.free(before, stream)

    # backward

    def backward(self, *, last: bool, again: bool = False) -> None:
        """Trace one micro batch back to its inputs.

        ``last`` reduces gradients, ``again`` adds them to those of earlier micro batches.
        """
        trace, s = self.trace, self.s
        self.adds, self.reduces = again, last
        incoming = self.loss_gradient() if self.made < 0 else trace.alloc(s.sent * s.micro, ACTIVATIONS)
        trace.free(self.made)
        self.made = -1
        for position in range(len(self.visits) - 1, -1, -1):
            visit = self.visits[position]
            is_block = s.pieces[visit.piece].is_block
            if self.shards and is_block:
                visit.gathered = visit.gathered or self._take_fetched(visit)
                self._prefetch(position)
            incoming, full = self._backward_unit(visit, incoming)
            if not self.shards:
                continue
            if is_block:
                self._finish(visit, full, last=last)
            else:
                self.root_gradients += full
        trace.free(incoming)
        if self.shards:
            self._finish_root(last=last)
        trace.free(*self.summed)
        self.summed = []

    def _backward_unit(self, visit: Visit, incoming: int) -> tuple[int, list[int]]:
        """Return the handles of the next unit's gradient and of unsharded weight gradients."""
        trace, s, unit, weights = self.trace, self.s, self.s.bytes[visit.piece], self.s.weights[visit.piece]
        mode, full = self._mode(visit), []
        if visit.number > 1:
            trace.free(*(handle for group in visit.saved for handle in group), visit.copies, visit.exchanged)
            visit.copies = visit.exchanged = -1
            if not self.shards:
                self._own_gradients(visit)
            return incoming, []
        if self._is_away(visit):
            back = [op.saved for op in unit.ops] if mode == "none" else [unit.kept]
            visit.saved = [[trace.alloc(size * s.micro, ACTIVATIONS)] for size in back]
        recomputed: list[int] = []
        if mode != "none":
            trace.free(visit.copies)
            visit.copies = trace.alloc(weights.copies, BUFFERS) if s.layout.autocasts else -1
            visit.exchanged = trace.alloc(weights.exchanged, BUFFERS)
            recomputed = self._remake(unit)
        done, dequantized = 0, trace.alloc(weights.widened, BUFFERS)
        joins = s.layout.width == FP32 and self._key(visit) in self.waiting
        for index in range(len(unit.ops) - 1, -1, -1):
            op = unit.ops[index]
            moment = trace.alloc(op.temporary * s.micro, ACTIVATIONS)
            outgoing = trace.alloc(max(op.gradient_in, 0) * s.micro, ACTIVATIONS)
            gradient = int(op.weight_gradient) * s.layout.width
            full += self._weight_gradient(gradient, op, joins=joins)
            done += gradient
            trace.free(moment)
            if outgoing >= 0:
                trace.free(incoming)
                incoming = outgoing
            trace.free(*(visit.saved[index] if mode == "none" else [recomputed[index]]))
        if mode != "none":
            trace.free(*visit.saved[0])
        total = weights.full_gradients
        if self.shards and total > done and not joins:
            full.append(trace.alloc(total - done, BUFFERS))
        elif not self.shards:
            self._own_gradients(visit)
        trace.free(visit.copies, dequantized, visit.exchanged)
        visit.copies = visit.exchanged = -1
        return incoming, full

    def _remake(self, unit: UnitBytes) -> list[int]:
        """Trace the ops that recompute executes, one handle for each op."""
        share = unit.again / max(1.0, sum(op.saved for op in unit.ops))
        handles = []
        for op in unit.ops:
            moment = self.trace.alloc(op.temporary * self.s.micro, ACTIVATIONS)
            handles.append(self.trace.alloc(op.saved * share * self.s.micro, ACTIVATIONS))
            self.trace.free(moment)
        return handles

    def _weight_gradient(self, gradient: int, op: OpBytes, *, joins: bool) -> list[int]:
        """Trace a weight gradient.

        FSDP2 keeps it until the unit is done; in fp32 it is added to the one that waits for reduction. Unsharded
        weights get an fp32 copy, which is added to its bucket.
        """
        if self.shards and not joins:
            return [self.trace.alloc(gradient, BUFFERS)]
        unreduced = self.trace.alloc(gradient, BUFFERS)
        if self.s.layout.width < self.s.layout.accumulated:
            self.trace.free(self.trace.alloc(op.weight_gradient * FP32, BUFFERS))
        self.trace.free(unreduced)
        return []

    def _own_gradients(self, visit: Visit) -> None:
        """Trace unsharded gradients outside DDP's buckets.

        Without DDP these are all gradients, until the step's end; with it those of micro batches that do not reduce
        (``no_sync``), until the last one adds them to the buckets.
        """
        key = (visit.piece, id(visit))
        if self.s.has_buckets and self.s.program.buckets_add:
            return
        if self.s.has_buckets and self.reduces:
            self.trace.free(self.waiting.pop(key, -1))
        elif key not in self.waiting:
            total = self.s.weights[visit.piece].gradients * visit.number
            if self.s.program.optimizer_in_backward:
                gradient = self.trace.alloc(total // visit.number, GRADIENTS)
                self.trace.free(self.trace.alloc(self.s.temporaries, TEMPORARIES), gradient)
                return
            self.waiting[key] = self.trace.alloc(total, BUFFERS if self.s.has_buckets else GRADIENTS)
            self.gradients += [] if self.s.has_buckets else [self.waiting[key]]


def _visits(setting: CostInputs) -> Iterator[Visit]:
    """Split each row of equal units into its first two, the middle as one, and its last two."""
    for i, piece in enumerate(setting.pieces):
        short = piece.count <= setting.program.written + 1
        edge = piece.count if short else setting.program.written // 2
        yield from (Visit(i, 1, [], []) for _ in range(edge))
        if not short:
            yield Visit(i, piece.count - 2 * edge, [], [])
            yield from (Visit(i, 1, [], []) for _ in range(edge))
