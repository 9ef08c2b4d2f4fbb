"""Table ``[question]`` of a plan file: the request that the plan answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shardwise.document import read_json, read_toml
from shardwise.errors import PlanError, UserError
from shardwise.plan.plan import Plan
from shardwise.search.plan_request import PlanRequest, is_config, plan_file_text
from shardwise.units import count_text

if TYPE_CHECKING:
    from shardwise.train.config import Config

AGAIN = "make the file again with shardwise plan MODEL -o FILE"
_SAME_SIZE = 0.05
"""Difference of two counts of the parameters of one model: added tokens, heads that a description leaves out."""


def write_plan_file(path: Path, plan_toml: str, request: PlanRequest) -> None:
    """Write the plan, and its request as a table ``[question]``, which `read_plan` ignores.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(plan_file_text(plan_toml, request))
    except OSError as error:
        raise UserError(f"-o '{path}' cannot be written: {error.strerror}; choose another file") from None


def read_question(path: Path, plan: Plan) -> PlanRequest:
    """Read the request of a plan file; ``plan`` is the file's plan.

    Raises:
        UserError: the file has no request, it is damaged, or the plan is not an answer to it.
    """
    data: dict[str, Any] = read_json(path) if path.suffix == ".json" else read_toml(path)
    if "question" not in data:
        raise UserError(
            f"plan '{path}' has no [question] table, so it cannot be explained; "
            f"make it with: shardwise plan MODEL -o {path}"
        )
    try:
        request = PlanRequest.model_validate(data["question"])
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'it'}: {_rule(item)}" for item in error.errors()]
        raise UserError(*(f"plan '{path}', table [question]: {line}; {AGAIN}" for line in lines)) from None
    world, batch, length = plan.dims.world_size, plan.global_batch, plan.seq_len or request.seq_len
    wrong = []
    if world != request.cluster.world_size:
        wrong.append(f"dims ({plan.dims}) have {world} ranks, and the question's cluster {request.cluster.world_size}")
    if batch is not None and batch != request.global_batch:
        wrong.append(f"{plan.batch_equation()}, and the question's global batch is {request.global_batch}")
    if length != request.seq_len:
        wrong.append(f"seq_len is {plan.seq_len}, and the question's {request.seq_len}")
    if wrong:
        raise UserError(*(f"plan '{path}': {line}; {AGAIN}" for line in wrong))
    return request


def check_planned_optimizer(path: Path, trained: str) -> None:
    """Check that a plan file was made for the optimizer that trains; a plan for AdamW is taken for any.

    Raises:
        PlanError: it was asked for another one, whose state the plan's memory counts.
    """
    planned = _question(path).get("optimizer", "adamw")
    if planned not in ("adamw", trained):
        raise PlanError(
            f"the plan '{path}' is for optimizer {planned}, and optimizer.name is {trained}; set "
            f"optimizer.name={planned}, or make a new plan"
        )


def check_planned_model(path: Path, config: Config) -> None:
    """Check that a plan file was made for a model of the config's size, where both can be counted.

    Another name of the same shapes is taken, as is a plan that says no model or one that is not here.

    Raises:
        PlanError: it was made for another model, whose memory and time the plan was chosen by.
    """
    question = _question(path)
    planned = question.get("model")
    if not isinstance(planned, str) or _names(planned, config):
        return
    from shardwise.cli.plan_config import profile_of_config, profile_of_model

    try:
        length = question.get("seq_len")
        theirs = profile_of_model(planned, seq_len=length, compiled=False).num_parameters
        ours = profile_of_config(config, seq_len=config.data.seq_len or None, compiled=False).num_parameters
    except UserError:
        return
    if abs(theirs - ours) <= _SAME_SIZE * max(theirs, ours):
        return
    name = config.model.factory or config.model.config
    raise PlanError(
        f"the plan '{path}' was made for the model '{planned}' of {count_text(theirs)} parameters, and the config's "
        f"'{name}' has {count_text(ours)}: a plan is for the model that it was asked for; make one with "
        f"shardwise plan CONFIG.toml -o {path}, or leave --plan out"
    )


def _names(planned: str, config: Config) -> bool:
    """Return whether the MODEL argument of a plan names the config's model."""
    own = (config.model.config, config.model.factory, config.model.kwargs)
    if not is_config(planned):
        return planned in own[:2] and not config.model.kwargs
    from shardwise.train.config import read_config

    try:
        model = read_config(Path(planned)).model
    except UserError:
        return False
    return (model.config, model.factory, model.kwargs) == own


def planned_adapters(path: Path, plan: Plan, config_file: Path, config: Config) -> str:
    """Return a note where only the plan file asks for adapters; empty where there are none, or the config does too."""
    parallel = read_toml(config_file).get("parallel")
    named = str(parallel.get("strategy", "auto")) if isinstance(parallel, dict) else "auto"
    if plan.parsed.adapter == "none" or "lora" in named or "lora" in config.model_fields_set:
        return ""
    return (
        f"adapters: only the plan '{path}' asks for them ({plan.strategy}); they are trained, and the model is frozen; "
        "to train all of it, make a plan without adapters"
    )


def _question(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = read_json(path) if path.suffix == ".json" else read_toml(path)
    question = data.get("question")
    return question if isinstance(question, dict) else {}


def _rule(item: Any) -> str:
    plain = {"missing": "is missing", "extra_forbidden": "no such key", "model_type": "must be a table"}
    return plain.get(item["type"]) or f"{item['msg'].replace('Input should', 'must')}, got {item['input']!r:.60}"
