"""`TrainingOptions`: keys of ``[train]`` that change what is trained, declared once."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from shardwise.train.config_values import Fraction


class TrainingOptions(BaseModel):
    """Options of ``[train]`` that are off at 0; see docs/training-options.md."""

    label_smoothing: Fraction = Field(0.0, description="share of a label spread over the vocabulary; not in evaluation")
    z_loss: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="weight of the squared logsumexp of the logits (PaLM: 1e-4); not in evaluation"
    )
