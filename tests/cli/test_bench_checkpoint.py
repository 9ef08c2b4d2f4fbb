"""``shardwise bench checkpoint`` as a user runs it, and that a way to save which does not save cannot win."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers.save_peers import DCP, DCP_ASYNC, TORCH_SAVE

from shardwise.bench.checkpoint.checkpoint_bench import (
    NO_SAVE,
    OngoingTraining,
    Quartiles,
    SaveTurns,
    Turn,
    decoder_of,
    random_batches,
)
from shardwise.bench.checkpoint.contenders import OURS, OURS_ASYNC, RAW, RAW_DIRECT
from shardwise.bench.plots import draw_checkpoints
from shardwise.cli import bench_checkpoint as command
from shardwise.errors import CheckpointError, UserError
from tests.cli.configs import write_config
from tests.commands import shardwise
from tests.worlds import run_world

ALL = {RAW, OURS, OURS_ASYNC, DCP, DCP_ASYNC, TORCH_SAVE}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder, the document and what was said of a small run."""
    folder = tmp_path_factory.mktemp("bench")
    words = ["--size", "0.01", "--rounds", "1", "--step", "0.0001", "--output", str(folder), "--json"]
    done = shardwise("bench", "checkpoint", *words)
    assert len(done.stdout.splitlines()) == 1, "with --json everything else is on stderr"
    return folder, json.loads(done.stdout), done.stderr


@pytest.mark.turns(6)
def test_every_way_to_save_is_measured_in_every_round(found: tuple[Path, dict[str, Any], str]) -> None:
    folder, document, said = found
    assert [case["strategy"] for case in document["cases"]] == ["ddp", "fsdp"]
    assert document["ranks"] == 2
    assert document["torch"] == torch.__version__
    for case in document["cases"]:
        contenders = {row["contender"] for row in case["summary"]}
        assert contenders - {RAW_DIRECT} == ALL
        turns = {(turn["contender"], turn["round"]) for turn in case["turns"]}
        assert turns == {(name, number) for name in contenders | {NO_SAVE} for number in range(1)}
        assert 8e6 < case["state_bytes"] < 14e6
        for turn in case["turns"]:
            assert len(turn["steps_s"]) == 10 and min(turn["steps_s"]) > 0
            if turn["contender"] != NO_SAVE:
                assert turn["num_bytes"] == pytest.approx(case["state_bytes"], rel=0.2), turn["contender"]
                assert 0 < turn["stall_s"] <= turn["loop_s"]
                assert turn["seconds"] > 0
            if turn["contender"] in (OURS, DCP, TORCH_SAVE, RAW):
                assert turn["stall_s"] >= turn["seconds"], "the loop stands still until it is durable"
        assert f"{case['strategy']}: " in said
    assert all(name in said for name in ALL)
    kept = sorted(path.name for path in folder.iterdir())
    assert [Path(name).suffix for name in kept] == [".json", ".png"], "nothing else is left"
    assert json.loads((folder / kept[0]).read_text()) == document
    assert (folder / kept[1]).read_bytes().startswith(b"\x89PNG")


def broken(kind: str, folder: Path) -> str:
    """What is said of a contender that is not right."""
    from benchmarks.peers import save_peers as peers

    from shardwise.bench.checkpoint import checkpoint_bench as bench
    from shardwise.bench.checkpoint import contenders
    from shardwise.distributed.process_group import join
    from shardwise.plan.dims import dims_for
    from shardwise.plan.plan import Plan
    from shardwise.plan.strategy import parse_strategy
    from shardwise.train.config import OptimizerTable

    class Late(contenders.Ours):
        """Saves what the state is later."""

        def save(self, number: int) -> None:
            self.number = number

        def finish(self) -> None:
            super().save(self.number)
            super().finish()

    class Less(peers.Dcp):
        """Saves the model alone."""

        def _state_dict(self) -> dict[str, Any]:
            return {**super()._state_dict(), "optimizer": {"state": {}}}

    class Nothing(contenders.Raw):
        """Writes a file of the right length, with nothing in it."""

        def save(self, number: int) -> None:
            self._file.write_bytes(bytes(len(self._buffer)))

    ranks = join("cpu")
    plan = Plan(strategy="fsdp", dims=dims_for(parse_strategy("fsdp"), ranks.world_size))
    training = OngoingTraining(decoder_of(1 << 20), OptimizerTable(), plan, ranks, 0)
    batches = random_batches(1, ranks)
    training.step(next(batches))
    state = (training.model, training.optimizer)
    room = folder / kind
    room.mkdir(exist_ok=True)
    contender = {
        "late": lambda: Late(room, *state, plan, background=False),
        "less": lambda: Less(room, *state, background=False),
        "nothing": lambda: Nothing(room, 1 << 16, direct=False),
        "ours": lambda: contenders.Ours(room, *state, plan, background=True),
        "torch": lambda: peers.TorchSave(room, *state, sharded=True),
    }[kind]()
    try:
        bench._check(training, batches, contender)
    except CheckpointError as error:
        return str(error)
    finally:
        contender.close()
    return ""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("late", "ours did not save model/"),
        ("less", "dcp did not save optimizer/"),
        ("nothing", "raw write did not save raw"),
        ("ours", ""),
        ("torch", ""),
    ],
)
def test_who_does_not_save_the_state_is_found_out(tmp_path: Path, kind: str, says: str) -> None:
    for text in run_world(broken, 2, kind, tmp_path):
        assert text.startswith(says) and bool(text) == bool(says), text


def case_of_a_config(text: str) -> dict[str, Any] | None:
    from shardwise.bench.checkpoint import checkpoint_ranks
    from shardwise.distributed.process_group import join

    request = checkpoint_ranks.CheckpointBenchRequest.model_validate_json(text)
    return checkpoint_ranks._case(request, "ddp", join("cpu"))


def test_the_model_of_a_config(tmp_path: Path) -> None:
    from shardwise.bench.checkpoint.checkpoint_ranks import CheckpointBenchRequest
    from shardwise.run.job import prepare_job
    from shardwise.train.config import read_config

    job = prepare_job(read_config(write_config(tmp_path), []), lambda text: None).job
    request = CheckpointBenchRequest(state_bytes=0, job=job, rounds=1, step_s=1, seed=0, folder=tmp_path, as_json=False)
    case = run_world(case_of_a_config, 2, request.model_dump_json(by_alias=True, exclude_unset=True))[0]
    assert case is not None
    assert {row["contender"] for row in case["summary"]} >= ALL
    assert case["samples_of_a_step"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config_file": Path("x.toml"), "size_gib": 1.0}, "leave one of them out"),
        ({"size_gib": 1e6}, "need up to .* of memory, and .* are there; use a smaller --size or fewer ranks"),
        ({"size_gib": 1e6}, "free and .* are needed; use a smaller --size, or another --folder"),
        ({"size_gib": 0.0}, "--size 0"),
        ({"output": Path("/proc/none")}, "--output '/proc/none': .*; give another folder"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    words: dict[str, Any] = {"size_gib": None, "nproc": 2, "rounds": 1, "step_s": 0.1, "folder": None}
    words |= {"config_file": None, "output": tmp_path / "out", "as_json": False} | changes
    config_file = words.pop("config_file")
    with pytest.raises(UserError, match=says):
        command.run_bench_checkpoint(config_file, [], **words)


def test_adapters_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    config = write_config(tmp_path, parallel={"strategy": "fsdp+lora"})
    words: dict[str, Any] = {"size_gib": None, "nproc": 2, "rounds": 1, "step_s": 0.1, "folder": None}
    with pytest.raises(UserError, match=r"checkpoints of whole models; .* without \+lora"):
        command.run_bench_checkpoint(config, [], output=tmp_path / "out", as_json=False, **words)


def test_the_size_that_is_asked_for() -> None:
    for size in (1 << 20, 1 << 26, 1 << 30, 10 << 30):
        with torch.device("meta"):
            model = decoder_of(size)()
        assert 12 * sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.15)


def turn(contender: str, number: int, seconds: float, stall: float, step: float, loop: float) -> Turn:
    return Turn(
        contender=contender,
        round=number,
        num_bytes=100,
        seconds=seconds,
        stall_s=stall,
        loop_s=loop,
        late_s=0.0,
        steps_s=(step,) * 9 + (50 * step,),
        load=1.0,
    )


def made_up() -> SaveTurns:
    """Three rounds on a machine that gets slower from one to the next, in an order that is not that of the rounds."""
    turns = []
    for number in (2, 0, 1):
        slow = 10.0**number
        turns += [
            turn(RAW, number, slow, slow, slow, 11 * slow),
            turn(OURS, number, 2 * slow, 2 * slow, slow, 12 * slow),
            turn(DCP, number, 6 * slow, 6 * slow, slow, 16 * slow),
            turn(OURS_ASYNC, number, 4 * slow, 0.1 * slow, 1.5 * slow, 15 * slow),
            turn(DCP_ASYNC, number, 12 * slow, slow, 3 * slow, 31 * slow),
            turn(NO_SAVE, number, 0, 0, slow, 10 * slow),
        ]
    return SaveTurns(
        strategy="ddp",
        state_bytes=100,
        samples_of_a_step=1,
        checked=(RAW, OURS, OURS_ASYNC, DCP, DCP_ASYNC),
        turns=tuple(turns),
    )


def test_ratios_are_of_turns_of_the_same_round() -> None:
    rows = {row.contender: row for row in made_up().summary()}
    same = Quartiles(low=0.5, median=0.5, high=0.5)
    assert rows[OURS].of_raw == same
    assert rows[OURS].seconds == Quartiles(low=11.0, median=20.0, high=110.0)
    assert rows[DCP].over_ours is not None and rows[DCP].over_ours.median == 3.0
    assert rows[DCP_ASYNC].over_ours is not None and rows[DCP_ASYNC].over_ours.median == 3.0
    assert rows[OURS].over_ours is None
    assert rows[OURS_ASYNC].stall_of_sync.median == 0.05
    assert rows[OURS_ASYNC].dip.median == 1.5
    assert rows[DCP_ASYNC].lost_s.median == 210.0
    assert statistics.median(rows[RAW].bytes_per_s.model_dump().values()) == 10.0


def test_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row.model_dump() for row in made_up().summary()]
    case = {"strategy": "ddp", "state_bytes": 100, "summary": rows}
    document = {"cases": [case, case], "ranks": 2, "device": "cpu", "date": "2026-01-01"}
    assert draw_checkpoints(document, tmp_path / "plot.png")
    assert 10_000 < (tmp_path / "plot.png").stat().st_size < 150_000
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw_checkpoints(document, tmp_path / "none.png")
