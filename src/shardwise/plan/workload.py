"""`Workload`: batch, length, optimizer and pinned facts, independent of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from shardwise.plan.objective import Objective
from shardwise.plan.optimizers import OPTIMIZERS, OptimizerSpec
from shardwise.plan.program import SHARDWISE, ProgramTraits

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan

    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


class Workload(BaseModel):
    """Facts that do not depend on the plan.

    ``optimizer_states`` is the number of parameter-shaped tensors the optimizer keeps (2 for AdamW, 1 for SGD with
    momentum), ``scalar_states`` the number of 0-d ones; ``None`` where the optimizer is not known.
    ``optimizer_temporaries`` is the number of parameter-shaped tensors that live only while it steps, of all parameters
    together; ``loop_temporaries`` that of one parameter after the other, of which the largest counts. Those of the four
    that are not given are as the optimizer is declared.
    ``activation_bytes`` maps a recompute mode to the bytes that one sample saves for backward, logits included;
    ``None`` where it was not measured. ``parameter_groups`` are the names that the optimizer steps, group by group;
    ``None`` means every trainable parameter in one group.

    ``global_batch`` counts samples of ``seq_len`` tokens; ``tokens`` is the whole training run. ``compiled``: blocks
    run under ``torch.compile`` whatever the plan says (`compiles`); ``fused_loss``: the loss never upcasts the logits
    to fp32 (a compiled one, flash-attn's, Liger's). ``framework_overhead`` counts the device's context, communicator
    buffers, and the host time between kernels. ``lora_…``, ``double_quant`` and ``modules_to_save`` are a plan's
    adapters, where it has some
    (`shardwise.model.lora.AdapterFacts`). ``capacity_factor`` is that of a program whose experts compute a fixed number
    of rows and drop what exceeds it, ``None`` where none is dropped. ``average``: a moving average of the trained
    weights is kept, in their layout. ``objective`` is that of the plans that are searched. ``program`` has the traits
    of the program that runs. ``document_len`` is the mean length of the documents that are packed into a sample;
    attention stays inside each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: OptimizerName | None = "adamw"
    optimizer_states: int | None = 2
    scalar_states: int = 1
    optimizer_temporaries: float = 1.0
    loop_temporaries: float = 0.0
    activation_bytes: dict[str, int | None] = {}
    logits_bytes: int | None = None
    parameter_groups: tuple[tuple[str, ...], ...] | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    tokens: float | None = None
    compiled: bool = False
    fused_loss: bool = False
    framework_overhead: bool = True
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    lora_dora: bool = False
    double_quant: bool = True
    modules_to_save: tuple[str, ...] = ()
    average: bool = False
    capacity_factor: float | None = None
    objective: Objective = "lm"
    program: ProgramTraits = SHARDWISE
    document_len: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_declared(cls, data: Any) -> Any:
        spec = OPTIMIZERS.get(data.get("optimizer", "adamw")) if isinstance(data, dict) else None
        if spec is None:
            return data
        together, each = spec.temporaries
        return {
            "optimizer_states": spec.states,
            "scalar_states": spec.scalars if spec.plan_scalars is None else spec.plan_scalars,
            "optimizer_temporaries": together,
            "loop_temporaries": each,
        } | data

    def compiles(self, plan: Plan) -> bool:
        """Return whether memory-bound operations of blocks are fused: the one rule for memory and time."""
        return self.compiled or plan.compile or self.program.fused_kernels

    def fuses_loss(self, plan: Plan) -> bool:
        """Return whether the loss never widens the logits: asked for, or the program's."""
        loss = self.program.loss
        return self.fused_loss or loss == "fused" or (loss == "compiled" and (self.compiled or plan.compile))

    @property
    def custom_state(self) -> OptimizerSpec | None:
        """The optimizer, where its state is not some tensors of the parameter's shape and dtype."""
        spec = OPTIMIZERS.get(self.optimizer or "")
        return spec if spec is not None and spec.state is not None else None
