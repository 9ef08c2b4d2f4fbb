"""`on_ranks` calls a function on every rank of a new world, and brings back what each of them returned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from shardwise.bench.plots import draw_steps
from shardwise.bench.step.step_bench import StepSamples
from shardwise.cli.bench import ratio_table
from shardwise.errors import MachineError, RankError
from shardwise.import_object import optional_object
from shardwise.launch.on_ranks import on_ranks

HERE = "tests.world.test_on_ranks"


class Payload(BaseModel):
    """What the ranks get; one field has another name in files."""

    model_config = ConfigDict(populate_by_name=True)

    number: int = Field(alias="count")
    left_out: int = 7


def add(payload: Payload, ranks: Any) -> dict[str, Any]:
    from shardwise.distributed.process_group import gather_ints

    total = sum(row[0] for row in gather_ints([payload.number + ranks.rank], ranks))
    return {"rank": ranks.rank, "total": total, "given": sorted(payload.model_fields_set)}


def alone(payload: Payload, ranks: None) -> list[Any]:
    return [ranks, os.environ["RANK"], payload]


def fail_on_rank_1(payload: Payload, ranks: Any) -> None:
    if ranks.rank == 1:
        raise MachineError("the disk is full")


def die_on_rank_1(payload: Payload, ranks: Any) -> None:
    if ranks.rank == 1:
        os._exit(9)


def test_every_rank_returns_what_it_found() -> None:
    found = on_ranks(f"{HERE}:add", Payload(number=20), 2, device="cpu")
    assert found == [{"rank": rank, "total": 41, "given": ["number"]} for rank in range(2)]


def test_ranks_without_a_device_join_no_group() -> None:
    found = on_ranks(f"{HERE}:alone", Payload(number=1), 2, device=None)
    assert found == [[None, str(rank), {"count": 1, "left_out": 7}] for rank in range(2)]


def test_the_failure_of_a_rank_is_raised() -> None:
    with pytest.raises(MachineError, match=r"the disk is full \(on rank 1\)"):
        on_ranks(f"{HERE}:fail_on_rank_1", Payload(number=1), 2, device="cpu")


def test_logs_stay_where_the_message_names_them() -> None:
    with pytest.raises(RankError, match="its output is in ") as raised:
        on_ranks(f"{HERE}:die_on_rank_1", Payload(number=1), 2, device="cpu")
    assert Path(str(raised.value).rpartition("its output is in ")[2]).is_file()


def test_a_bench_without_peers_shows_its_own_steps(tmp_path: Path) -> None:
    assert optional_object("benchmarks.nowhere:loop") is None and optional_object("nowhere.at.all:loop") is None
    samples = StepSamples(strategy="ddp", shardwise_s=(0.1, 0.2, 0.3), plain_s=())
    assert list(ratio_table([samples]).columns[4].cells) == ["200.0 ms"]
    facts = {"ranks": 2, "threads_per_rank": 1, "model": "m", "precision": "fp32", "device": "cpu", "date": "today"}
    document = {**facts, "samples": [samples.model_dump()], "bubble": []}
    assert draw_steps(document, tmp_path / "plot.png")
