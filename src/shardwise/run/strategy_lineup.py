"""Choose strategies, world sizes, small model and plans for ``shardwise verify``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.environment import visible_devices
from shardwise.errors import DoesNotFit, ModelError, PlanError, UserError
from shardwise.hardware.cluster import detect
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import Strategy, runnable_strategy
from shardwise.run.checks import check_model_path, check_samples
from shardwise.run.inspect_model import users_code
from shardwise.run.job import choose_plan, draft_plan, with_options
from shardwise.train.config import Config
from shardwise.train.config_tasks import refuse_other_tasks
from shardwise.train.data.corpus import Corpus, prepare_corpus
from shardwise.units import counted

if TYPE_CHECKING:
    from torch import nn

    from shardwise.gradcheck.run import StrategyResult, VerifyTask
    from shardwise.gradcheck.shrink import Shrunk

WORLDS = (2, 4)
MOST_RANKS = 8  # ranks started for a strategy of the config, however many devices this machine has
MICRO_BATCH = 2
LENGTH = 32


@dataclass(frozen=True)
class Lineup:
    """Plans of each world size, and rows for impossible ones."""

    plans: dict[int, list[Plan]]
    refused: list[StrategyResult]

    @property
    def all_plans(self) -> list[Plan]:
        """Return every plan of all worlds."""
        return [plan for plans in self.plans.values() for plan in plans]


@dataclass(frozen=True)
class VerifyJob:
    """Config, corpus and small model to verify, and the strategies."""

    config: Config
    corpus: Corpus
    lineup: Lineup
    shrunk: Shrunk
    seq_len: int

    def task(self, world: int, results: Path, references: Path) -> VerifyTask:
        """Build the task of one world's ranks; ``references`` is the folder of `write_references`."""
        from shardwise.gradcheck.run import VerifyTask

        return VerifyTask(
            config=self.config,
            corpus=self.corpus.folder.absolute(),
            shrunk=self.shrunk,
            seq_len=self.seq_len,
            plans=tuple(plan.model_copy(update={"seq_len": self.seq_len}) for plan in self.lineup.plans[world]),
            results=results,
            references=references,
        )


def prepare_verify(config: Config, asked: Sequence[str], nproc: int | None, log: Callable[[str], None]) -> VerifyJob:
    """Read the data and the model, choose strategies, and shrink. Starts no rank.

    Raises:
        UserError: part of the config is impossible, or no strategy can be verified.
    """
    asked_for([*asked, config.parallel.strategy])
    if config.optimizer.in_backward:
        raise PlanError(
            "optimizer.in_backward frees each gradient in the backward, and verify compares gradients; verify without "
            "it: optimizer.in_backward=false (a run with it has its effects receipt)"
        )
    refuse_other_tasks(config, "verify")
    check_model_path(config)
    corpus = prepare_corpus(config.data, Path(config.train.output) / "data", lambda text: log(f"data: {text}"))
    check_samples(config, corpus)
    factory = _factory(config, corpus)
    worlds = WORLDS if nproc is None else (nproc,)
    lineup = line_up(config, factory, asked, worlds, lambda: _planned(config, corpus, nproc, log))
    if not lineup.plans:
        raise ModelError(
            *dict.fromkeys(f"{row.strategy} on {counted(row.ranks, 'rank')}: {row.reason}" for row in lineup.refused)
        )
    shrunk, seq_len = _shrink(config, factory, corpus, lineup)
    return VerifyJob(config, corpus, lineup, shrunk, seq_len)


def adapter_problems(strategy: Strategy) -> list[str]:
    """Refuse adapters: the small model lacks their base, so nothing could be compared."""
    if strategy.adapter == "none":
        return []
    plain = strategy.model_copy(update={"adapter": "none"})
    return [
        f"strategy '{strategy}': verify compares all gradients of a small float64 model, where +{strategy.adapter} "
        f"trains few over a frozen base; use '{plain}' (a run with adapters has its effects receipt)"
    ]


def asked_for(strategies: Sequence[str]) -> list[str]:
    """Return the strategies requested by name, each once; report all that cannot be verified.

    Raises:
        PlanError: a strategy is unknown, not supported by this version, or has adapters.
    """
    problems: list[str] = []
    found = []
    for name in dict.fromkeys(strategies):
        try:
            strategy = None if name == "auto" else runnable_strategy(name)
        except PlanError as error:
            problems += error.problems
            continue
        problems += [] if strategy is None else adapter_problems(strategy)
        found.append(name if strategy is None else str(strategy))
    if problems:
        raise PlanError(*problems)
    return list(dict.fromkeys(found))


def _factory(config: Config, corpus: Corpus) -> Callable[[], nn.Module]:
    """Return the user's model factory, after checking that it works."""
    from shardwise.parallel.materialize import build
    from shardwise.train.model import model_factory

    factory = model_factory(config, corpus.vocab_size)
    named = config.model.factory
    with users_code(f"model.factory '{named}'" if named else f"model.config '{config.model.config}'"):
        build(factory, config.train.seed, real=False)
    return factory


def _planned(config: Config, corpus: Corpus, nproc: int | None, log: Callable[[str], None]) -> Plan | None:
    """Return the planner's choice for this machine; ``None`` if nothing fits."""
    ranks = config.parallel.nproc if nproc is None else nproc
    cluster = detect(config.parallel.device, ranks, visible=visible_devices())
    try:
        choice, _, _ = choose_plan(config, draft_plan(config, cluster), cluster, corpus, fixed=False)
    except DoesNotFit as error:
        log(f"auto: {str(error).splitlines()[0].rstrip(':')}; what it would pick is left out")
        return None
    return choice.plan


def line_up(
    config: Config,
    factory: Callable[[], nn.Module],
    asked: Sequence[str],
    worlds: Sequence[int],
    planned: Callable[[], Plan | None],
) -> Lineup:
    """Build the plans to verify on all possible world sizes; the model reports what it refuses."""
    from shardwise.gradcheck.run import StrategyResult
    from shardwise.gradcheck.shrink import with_fewer_blocks

    lineup = Lineup({}, [])
    wanted, sync = list(asked) or [config.parallel.strategy], "last"
    if "auto" in wanted:
        picked = planned()
        wanted = [name if name != "auto" else "" if picked is None else picked.strategy for name in wanted]
        sync = "last" if picked is None else picked.gradient_sync
    names: dict[int, list[str]] = {}
    for name in dict.fromkeys(filter(None, wanted)):
        names.setdefault(world_for(name, worlds), []).append(name)
    for world in () if asked else worlds:
        names.setdefault(world, []).extend(usual(world))
    plans: list[tuple[int, Plan]] = []
    for world, name in [(size, name) for size in sorted(names) for name in dict.fromkeys(names[size])]:
        try:
            plan = small_plan(config, name, world)
            every = name in wanted and sync == "every" and plan.parsed.shards_parameters
            plans.append((world, plan.model_copy(update={"gradient_sync": "every"}) if every else plan))
        except UserError as error:
            lineup.refused.append(StrategyResult.refused(name, world, "; ".join(error.problems)))
    module = with_fewer_blocks(factory, blocks_for([plan for _, plan in plans]), config.data.seq_len)
    for world, plan in plans:
        try:
            _check(config, module, plan)
            lineup.plans.setdefault(world, []).append(plan)
        except UserError as error:
            lineup.refused.append(StrategyResult.refused(plan.strategy, world, "; ".join(error.problems), plan))
    return lineup


def blocks_for(plans: Sequence[Plan]) -> int:
    """Return the number of blocks: two per stage of the longest pipeline, else two."""
    return 2 * max((plan.dims.pp * plan.virtual_stages for plan in plans if plan.dims.pp > 1), default=1)


def usual(world: int) -> list[str]:
    """Return the strategies to verify on ``world`` ranks by default."""
    if world == 1:
        return ["ddp", "fsdp"]
    names = ["ddp", "zero1", "zero2", "fsdp"]
    if world % 2:
        return names
    if world == 2:
        return [*names, "ddp+tp2", "ddp+pp2", "ddp+cp2"]
    names += ["hsdp", "fsdp+tp2", "fsdp+pp2", "fsdp+cp2"]
    return [*names, *(["ddp+tp2+pp2", "ddp+tp2+cp2"] if world % 4 == 0 else [])]


def world_for(name: str, worlds: Sequence[int]) -> int:
    """Return the smallest world with data-parallel ranks beside the strategy's axes.

    Else larger.
    """
    strategy = runnable_strategy(name)
    own = strategy.tp * strategy.pp * strategy.cp
    if len(worlds) == 1:
        return worlds[0]
    twice = 2 * own if 2 * own <= MOST_RANKS else own
    least = 4 if strategy.base == "hsdp" and own == 1 else 2
    return next((world for world in worlds if world % twice == 0 and world >= least), max(twice, least))


def small_plan(config: Config, name: str, world: int) -> Plan:
    """Build a strategy's plan over a small global batch, in float64 on CPU, with config options."""
    strategy = runnable_strategy(name)
    dims = dims_for(strategy, world)
    plan = Plan(strategy=str(strategy), dims=dims, micro_batch=MICRO_BATCH, recompute=config.parallel.recompute)
    plan = with_options(plan, config).model_copy(update={"compile": False, "async_tp": False})
    if dims.pp == 1:
        plan = plan.model_copy(update={"pipeline_schedule": "1f1b", "virtual_stages": 1})
    if not strategy.shards_parameters:
        plan = plan.model_copy(update={"prefetch": 1})
    return plan.model_copy(update={"grad_accum": accumulation(plan)})


def accumulation(plan: Plan) -> int:
    """Return micro batches of a step, not equal to a degree and valid for the schedule."""
    from shardwise.parallel.pipeline_parallel.schedule import padded_count

    dims = plan.dims
    least = max(3, dims.pp * plan.virtual_stages) if dims.pp > 1 else 3
    taken = {dims.tp, dims.pp, dims.cp, dims.dp}
    return next(n for n in range(least, least + 64) if n not in taken and padded_count(plan, n) == n)


def _check(config: Config, module: nn.Module, plan: Plan) -> None:
    """Check that the model in its original sizes and length supports the plan."""
    import torch

    from shardwise.model.read import read_model
    from shardwise.parallel.decide import check_model, decide

    spec = read_model(module)
    check_model(spec, plan)
    if plan.dims.splits_model:
        own = plan.model_copy(update={"seq_len": config.data.seq_len})
        decide(module, spec, own, torch.zeros(1, config.data.seq_len, dtype=torch.int64))


def _shrink(config: Config, factory: Callable[[], nn.Module], corpus: Corpus, lineup: Lineup) -> tuple[Shrunk, int]:
    from shardwise.gradcheck.shrink import shrink
    from shardwise.gradcheck.shrink_config import ShrinkLimits

    plans = lineup.all_plans
    step = math.lcm(*(2 * plan.dims.tp * plan.dims.cp for plan in plans), 2)
    own = config.data.seq_len
    seq_len = max(step, min(LENGTH, own) // step * step) if own >= step else own
    need = ShrinkLimits(
        blocks=blocks_for(plans),
        cuts=tuple({(plan.dims.tp, plan.dims.cp) for plan in plans}) or ((1, 1),),
        seq_len=seq_len,
        own_seq_len=own,
        vocab_size=corpus.vocab_size,
    )
    shrunk = shrink(factory, need)
    check_memory(shrunk, max(lineup.plans, default=1))
    return shrunk, seq_len


def check_memory(shrunk: Shrunk, world: int) -> None:
    """Check that a model that could not be made small fits on this machine, once per rank.

    Raises:
        ModelError: it does not.
    """
    import psutil

    from shardwise.units import bytes_text

    needed = shrunk.num_parameters * 8 * 6 * (world + 2)  # weights, gradients, two states, copies; and the reference
    free = psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"verify needs about {bytes_text(needed)} for {world} copies of {shrunk.num_parameters} parameters in "
            f"float64, and {bytes_text(free)} are free: {'; '.join(shrunk.kept) or 'it cannot be made smaller'}"
        )
