"""One stage under torch's pipeline schedules: receive, compute, send and reduce.

torch's own ``PipelineStage`` learns shapes from a forward and backward of its own and keeps one receive buffer for each
micro batch. Here a receiver allocates when a schedule asks it to receive, so any micro batch may have another shape:
for each new shape of inputs, the sender first sends the hidden state's form as a few integers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils import _pytree

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.errors import ModelError, UserError
from shardwise.model.call_module import call
from shardwise.parallel.pipeline_parallel.stage_module import Receive

LossFunction = Callable[[Any, Any], torch.Tensor]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8


@dataclass(frozen=True)
class StageSpan:
    """Span of a stage's work on one micro batch, in seconds of `time.perf_counter`.

    ``kind`` is ``forward``, ``backward``, or under zero-bubble schedules ``backward-input`` and ``backward-weight``.
    """

    stage: int
    kind: str
    micro: int
    start_s: float
    end_s: float


@dataclass
class StageWork:
    """Work of the stages: micro batches of a step or evaluation, and the last stage's loss."""

    micros: Sequence[Any]
    loss_fn: LossFunction
    weight: Callable[[Any], float] | None
    loss_sum: torch.Tensor
    spans: list[StageSpan] | None = None
    keys: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        mode = torch.is_grad_enabled()
        self.keys = [(mode, _signature(micro.inputs)) for micro in self.micros]


@dataclass(frozen=True)
class _Hidden:
    """Form of the hidden state sent between two stages, for one shape of inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def packed(self) -> torch.Tensor:
        """Encode as integers on the CPU."""
        sizes = [*self.shape, *(0,) * (_MAX_DIMS - len(self.shape))]
        return torch.tensor([_DTYPES.index(self.dtype), int(self.requires_grad), len(self.shape), *sizes])

    @staticmethod
    def dequantized(packed: torch.Tensor) -> _Hidden:
        dtype, requires_grad, dims, *sizes = packed.tolist()
        return _Hidden(tuple(sizes[:dims]), _DTYPES[dtype], bool(requires_grad))


class RunStage(_PipelineStageBase):
    """Stage of this rank.

    ``keeps_weights`` keeps sharded weights gathered for all micro batches of a step.

    ``control`` is a process group over all ranks that sends CPU tensors, ``None`` for the default one.
    """

    def __init__(
        self,
        module: nn.Module,
        receive: Receive | None,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup | None,
        *,
        keeps_weights: bool,
    ) -> None:
        super().__init__(nn.Module(), index, num_stages, device, group)  # keeps torch from handling FSDP itself
        self.module = module
        self.receive = receive
        self.control = control
        self.keeps_weights = keeps_weights
        self.work: StageWork | None = None
        self.known: dict[Any, _Hidden] = {}
        self.sent_layouts: dict[Any, _Hidden] = {}
        self.sending: list[tuple[dist.Work, torch.Tensor]] = []
        self.taken: dict[int, torch.Tensor] = {}
        self.made: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.returned: dict[int, torch.Tensor | None] = {}
        self.pending: dict[int, Any] = {}
        self.args_recv_info = {0: ()}

    def begin(self, work: StageWork, *, has_backward: bool) -> None:
        """Prepare for a step or an evaluation."""
        self.clear()
        self.work, self.has_backward = work, has_backward
        if isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(False)
            self.module.set_requires_gradient_sync(False)
            self.module.set_reshard_after_backward(not self.keeps_weights)

    def keep_gathered(self) -> None:
        """Keep weights gathered from forward to backward too, for both passes of the backward."""
        if isinstance(self.module, FSDPModule):
            self.module.set_reshard_after_forward(False)

    def end(self) -> None:
        """Wait for pending sends, and release everything."""
        for sent, _ in self.sending:
            sent.wait()
        self.clear()

    def clear(self) -> None:
        """Release everything that belongs to micro batches."""
        for pending in (self.taken, self.made, self.gradients, self.returned, self.pending):
            pending.clear()
        self.sending.clear()
        self.work = None
        if self.receive is not None:
            self.receive.received = None

    # called by torch's schedules before the first micro batch: nothing needs to be prepared

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    # between stages

    def _peer(self, stage: int) -> int:
        return int(self.stage_index_to_group_rank[stage])

    def _is_here(self, stage: int) -> bool:
        return self._peer(stage) == self.group_rank

    def _op(self, op: Any, tensor: torch.Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(op, tensor, group=self.group, group_peer=self._peer(stage))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate and receive the hidden state of a micro batch."""
        if self.is_first or self._is_here(self.stage_index - 1):
            return []
        assert self.work is not None
        key = self.work.keys[fwd_chunk_id]
        if key not in self.known:
            packed = torch.zeros(3 + _MAX_DIMS, dtype=torch.int64)
            dist.recv(packed, group=self.control, src=self._resolve_peer_global_rank(self.stage_index - 1))
            self.known[key] = _Hidden.dequantized(packed)
        known = self.known[key]
        buffer = torch.empty(known.shape, dtype=known.dtype, device=self.device)
        self.taken[fwd_chunk_id] = buffer
        return [self._op(dist.irecv, buffer, self.stage_index - 1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the hidden state; before the first of its kind, send its form."""
        if self.is_last or self._is_here(self.stage_index + 1):
            return []
        assert self.work is not None
        hidden, key = self.made[fwd_chunk_id], self.work.keys[fwd_chunk_id]
        now = _Hidden(tuple(hidden.shape), hidden.dtype, hidden.requires_grad)
        if key not in self.sent_layouts:
            packed = now.packed()
            peer = self._resolve_peer_global_rank(self.stage_index + 1)
            work = dist.isend(packed, group=self.control, dst=peer)
            assert work is not None
            self.sending.append((work, packed))
            self.sent_layouts[key] = now
        elif self.sent_layouts[key] != now:
            raise ModelError(
                f"what stage {self.stage_index} sends on was {self.sent_layouts[key]} and is {now} for inputs of the "
                "same shape: the hidden state may depend on the inputs' shapes only, and requires_grad may not change "
                "after session.prepare; use a strategy without +pp"
            )
        return [self._op(dist.isend, hidden.detach(), self.stage_index + 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate and receive the gradient of the hidden state that was sent."""
        if not self.has_backward or self.is_last or self._is_here(self.stage_index + 1):
            return []
        hidden = self.made[bwd_chunk_id]
        if not hidden.requires_grad:
            return []
        buffer = torch.empty_like(hidden, requires_grad=False)
        self.gradients[bwd_chunk_id] = buffer
        return [self._op(dist.irecv, buffer, self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of the hidden state that was received."""
        if not self.has_backward or self.is_first or self._is_here(self.stage_index - 1):
            return []
        gradient = self.returned.pop(bwd_chunk_id)
        return [] if gradient is None else [self._op(dist.isend, gradient.contiguous(), self.stage_index - 1)]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the hidden state of a stage on this rank."""
        self.taken[mb_index] = prev_stage_outputs.detach().requires_grad_(prev_stage_outputs.requires_grad)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient for a stage on this rank."""
        return self.returned.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradient of a stage on this rank."""
        if next_stage_bwd_outputs is not None:
            self.gradients[mb_index] = next_stage_bwd_outputs

    # compute

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> torch.Tensor:
        """Run forward of one micro batch: the hidden state, or on the last stage the weighted loss."""
        work = self.work
        assert work is not None
        start = self._begin("forward")
        micro = work.micros[fwd_chunk_id]
        if self.receive is not None:
            taken = self.taken[fwd_chunk_id]
            if not self._is_here(self.stage_index - 1):
                taken.requires_grad_(self.known[work.keys[fwd_chunk_id]].requires_grad)
            self.receive.received = taken
        found = call(self.module, micro.inputs)
        if self.receive is not None:
            self.receive.received = None
        if self.is_last:
            found = self._loss(found, micro)
        elif not isinstance(found, torch.Tensor) or found.dtype not in _DTYPES or found.ndim > _MAX_DIMS:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise ModelError(
                f"the hidden state between two blocks is {what}, and pipeline stages send floating-point tensors of up "
                f"to {_MAX_DIMS} dims; use a strategy without +pp"
            )
        else:
            found = found.contiguous()
        if self.has_backward:
            self.made[fwd_chunk_id] = found
        elif not self.is_last:
            self.made[fwd_chunk_id] = found
            self.taken.pop(fwd_chunk_id, None)
        self._note("forward", fwd_chunk_id, start)
        # schedules keep outputs to the end of a step; the graph is kept here, and only until its backward
        return (
            found if self.stage_index + 1 < self.num_stages and self._is_here(self.stage_index + 1) else found.detach()
        )

    def _loss(self, outputs: Any, micro: Any) -> torch.Tensor:
        work = self.work
        assert work is not None
        loss = work.loss_fn(outputs, micro.labels)
        if self.has_backward and not loss.requires_grad:
            raise UserError(
                "step.run: the loss of loss_fn(outputs, labels) does not depend on the model's outputs (it requires no "
                "gradient); compute it from the outputs, without detach() or torch.no_grad()"
            )
        if not getattr(micro, "padding", False):
            work.loss_sum += loss.detach()
        return loss if work.weight is None else loss * work.weight(micro)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward of one micro batch, or only the part that the previous stage waits for."""
        start = self._begin("backward")
        made, taken = self.made.pop(bwd_chunk_id), self.taken.pop(bwd_chunk_id, None)
        gradient = self.gradients.pop(bwd_chunk_id, None)
        wanted = taken is not None and taken.requires_grad
        if full_backward or not wanted:
            if full_backward:
                self._full(made, gradient, last=last_backward)
            else:  # no stage waits for it: all of it runs with the weights' pass
                self.pending[bwd_chunk_id] = (made, gradient)
        else:
            assert taken is not None
            outputs = [made]
            gradients = None if gradient is None else [gradient]
            _, groups = stage_backward_input(outputs, gradients, [taken], self.module.parameters())
            self.pending[bwd_chunk_id] = groups
        if not self.is_first:
            self.returned[bwd_chunk_id] = _gradient_of(taken) if wanted and taken is not None else None
        self._note("backward" if full_backward else "backward-input", bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the rest of a split backward: gradients of weights."""
        start = self._begin("backward")
        pending = self.pending.pop(bwd_chunk_id)
        if isinstance(pending, tuple):
            self._full(*pending, last=False)
        else:
            stage_backward_weight(self.module.parameters(), pending)
            self._each_unit("post_backward")  # accumulates in the reduction dtype, as a full backward does
        if last_backward:
            self._reduce()
        self._note("backward-weight", bwd_chunk_id, start)

    def _full(self, made: torch.Tensor, gradient: torch.Tensor | None, *, last: bool) -> None:
        if last and isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(True)
            self.module.set_requires_gradient_sync(True)
            self.module.set_reshard_after_backward(True)
        if made.requires_grad:
            torch.autograd.backward(made, gradient)

    def _reduce(self) -> None:
        """Reduce gradients that no autograd hook reduces, when weights have their own backward."""
        if not isinstance(self.module, FSDPModule):
            return
        self.module.set_is_last_backward(True)
        self.module.set_requires_gradient_sync(True)
        self.module.set_reshard_after_backward(True)
        self._each_unit("post_backward")
        self.module._get_fsdp_state()._root_post_backward_final_callback()

    def _each_unit(self, what: str) -> None:
        if isinstance(self.module, FSDPModule):
            for state in self.module._get_fsdp_state()._state_ctx.all_states:
                for group in state._fsdp_param_groups:
                    getattr(group, what)()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the last backward has reduced."""

    def _begin(self, part: str) -> float:
        COMM_TIMER.enter(part)
        return self._clock()

    def _clock(self) -> float:
        if self.work is None or self.work.spans is None:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _note(self, kind: str, micro: int, start: float) -> None:
        COMM_TIMER.leave()
        if self.work is not None and self.work.spans is not None:
            self.work.spans.append(StageSpan(self.stage_index, kind, micro, start, self._clock()))


def _gradient_of(taken: torch.Tensor) -> torch.Tensor:
    gradient, taken.grad = taken.grad, None
    return torch.zeros_like(taken, requires_grad=False) if gradient is None else gradient


def _signature(inputs: Any) -> Any:
    """Return all properties of the inputs that the hidden state's shape may depend on."""
    leaves, spec = _pytree.tree_flatten(inputs)
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )
