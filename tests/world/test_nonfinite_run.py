"""A number that is not finite in the loop of `shardwise train`: the sample's number, the file, the replay."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwise.train.step as step_module
from shardwise.run.job import Job, prepare_job
from shardwise.train.config import read_config
from shardwise.train.metrics import read_metrics
from shardwise.train.nonfinite import replay_run
from shardwise.train.nonfinite.nonfinite_error import NonFiniteError
from shardwise.train.run_files import RunFile
from tests.cli import configs
from tests.planted import BYTE
from tests.world.test_training_options import Silent
from tests.worlds import run_each

SAMPLE, LENGTH, BATCH = 21, 32, 8  # in step 3


def job_of(folder: Path, kind: str, strategy: str, tables: dict[str, dict[str, Any]], sample: int = SAMPLE) -> str:
    """A prepared run of six steps over samples in order, of which one has the byte."""
    folder.mkdir(parents=True)
    text = bytearray(b"abcdefgh ijklmnop.\n" * 400)
    text[sample * LENGTH + 5] = BYTE
    (folder / "text.txt").write_bytes(text)
    changes: dict[str, dict[str, Any]] = {
        "model": {"factory": "tests.planted:byte_model", "kwargs": {"kind": kind}},
        "data": {"path": str(folder / "text.txt"), "seq_len": LENGTH, "heldout_fraction": 0.0, "shuffle": False},
        "optimizer": {"lr": 1e-4, "warmup_steps": 0},
        "train": {"steps": 6, "log_every": 1, "global_batch": BATCH, "eval_samples": 4},
        "parallel": {"strategy": strategy},
        "checkpoint": {"every": 2},
    }
    for table, keys in tables.items():
        changes[table] = {**changes.get(table, {}), **keys}
    return prepare_job(read_config(configs.write_config(folder, **changes)), lambda text: None).job.to_json()


@contextlib.contextmanager
def unnoticed(session: Any, step: Any) -> Iterator[None]:
    """As on a GPU: the update goes on, and the loss is read at the next logged step."""
    with contextlib.suppress(NonFiniteError):
        yield


def run_here(text: str, late: bool) -> dict[str, Any]:
    """The loop of `shardwise train` on this rank; returns the document, what was said, and the lines before it."""
    from shardwise.distributed.process_group import join
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.loop import TrainingRun
    from shardwise.train.session import Session

    job, patch, reporter = Job.model_validate_json(text), pytest.MonkeyPatch(), Silent()
    session = Session(ranks=join(job.plan.device), planner=lambda *_: job.plan)
    if late:
        patch.setattr(step_module, "explained", unnoticed)
    try:
        TrainingRun(job.config, job.plan, open_corpus(job.corpus), session, reporter, None).train()
    except NonFiniteError as error:
        file = Path(job.config.train.output) / RunFile.NONFINITE
        session.ranks.control and __import__("torch").distributed.barrier(session.ranks.control)
        found = {"text": str(error), "said": reporter.said, "micro_batch": job.plan.micro_batch}
        return {**json.loads(file.read_text()), **found}
    finally:
        patch.undo()
        session.close()
    return {"source": {}}


NO_CLIP = {"optimizer": {"clip_norm": "none"}}
LATE = {"train": {"log_every": 3}}
RUNS: dict[str, tuple[str, str, dict[str, Any], bool, dict[str, Any]]] = {
    "noticed at once": ("log", "ddp", {}, False, {"reason": "forward", "step": 3}),
    "noticed late": ("log", "fsdp", LATE, True, {"reason": "forward", "step": 3}),
    "gradient that no norm checks": ("sqrt", "zero1", NO_CLIP, False, {"reason": "backward", "step": 3}),
    "update in the backward": (
        "sqrt",
        "fsdp",
        {"optimizer": {"clip_norm": "none", "in_backward": True}},
        False,
        {"reason": "backward", "step": 3},
    ),
    "bad optimizer": (
        "",
        "ddp",
        {"optimizer": {"factory": "tests.planted:SpoilingSGD"}},
        False,
        {"reason": "update", "step": 3, "module": None, "parameters": ["head.bias"], "samples": None},
    ),
    "no checkpoint": (
        "sqrt",
        "ddp",
        {**NO_CLIP, "checkpoint": {"every": 0}},
        False,
        {"reason": "weight", "step": 4, "module": "embed", "samples": [24, 25, 26, 27]},
    ),
}


def test_a_loss_spike_is_logged_with_the_samples_of_its_step(tmp_path: Path) -> None:
    changes = {"train": {"steps": 26}, "parallel": {"nproc": 1}, "checkpoint": {"every": 0}}
    text = job_of(tmp_path / "run", "loud", "ddp", changes, sample=BATCH * 23 + 3)
    assert run_here(text, late=False) == {"source": {}}
    lines = read_metrics(Path(Job.model_validate_json(text).config.train.output) / RunFile.METRICS)
    spikes = {line["step"]: line["loss_spike"] for line in lines if "loss_spike" in line}
    assert list(spikes) == [24]
    assert spikes[24]["samples"] == [list(range(BATCH * 23, BATCH * 24))]
    assert spikes[24]["median"] == pytest.approx(5.7, abs=0.5)


def bounded(text: str, name: str, limit: float) -> dict[str, Any]:
    """The run with a bound of the search set to ``limit``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_run, name, limit)
        return run_here(text, late=True)


def test_a_search_for_what_was_noticed_late_has_bounds(tmp_path: Path) -> None:
    bounds = {
        "_MOST_STEPS": (0, "not searched: the newest checkpoint lies 1 step before this one"),
        "_MOST_S": (-1.0, "not searched from step 3 on"),
    }
    calls = [(job_of(tmp_path / name, "log", "ddp", LATE), name, limit) for name, (limit, _) in bounds.items()]
    for (_, note), (main, other) in zip(bounds.values(), run_each(bounded, 2, calls), strict=True):
        assert note in main["source"]["note"]
        assert main["text"] == other["text"]
        assert any("nan" in line for line in main["said"])  # before the search


def test_the_loop_of_train_names_the_sample(tmp_path: Path) -> None:
    calls = [
        (job_of(tmp_path / str(number), kind, strategy, tables), late)
        for number, (kind, strategy, tables, late, _) in enumerate(RUNS.values())
    ]
    failed = []
    for (name, (*_, want)), (said, other) in zip(RUNS.items(), run_each(run_here, 2, calls), strict=True):
        want = {"module": "blocks.1.fault", "samples": [SAMPLE], "micro_batch": 1, "rank": 0, **want}
        if want["reason"] in ("forward", "backward"):
            at = SAMPLE % BATCH // said["micro_batch"]
            want |= {"rank": at % 2, "micro_batch": 1 + at // 2}
        if want["reason"] in ("update", "weight"):
            want = {key: value for key, value in want.items() if key not in ("micro_batch", "rank")}
        apart = {key: said["source"].get(key) for key, value in want.items() if said["source"].get(key) != value}
        if apart or said["text"] != other["text"] or said["schema"] != 1:
            failed.append(f"{name}: {apart} for {want}\n{said.get('text')}\n{said.get('said')}")
    assert not failed, "\n".join(failed)
