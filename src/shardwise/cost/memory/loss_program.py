"""Allocations and frees of the loss, forward and backward, in `cost.memory.step_program`."""

from __future__ import annotations

from shardwise.cost.memory.allocation_trace import LOGITS, AllocationTrace
from shardwise.cost.memory.cost_inputs import CostInputs
from shardwise.cost.memory.local_shapes import FP32


class LossWriter:
    """Traces the loss. ``last_gather`` and ``late`` are allocations of forward that still live."""

    def __init__(self, setting: CostInputs) -> None:
        self.s = setting
        self.trace = AllocationTrace()
        self.last_gather = -1
        self.late: list[int] = []
        self.log_probabilities = -1

    def logits(self) -> float:
        """Elements of one micro batch's logits; 0 on a stage without the loss."""
        return max((b.logits for b in self.s.bytes), default=0.0) * self.s.micro

    def loss(self, narrow: int, elements: float) -> None:
        """Trace low-precision logits, fp32 copy and log-probabilities; in backward both gradients."""
        trace = self.trace
        widens = self.s.layout.width < FP32 and not self.s.program.fused_loss
        upcast = trace.alloc(elements * FP32, LOGITS) if widens else narrow
        trace.free(self.last_gather)  # ``FSDPState._post_forward`` keeps it while it casts the output to fp32
        self.last_gather = -1
        if self.s.program.fused_loss:
            self.log_probabilities = narrow
            self._kept_beside(elements, self.s.layout.width)
            return
        if upcast != narrow:
            trace.free(narrow)
        if self.s.layout.loss_in_place:
            self.log_probabilities = upcast
            return
        self.log_probabilities = trace.alloc(elements * FP32, LOGITS)
        self._kept_beside(elements, 2 * FP32)
        trace.free(upcast)

    def _kept_beside(self, elements: float, counted: int) -> None:
        """Trace what the program holds of the logits until its loss is done, beside ``counted`` bytes each."""
        if self.s.program.logit_bytes is not None:
            self.trace.free(self.trace.alloc(elements * max(0.0, self.s.program.logit_bytes - counted), LOGITS))

    def chunked_loss(self, elements: float) -> None:
        """Trace a chunk's fp32 logits, their low-precision gradient and part of the head's gradient.

        The fp32 gradients of the hidden states and of the head are stored until backward (`parallel.loss_chunks`).
        """
        trace, width, chunks = self.trace, self.s.layout.width, self.s.program.loss_chunks
        trace.free(self.last_gather, *self.late)
        self.last_gather, self.late = -1, []
        hidden, weight = self._head_elements()
        self.log_probabilities = trace.alloc((hidden + weight) * FP32, LOGITS)
        upcast = trace.alloc(elements / chunks * FP32, LOGITS)
        if width < FP32:
            trace.free(trace.alloc((elements + weight) / chunks * width, LOGITS))
        trace.free(upcast)

    def _head_elements(self) -> tuple[float, float]:
        """Elements of the hidden states that enter the head, and of its weight; 0 if it is frozen."""
        s = self.s
        ops = [op for unit in s.bytes if unit.logits for op in unit.ops if op.gradient_in]
        head = next((op for op in reversed(ops) if op.weight_gradient), ops[-1])  # a frozen one has no gradient
        weights = (w for piece in s.pieces for w in piece.unit.weights)
        trained = any(w.trainable and w.num_elements == head.weight_gradient for w in weights)
        return head.gradient_in / s.layout.width * s.micro, head.weight_gradient if trained else 0.0

    def loss_gradient(self) -> int:
        """Allocate the gradient of the logits, in the compute type."""
        trace, s = self.trace, self.s
        elements = self.logits()
        if s.program.loss_chunks > 1 and elements:
            if s.layout.width < FP32:  # cast before it is passed to the model's backward
                trace.free(trace.alloc(sum(self._head_elements()) * s.layout.width, LOGITS))
            trace.free(self.log_probabilities)
            return -1
        if s.program.fused_loss:
            return self.log_probabilities
        copies = max((b.loss_copies for b in s.bytes), default=0)
        outer = [trace.alloc(elements * FP32, LOGITS) for _ in range(copies - 2)]
        inner = self.log_probabilities if s.layout.loss_in_place else trace.alloc(elements * FP32, LOGITS)
        if not s.layout.loss_in_place:
            trace.free(self.log_probabilities, *outer)
        if s.layout.width == FP32:
            return inner
        incoming = trace.alloc(elements * s.layout.width, LOGITS)
        trace.free(inner)
        return incoming
