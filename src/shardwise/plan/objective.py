"""`Objective`: what a step's loss is made of, for planning.

``lm`` predicts next tokens. ``dpo`` is direct preference optimization (Rafailov 2023, arXiv 2305.18290): a sample is a
pair, a chosen and a rejected sequence, and both pass through the policy and through a frozen reference, in one
concatenated forward each (TRL's ``DPOTrainer.concatenated_forward`` and ``compute_ref_log_probs``). This package plans
it and does not run it.
"""

from __future__ import annotations

from typing import Literal, get_args

Objective = Literal["lm", "dpo"]
Reference = Literal["none", "copy", "base"]  # no frozen reference, a copy of the model, the model without its adapters

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
SEQUENCES: dict[Objective, int] = {"lm": 1, "dpo": 2}  # of a sample
RUN_BY: dict[Objective, str] = {"lm": "", "dpo": "trainers such as TRL's DPOTrainer run it"}


def reference_of(objective: Objective, adapter: str) -> Reference:
    """Return what the reference of an objective is.

    With adapters it is the model whose adapters are off, so there is no second copy (TRL: ``ref_model=None`` with PEFT,
    ``null_ref_context``).
    """
    if objective == "lm":
        return "none"
    return "copy" if adapter == "none" else "base"
