"""Tools that a plan is exported to, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import PlanError
from shardwise.interop.accelerate_yaml import export_accelerate
from shardwise.interop.deepspeed.export import export_deepspeed, export_losses, export_notes
from shardwise.interop.exported import Exported
from shardwise.interop.fabric_script import export_fabric
from shardwise.interop.titan_config import export_titan
from shardwise.interop.trainer_json import export_trainer
from shardwise.plan.plan import Plan, export_problems
from shardwise.train.config import Config


@dataclass(frozen=True)
class Target:
    """A tool: ``clips`` where its file has the largest norm of the gradient, ``needs_config`` where it has more."""

    write: Callable[[Plan, Config | None, float | None, Path | None], Exported]
    clips: bool = True
    needs_config: bool = False


def export_to(name: str, plan: Plan, config: Config | None, clip_norm: float | None, output: Path | None) -> Exported:
    """Export ``plan``, and ``config`` if there is one; ``clip_norm`` counts without a config.

    Raises:
        PlanError: the target needs a config, or has no equivalent of the plan.
    """
    target = TARGETS[name]
    if problems := export_problems(plan, name):
        raise PlanError(*problems)
    if target.needs_config and config is None:
        raise PlanError(f"--to {name} writes the model, the data and the optimizer, too; add --config CONFIG.toml")
    return target.write(plan, config, clip_norm if config is None else config.optimizer.clip_norm, output)


def _pytorch(plan: Plan, config: Config | None, clip_norm: float | None, output: Path | None) -> Exported:
    from shardwise.interop.pytorch.eject import eject  # with torch, which no other target needs
    from shardwise.train.data.corpus import Corpus
    from shardwise.train.tasks.registry import prepare_data

    assert config is not None
    corpus = prepare_data(config, Path(config.train.output) / "data", lambda text: None)
    if not isinstance(corpus, Corpus):
        raise PlanError(f"model.task {config.model.trained_task}: the script trains causal language models only")
    return eject(plan, config, corpus, output)


def _deepspeed(plan: Plan, config: Config | None, clip_norm: float | None, output: Path | None) -> Exported:
    document = export_deepspeed(plan, clip_norm=clip_norm)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return Exported(text, export_losses(plan), export_notes(plan), document)


def _accelerate(plan: Plan, config: Config | None, clip_norm: float | None, output: Path | None) -> Exported:
    return export_accelerate(plan, clip_norm)


def _trainer(plan: Plan, config: Config | None, clip_norm: float | None, output: Path | None) -> Exported:
    assert config is not None
    return export_trainer(plan, config, clip_norm)


def _fabric(plan: Plan, config: Config | None, clip_norm: float | None, output: Path | None) -> Exported:
    return export_fabric(plan, clip_norm)


def _titan(plan: Plan, config: Config | None, clip_norm: float | None, output: Path | None) -> Exported:
    return export_titan(plan, config, clip_norm)


TARGETS = {
    "pytorch": Target(_pytorch, clips=False, needs_config=True),
    "accelerate": Target(_accelerate),
    "trainer": Target(_trainer, clips=False, needs_config=True),
    "fabric": Target(_fabric),
    "torchtitan": Target(_titan),
    "deepspeed": Target(_deepspeed),
}
