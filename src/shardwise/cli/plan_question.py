"""Table ``[question]`` of a plan file: the request that the plan answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwise.document import read_json, read_toml
from shardwise.errors import PlanError, UserError
from shardwise.plan.plan import Plan
from shardwise.search.plan_request import PlanRequest, plan_file_text

AGAIN = "make the file again with shardwise plan MODEL -o FILE"


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
    data: dict[str, Any] = read_json(path) if path.suffix == ".json" else read_toml(path)
    question = data.get("question")
    planned = question.get("optimizer", "adamw") if isinstance(question, dict) else "adamw"
    if planned not in ("adamw", trained):
        raise PlanError(
            f"the plan '{path}' is for optimizer {planned}, and optimizer.name is {trained}; set "
            f"optimizer.name={planned}, or make a new plan"
        )


def _rule(item: Any) -> str:
    plain = {"missing": "is missing", "extra_forbidden": "no such key", "model_type": "must be a table"}
    return plain.get(item["type"]) or f"{item['msg'].replace('Input should', 'must')}, got {item['input']!r:.60}"
