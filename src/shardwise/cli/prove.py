"""Dry run of ``shardwise plan --prove``: the plan's program with the full model.

It runs under fake tensors, in a child process.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shardwise.errors import UserError
from shardwise.plan.optimizers import OPTIMIZERS, either, names_without
from shardwise.plan.plan import Plan, type_words
from shardwise.search.candidate import Candidate
from shardwise.search.plan_request import is_config
from shardwise.units import bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from torch import nn

    from shardwise.dryrun.dry_run import DryRun, ModelSource
    from shardwise.model.architecture import Architecture
    from shardwise.search.plan_request import PlanRequest


def prove_candidate(model: str, request: PlanRequest, candidate: Candidate, console: Console) -> dict[str, Any]:
    """Dry-run every distinct rank, print the result beside the estimate, and return it.

    Raises:
        UserError: this version does not run the plan, or the model cannot be built from the arguments.
    """
    from shardwise.dryrun.dry_run import prove

    plan, optimizer = candidate.plan, request.optimizer
    ignored = [name for name, on in (("--compile", request.compiled), ("--loss fused", request.fused_loss)) if on]
    if ignored:
        raise UserError(
            f"--prove runs this version's own program, which has no {' and no '.join(ignored)}; leave one of them out"
        )
    if plan.fp8 != "none":
        raise UserError(
            f"--prove runs on tensors of a CPU, where fp8 = '{plan.fp8}' is emulated with fp32 copies that no GPU "
            "makes; leave fp8 out"
        )
    if not candidate.runnable:
        raise UserError(
            "--prove runs the plan's own program, and this version plans "
            f"{candidate.why_not_runnable} but does not run it; " + _way_out(plan)
        )
    spec = OPTIMIZERS[optimizer]
    if "dry_run" in spec.refuses:
        able = either(names_without("dry_run"))
        raise UserError(f"--prove steps {able}, not {optimizer}; leave --prove out, or change --optimizer")
    source = source_of(model)
    settings = {"name": optimizer, **spec.planned_with}
    console.print("proving: two steps of the program itself under fake tensors ...")
    found = prove(source, plan, optimizer=settings)
    _print(found, candidate, console)
    return {"ranks": [_document(run, candidate) for run in found]}


def _way_out(plan: Plan) -> str:
    if words := type_words(plan):
        return f"leave the options behind {' and '.join(words)} out"
    return "leave --objective out" if plan.objective != "lm" else "pin a strategy that runs, such as --strategy fsdp"


def source_of(model: str) -> ModelSource | Callable[[], nn.Module]:
    """Select how a child process builds the model of a MODEL argument.

    Raises:
        UserError: the model cannot be built, only counted.
    """
    from shardwise.dryrun.dry_run import ModelSource

    if is_config(model):
        from shardwise.train.config import read_config
        from shardwise.train.config_tasks import refuse_other_tasks

        config = read_config(Path(model))
        refuse_other_tasks(config, "plan --prove")
        table = config.model
        if table.kwargs or table.freeze:
            raise UserError("--prove builds a config's model without model.kwargs and model.freeze; take them out")
        model = str(table.config or table.factory)
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        return ModelSource(config=json.loads((path / "config.json" if path.is_dir() else path).read_text()))
    if ":" in model:
        place, _, name = model.rpartition(":")
        return _function(Path(place), name) if place.endswith(".py") else ModelSource(factory=model)
    from shardwise.model.catalogue import find_architecture

    architecture = find_architecture(model)
    if architecture is None:
        raise UserError(f"--prove cannot build '{model}'; give a config.json or package.module:factory")
    source = ModelSource(config=configuration(architecture))
    _check_is_that_model(source, architecture)
    return source


def _check_is_that_model(source: ModelSource, architecture: Architecture) -> None:
    """Check that the built model is the catalogue's.

    A family whose configuration has other keys would be built in its default shape: another model.

    Raises:
        UserError: the built model has other parameters than the catalogue counts, or cannot be built.
    """
    import torch

    from shardwise.model.architecture import parameter_count
    from shardwise.model.undrawn import undrawn

    name, expected = architecture.name, parameter_count(architecture)
    fix = "give its config.json or package.module:factory"
    try:
        with torch.device("meta"), undrawn():
            found = sum(parameter.numel() for parameter in source.builder()().parameters())
    except Exception as error:  # transformers raises any type for unsupported models
        why = str(error).partition("\n")[0]
        raise UserError(f"--prove cannot build '{name}' from its shape alone: {why}; {fix}") from None
    if found != expected:
        raise UserError(
            f"--prove cannot build '{name}' from its shape alone: {found:,} parameters instead of {expected:,}; {fix}"
        )


def _function(file: Path, name: str) -> Callable[[], nn.Module]:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Callable[[], nn.Module] = getattr(module, name)
    return made


def configuration(a: Architecture) -> dict[str, Any]:
    """Build the Hugging Face configuration of a catalogue's architecture, as far as its shape."""
    if a.family == "gpt2":
        shape = {"n_embd": a.hidden, "n_layer": a.layers, "n_head": a.heads, "n_inner": a.ffn}
        shape |= {"n_positions": a.max_seq_len or 1024}
    else:
        shape = {
            "hidden_size": a.hidden,
            "intermediate_size": a.ffn,
            "num_hidden_layers": a.layers,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "max_position_embeddings": a.max_seq_len or 4096,
        }
    return {"model_type": a.family, "vocab_size": a.vocab, "tie_word_embeddings": a.tied} | shape


def _print(found: tuple[DryRun, ...], candidate: Candidate, console: Console) -> None:
    estimate = candidate.memory
    table = Table(title=f"proof of {candidate.plan.strategy}: program against estimate", title_justify="left", box=None)
    for name in ("rank", "peak of live bytes", "estimate", "difference", "reserved", "took"):
        table.add_column(name, justify="right")
    for run in found:
        gap = difference(run.allocated, estimate.allocated)
        table.add_row(
            f"{run.rank} of {run.world_size}",
            bytes_text(run.allocated),
            bytes_text(estimate.allocated),
            "unknown" if gap is None else f"{gap:+.1%}",
            bytes_text(run.reserved),
            seconds_text(run.seconds),
        )
    console.print(table)
    for total in found[0].collectives:
        console.print(f"  {total.name}: {counted(total.calls, 'call')}, {bytes_text(total.num_bytes)} a step")


def difference(measured: int, estimated: int | None) -> float | None:
    """Relative error of the estimate, positive if it is too high; ``None`` if it is unknown."""
    return None if estimated is None or not measured else estimated / measured - 1


def _document(run: DryRun, candidate: Candidate) -> dict[str, Any]:
    gap = difference(run.allocated, candidate.memory.allocated)
    kept = {"rank", "world_size", "allocated", "reserved", "reserved_expandable", "categories", "seconds"}
    return {
        **run.model_dump(mode="json", include=kept),
        "phases": [phase.model_dump(mode="json") for phase in run.phases],
        "collectives": [total.model_dump(mode="json") for total in run.collectives],
        "estimated_allocated": candidate.memory.allocated,
        "difference": None if gap is None or not math.isfinite(gap) else gap,
    }
