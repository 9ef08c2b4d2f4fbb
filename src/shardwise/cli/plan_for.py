"""Option ``--for`` of ``shardwise plan``: the best plan that another tool runs, its costs there, and its file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from shardwise.errors import PlanError, UserError, did_you_mean
from shardwise.interop.exported import Exported
from shardwise.interop.targets import TARGETS, export_to
from shardwise.plan.plan import Plan
from shardwise.plan.program import ProgramTraits, program_names
from shardwise.search.candidate import Candidate, SearchResult
from shardwise.search.plan_request import PlanRequest, is_config
from shardwise.train.config import read_config

PLANNED_FOR = tuple(name for name in TARGETS if name != "pytorch")
CLIP_NORM = 1.0


def check_target(target: str, model: str, *, as_json: bool) -> None:
    """Refuse a tool for which there is no answer.

    Raises:
        UserError: it is not known, needs a config, or ``as_json`` is set.
    """
    if problems := _problems(target, model, as_json=as_json):
        raise UserError(*problems)


def _problems(target: str, model: str, *, as_json: bool) -> list[str]:
    if target not in PLANNED_FOR:
        return [f"--for '{target}' is not a tool{did_you_mean(target, PLANNED_FOR)}; they are {', '.join(PLANNED_FOR)}"]
    problems = [f"--for {target} prints a file beside the answer, and --json has no place for it"] if as_json else []
    if TARGETS[target].needs_config and not is_config(model):
        problems.append(
            f"--for {target} writes the optimizer and the length of the run: give a config of train as MODEL"
        )
    return problems


def print_for(target: str, request: PlanRequest, result: SearchResult, console: Console) -> Candidate:
    """Print the first plan in the answer's order that ``target`` runs, with its file."""
    config = read_config(Path(request.model)) if is_config(request.model) else None
    reasons: dict[str, None] = {}
    order = sorted(range(len(result.candidates)), key=lambda index: index != result.recommended)
    for index in order:
        candidate = result.candidates[index]
        if candidate.fits is False:
            continue
        try:
            found = export_to(target, candidate.plan, config, CLIP_NORM, None)
        except PlanError as error:
            reasons |= dict.fromkeys(error.problems)
            continue
        _print(target, candidate, found, reasons, request.program, console)
        return candidate
    raise UserError(f"--for {target}: no plan in the answer is one that it runs", *reasons)


def _print(
    target: str,
    candidate: Candidate,
    found: Exported,
    reasons: dict[str, None],
    program: ProgramTraits,
    console: Console,
) -> None:
    def tell(line: str) -> None:
        console.print(line, markup=False)

    for reason in reasons:
        tell(f"not for {target}: {reason}")
    seconds = "unknown" if candidate.time is None else f"{candidate.time.step_s:.3g} s"
    tell(f"for {target}: {candidate.plan.strategy} on {candidate.plan.dims}, predicted step {seconds}")
    if program.is_own:
        if target in program_names():
            tell(f"costs are those of Shardwise's run of this plan; --program {target} has that tool's")
        tell(f"what {target} does otherwise is not in them:")
        for line in cost_differences(target, candidate.plan) or ["nothing that is known"]:
            tell(f"  {line}")
    else:
        tell(f"costs are those of --program {program.name}")
    for kind, lines in (("lost", found.lost), ("note", found.notes)):
        for line in lines:
            tell(f"{kind}: {line}")
    tell(found.text.rstrip("\n"))


def cost_differences(target: str, plan: Plan) -> list[str]:
    """List where a tool's run of a plan costs something else than Shardwise's."""
    sharded, narrow = plan.parsed.shards_parameters and plan.parsed.engine == "torch", plan.precision != "fp32"
    found = []
    if target in ("accelerate", "trainer") and sharded:
        if narrow:
            found.append(f"gradients are reduced in {plan.precision}: half of the bytes of each reduce-scatter")
        if plan.parsed.base != "zero2":
            found.append(
                "an embedding that is not tied is a unit of its own, resharded after the forward and gathered again: "
                "less memory than here, where it stays gathered with the root"
            )
    if target == "trainer" and plan.loss_chunks > 1:
        found.append("the loss is computed on all logits of a micro batch at once")
    if target == "deepspeed" and plan.parsed.engine == "torch":
        found.append("ZeRO reduces and gathers in buckets of its own, and keeps 16-bit weights beside fp32 ones")
    if target == "torchtitan":
        found.append("its loss is computed in chunks or compiled, by its own configuration")
    return found
