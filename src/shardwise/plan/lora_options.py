"""`AdapterOptions`: adapters of ``+lora`` or ``+qlora``, and the quantization of their base."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

ROLES = ("all-linear", "attention", "mlp")
"""Roles allowed in ``targets``, besides module names: all linear layers of the blocks, or those of one part."""
QuantType = Literal["nf4", "fp4"]


class AdapterOptions(BaseModel):
    """Low-rank adapters as in peft: a layer's output gains x·Aᵀ·Bᵀ·s.

    A is [rank, inputs], B [outputs, rank]. The scale s is ``alpha / rank``, or ``alpha / √rank`` with ``rslora``
    (arXiv:2312.03732). ``dora`` trains the norm of each row apart from its direction (arXiv:2402.09353). ``targets``
    are roles (``all-linear``, ``attention``, ``mlp``) or ends of module names (``q_proj``). ``quant_type`` and
    ``double_quant`` are how ``+qlora`` quantizes the weights of the blocks' linear layers: 4 bits in blocks of 64
    (arXiv:2305.14314). ``modules_to_save`` are names of modules, or ends of them, that are trained in full.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: Annotated[int, Field(ge=1)] = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] = Field(("all-linear",), min_length=1)
    rslora: bool = False
    dora: bool = False
    quant_type: QuantType = "nf4"
    double_quant: bool = True
    modules_to_save: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of B·A·x."""
        return float(self.alpha / (self.rank**0.5 if self.rslora else self.rank))
