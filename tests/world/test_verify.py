"""``verify`` against sabotage: each fault is put into live ranks, must fail, and must be called by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.gradcheck.run import StrategyResult
from tests.verifying import rows_of, task_for, transformers_config
from tests.worlds import run_each, run_world

_rights: list[tuple[Any, str, Any]] = []


def put(owner: Any, name: str, wrong: Any) -> None:
    """Replace an attribute of a class or a module until the fault has been looked for."""
    _rights.append((owner, name, getattr(owner, name)))
    setattr(owner, name, wrong)


def step_weight(change: Callable[[Any, Any, float], float]) -> None:
    """Let `Step.weight` be what ``change(step, micro, right)`` says."""
    from shardwise.train.step import Step

    right = Step.weight
    put(Step, "weight", lambda self, micro: change(self, micro, right(self, micro)))


def mean_forgotten() -> None:
    """Each rank's loss over the global tokens, and the mean over ranks of that."""
    step_weight(lambda step, micro, right: right / step._session.reduced_ranks)


def summed_over_data() -> None:
    step_weight(lambda step, micro, right: right * step._session.reduced_ranks)


def accumulation_forgotten() -> None:
    step_weight(lambda step, micro, right: right * len(step.micros))


def counted_for_each_tp_rank() -> None:
    step_weight(lambda step, micro, right: right * step._session.plan.dims.tp)


def averaged_over_tp() -> None:
    step_weight(lambda step, micro, right: right / step._session.plan.dims.tp)


def mean_of_means() -> None:
    def change(step: Any, micro: Any, right: float) -> float:
        number = step._session.dp * len(step.micros)
        return step._session.reduced_ranks / (micro.num_tokens * number) if micro.num_tokens else 0.0

    step_weight(change)


def own_tokens() -> None:
    step_weight(lambda step, micro, right: 1.0 / sum(m.num_tokens for m in step.micros) if right else 0.0)


def never_synchronised() -> None:
    import shardwise.train.session as session

    right = session.set_gradient_sync
    put(session, "set_gradient_sync", lambda outer, enabled: right(outer, False))


def only_the_last_micro_batch() -> None:
    step_weight(lambda step, micro, right: right if micro is step.micros[-1] else 0.0)


def partial_never_summed() -> None:
    import shardwise.train.session as session

    put(session, "finish_partial", lambda parameters: None)


def tied_never_summed() -> None:
    from shardwise.parallel.pipeline_parallel.schedule import Pipeline

    put(Pipeline, "finish_gradients", lambda self: None)


def key_heads_swapped() -> None:
    import shardwise.parallel.split_parameters as split

    right = split.distribute

    def wrong(name: str, full: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows = len(full) // 2
        return right(name, full.roll(rows, 0) if name.endswith("k_proj.weight") else full, *rest)

    put(split, "distribute", wrong)


def local_attention() -> None:
    """Each rank of cp attends to its own tokens only, with a causal mask over these."""
    from torch.nn.functional import scaled_dot_product_attention

    import shardwise.parallel.context_parallel.ulysses as exchange

    def local(held: Any, name: str, *args: Any, **options: Any) -> torch.Tensor:
        held.calls += 1
        return scaled_dot_product_attention(*args, **options)

    put(exchange, "_attend", local)


def zero_bubble_unguarded() -> None:
    """The schedule runs with weights that are freed after the forward, as torch alone would let it."""
    import shardwise.parallel.decide as decide
    import shardwise.parallel.pipeline_parallel.schedule as pipeline
    from shardwise.parallel.pipeline_parallel.stage_runtime import RunStage

    put(decide, "check_pipeline", lambda *_: None)
    put(pipeline, "check_pipeline", lambda *_: None)
    put(RunStage, "keep_gathered", lambda self: None)


def norm_counts_replicas() -> None:
    import shardwise.train.session as session

    right = session.global_norm
    put(session, "global_norm", lambda *args: right(*args) * 2**0.5)


def sabotaged(task: str, fault: str) -> list[StrategyResult]:
    globals()[fault]()
    try:
        return rows_of(task)
    finally:
        while _rights:
            setattr(*_rights.pop())


QWEN: dict[str, Any] = {"tie_word_embeddings": True}
# fault, strategy, ranks, model, what must be said (all of it)
FAULTS = [
    ("mean_forgotten", "ddp", 2, "own", ["2 × too small: dp 2: the mean over dp"]),
    ("mean_forgotten", "fsdp", 2, "own", ["2 × too small: dp 2"]),
    ("mean_forgotten", "hsdp", 4, "own", ["4 × too small: dp 4"]),
    ("summed_over_data", "ddp", 2, "own", ["2 × too large: dp 2: gradients are added up over dp"]),
    ("accumulation_forgotten", "fsdp", 2, "own", ["3 × too large: accumulation 3"]),
    ("mean_of_means", "fsdp", 2, "own", ["only where ranks", "each micro batch is averaged over its own tokens"]),
    ("own_tokens", "ddp", 2, "own", ["only where ranks", "each rank divides by its own tokens"]),
    ("never_synchronised", "ddp", 2, "own", ["not averaged over dp: each rank has that of its own samples"]),
    ("never_synchronised", "fsdp", 2, "own", ["no parameter has a gradient", "did the last micro batch synchronise?"]),
    ("only_the_last_micro_batch", "ddp", 2, "own", ["micro batch 0, 1 (of 3) does not count"]),
    ("counted_for_each_tp_rank", "ddp+tp2", 2, "qwen", ["2 × too large: tp 2: the loss (or its gradient) is counted"]),
    ("counted_for_each_tp_rank", "fsdp+tp2", 4, "qwen", ["2 × too large, the degree of tp 2 and of dp 2"]),
    ("averaged_over_tp", "ddp+tp2", 2, "qwen", ["2 × too small: tp 2"]),
    (
        "partial_never_summed",
        "ddp+tp2",
        2,
        "qwen",
        ["q_norm.weight", "k_norm.weight", "is not summed over tp: each rank has a part of it"],
    ),
    (
        "key_heads_swapped",
        "ddp+tp2",
        2,
        "qwen",
        ["the forward itself differs, by tp 2", "k_proj.weight: all", "in the wrong place (key/value heads 0, 1"],
    ),
    ("mean_forgotten", "ddp+cp2", 2, "llama", ["2 × too small: cp 2: the mean over cp"]),
    ("local_attention", "ddp+cp2", 2, "llama", ["the forward itself differs, by cp 2"]),
    ("tied_never_summed", "ddp+pp2", 2, "qwen", ["embed_tokens.weight is not summed over pp: each stage has a part"]),
    ("accumulation_forgotten", "ddp+pp2", 2, "qwen", ["3 × too large: micro batches of the pipeline 3"]),
    ("norm_counts_replicas", "ddp+tp2", 2, "qwen", ["the gradients are right, but their norm", "the root of tp"]),
]  # fmt: skip


def model_table(folder: Path, model: str) -> dict[str, Any]:
    if model == "own":
        return {}
    kind, changes = ("Qwen3Config", QWEN) if model == "qwen" else ("LlamaConfig", {})
    made = transformers_config(folder, kind, num_hidden_layers=4, **changes)
    return {"model": {"factory": None, "config": str(made)}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StrategyResult]:
    """The row of a fault; all those of one strategy and model are put into one world, one after the other."""

    @lru_cache
    def of(strategy: str, world: int, model: str) -> dict[str, StrategyResult]:
        faults = [fault for fault, *where, _ in FAULTS if where == [strategy, world, model]]
        folder = tmp_path_factory.mktemp("verify")
        task = task_for(folder, strategy, nproc=world, **model_table(folder, model))
        found = run_each(sabotaged, world, [(task, fault) for fault in faults])
        return {fault: on_ranks[0][0] for fault, on_ranks in zip(faults, found, strict=True)}

    return lambda fault, *where: of(*where)[fault]


@pytest.mark.parametrize(("fault", "strategy", "world", "model", "said"), FAULTS)
def test_a_fault_fails_and_is_named(
    fault: str, strategy: str, world: int, model: str, said: list[str], rows: Callable[..., StrategyResult]
) -> None:
    row = rows(fault, strategy, world, model)
    assert row.status == "failed"
    assert row.verdict is not None and not row.verdict.ok
    text = "\n".join(row.explanations)
    assert all(words in text for words in said), text


def test_zero_bubble_over_freed_weights_is_wrong_and_named(tmp_path: Path) -> None:
    """Past the guard that refuses it: the fault that gives no error at all."""
    schedule = "interleaved-zero-bubble"
    table = model_table(tmp_path, "llama") | {"parallel": {"strategy": "zero2+pp2", "pipeline_schedule": schedule}}
    task = task_for(tmp_path, "zero2+pp2", nproc=4, **table).replace("zero2+pp2", "fsdp+pp2")
    (row,) = run_world(sabotaged, 4, task, "zero_bubble_unguarded")[0]
    assert row.status == "failed"
    assert f"pipeline_schedule {schedule} where fsdp frees weights after the forward" in "\n".join(row.explanations)
