"""`TrainingOptions`: keys of ``[train]`` that change what is trained, declared once."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from shardwise.plan.router_terms import RouterTerms
from shardwise.plan.strategy import Strategy
from shardwise.train.config_values import Fraction


class TrainingOptions(BaseModel):
    """Options of ``[train]`` that are off at 0; see docs/training-options.md."""

    label_smoothing: Fraction = Field(0.0, description="share of a label spread over the vocabulary; not in evaluation")
    z_loss: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="weight of the squared logsumexp of the logits (PaLM: 1e-4); not in evaluation"
    )
    neftune_alpha: Annotated[float, Field(ge=0, le=1000)] = Field(
        0.0, description="NEFTune: noise of up to this / sqrt(length × width) on embedded tokens, only in training"
    )

    router_aux_loss: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0,
        description="weight of the routers' load-balancing loss over all ranks; 0 is the model's own where its config "
        "has output_router_logits",
    )
    router_z_loss: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0, description="weight of the mean squared logsumexp of the routers' logits (ST-MoE: 1e-3)"
    )
    router_bias_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="step of the routers' bias against their load (DeepSeek-V3: 1e-3); for routers that have one"
    )

    ema_decay: Fraction = Field(
        0.0, description="decay of a moving average of the weights, saved, and evaluated at the end; 0 is none"
    )

    @property
    def training_options(self) -> dict[str, float]:
        """The options by their keys, as a checkpoint keeps them."""
        return {key: getattr(self, key) for key in TrainingOptions.model_fields}

    @property
    def router(self) -> RouterTerms:
        """The routers' own losses."""
        return RouterTerms(self.router_aux_loss, self.router_z_loss, self.router_bias_rate)

    def strategy_problems(self, strategy: Strategy) -> list[str]:
        """Return why a strategy cannot train with these options, a line each."""
        problems = []
        if self.neftune_alpha and strategy.tp > 1:
            problems.append(
                f"'train.neftune_alpha' is not for {strategy}: tensor parallel shards the embedding, and each rank "
                "would add noise to its part of a sum; name a strategy without +tp, or remove neftune_alpha"
            )
        if self.ema_decay and strategy.engine == "deepspeed":
            problems.append(
                f"'train.ema_decay' is not for {strategy}: DeepSpeed keeps the weights in flattened parts of its own; "
                "name the same stage on PyTorch (zero1, zero2, fsdp), or remove ema_decay"
            )
        return problems
