"""What the tests of ``verify`` share: configs of small models, and tasks that ranks of `run_world` can be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.distributed.process_group import Ranks, join
from shardwise.gradcheck.reference import write_references
from shardwise.gradcheck.run import StrategyResult, VerifyTask, verify_all
from shardwise.run.strategy_lineup import VerifyJob, prepare_verify
from shardwise.train.config import read_config
from tests.cli.configs import write_config

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "max_position_embeddings": 128,
}


def transformers_config(folder: Path, kind: str, **changes: Any) -> Path:
    """The folder of a ``config.json``: of a class of transformers, small, with two key/value heads for four others."""
    import transformers

    sizes = SIZES | {"num_key_value_heads": 8, "head_dim": 16} if kind != "GPT2Config" else SIZES
    made = getattr(transformers, kind)(**(sizes | changes))
    made.save_pretrained(folder / "model")
    return folder / "model"


def prepared(folder: Path, *strategies: str, nproc: int, **tables: dict[str, Any]) -> VerifyJob:
    """The lineup of a config whose tables are changed as `write_config` does it."""
    config = read_config(write_config(folder, **tables))
    return prepare_verify(config, strategies, nproc, lambda text: None)


def task_for(folder: Path, *strategies: str, nproc: int, **tables: dict[str, Any]) -> str:
    """The task of the ranks of one world, as JSON."""
    made = prepared(folder, *strategies, nproc=nproc, **tables)
    assert not made.lineup.refused, made.lineup.refused
    task = made.task(nproc, folder / "rows.jsonl", folder / "references")
    task.references.mkdir()
    write_references(task.model, task.data, task.plans, task.references)
    return task.model_dump_json(by_alias=True, exclude_unset=True)


def rows_of(task: str) -> list[StrategyResult]:
    """Every row, on each rank; what they explain is told on rank 0."""
    ranks: Ranks = join("cpu")
    return verify_all(VerifyTask.model_validate_json(task), ranks)
