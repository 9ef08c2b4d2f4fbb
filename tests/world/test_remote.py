"""Checkpoints on an object store: real gloo ranks that save to and load from a real S3 server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint import commit as commit_module
from shardwise.checkpoint.format import newest, read_manifest, saved_steps
from shardwise.checkpoint.inspect import inspect_checkpoint
from shardwise.checkpoint.integrity import verify_checkpoint
from shardwise.checkpoint.load import load_checkpoint, rng_for
from shardwise.checkpoint.save import Saver, save_checkpoint
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.errors import CheckpointError, UserError
from shardwise.plan.plan import Plan
from shardwise.run.job import Job, prepare_job
from shardwise.run.rank_main import run_job
from shardwise.train.config import read_config
from tests.cli import configs
from tests.s3 import BUCKET, Store, serve
from tests.world.test_checkpoint import STATE, assert_all, build, set_all, step
from tests.worlds import WorldError, run_world

REFUSED = r"access denied|no valid credentials"
FOLDER = f"s3://{BUCKET}/run/checkpoints"


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with serve() as store:
        yield store


@pytest.fixture
def s3(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty bucket, and the environment that leads to it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.forget()
    return server


def save_as(environment: dict[str, str], strategy: str, number: int, crash: bool = False) -> str:
    """On each rank: a state that is a function of names, saved; with ``crash`` rank 0 dies before the manifest."""
    os.environ.update(environment)
    if crash and dist.get_rank() == 0:
        commit_module.write_small = lambda path, data: os._exit(9)
    model, optimizer = build(strategy)
    step(model, optimizer)
    set_all(model, optimizer)
    rng = {"torch": torch.full((16,), dist.get_rank(), dtype=torch.uint8)}
    more = {"plan": Plan(reason="test"), "state": STATE, "rng": rng, "keep": 2}
    return str(save_checkpoint(FOLDER, number, model=model, optimizer=optimizer, **more))


def load_as(environment: dict[str, str], strategy: str, number: int) -> None:
    """On each rank: what is loaded is what was saved, bit for bit."""
    os.environ.update(environment)
    path = newest(folder_of(FOLDER))
    assert path is not None and path.name == f"step-{number:08d}"
    model, optimizer = build(strategy)
    manifest = load_checkpoint(path, model=model, optimizer=optimizer, verify=True)
    assert_all(model, optimizer, strategy)
    assert manifest.state == STATE
    for rank in range(2):
        found = rng_for(path, rank)
        assert found is not None and torch.equal(found["torch"], torch.full((16,), rank, dtype=torch.uint8))


def test_saved_by_two_ranks_and_loaded_by_one_and_three(s3: Store) -> None:
    paths = run_world(save_as, 2, s3.environment, "fsdp", 20)
    assert paths == [f"{FOLDER}/step-00000020"] * 2
    assert s3.keys("run/") == [
        "run/checkpoints/latest",
        "run/checkpoints/step-00000020/manifest.json",
        "run/checkpoints/step-00000020/rank-00000.safetensors",
        "run/checkpoints/step-00000020/rank-00001.safetensors",
    ]
    assert s3.uploads() == []
    order = [line for line in s3.requests if line.startswith("PUT")]
    assert [line.rsplit("/")[-1] for line in order[-2:]] == ["manifest.json", "latest"], "the manifest comes last"
    run_world(load_as, 1, s3.environment, "one", 20)
    run_world(load_as, 3, s3.environment, "ddp", 20)
    s3.requests.clear()
    found = inspect_checkpoint(f"s3://{BUCKET}/run")
    assert found.step == 20 and not found.damage and found.place == f"{FOLDER}/step-00000020"
    assert len(s3.requests) <= 24, s3.requests
    checked = verify_checkpoint(FOLDER)
    assert not checked.damage and checked.hashed and checked.files == 2


@pytest.mark.turns(3)
def test_a_crash_before_the_manifest_leaves_no_checkpoint(s3: Store) -> None:
    with pytest.raises(WorldError, match="exit code 9"):
        run_world(save_as, 2, s3.environment, "fsdp", 20, True)
    assert any(key.endswith("rank-00001.safetensors") for key in s3.keys("run/"))
    folder = folder_of(FOLDER)
    assert newest(folder) is None and saved_steps(folder) == []
    (damage,) = verify_checkpoint(folder / "step-00000020").damage
    assert damage.file == "manifest.json"
    run_world(save_as, 2, s3.environment, "fsdp", 20)
    with pytest.raises(WorldError, match="exit code 9"):
        run_world(save_as, 2, s3.environment, "fsdp", 30, True)
    run_world(load_as, 2, s3.environment, "zero2", 20)


def saver(**more) -> Saver:
    return Saver(FOLDER, keep=2, **more)


def save_one(target: Saver, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    target.save(number, model=model, optimizer=optimizer, plan=Plan(reason="test"), state={"step": number})


@pytest.mark.turns(3)
@pytest.mark.parametrize("async_save", [False, True])
def test_old_ones_go_and_latest_moves(s3: Store, async_save: bool) -> None:
    model, optimizer = build("one")
    with saver(async_save=async_save) as target:
        for number in (1, 2, 3, 10):
            save_one(target, model, optimizer, number)
    folder = folder_of(FOLDER)
    assert [number for number, _ in saved_steps(folder)] == [10, 3]
    assert (folder / "latest").read_bytes() == b"step-00000010\n"
    assert {key.split("/")[2] for key in s3.keys("run/")} == {"latest", "step-00000010", "step-00000003"}
    assert read_manifest(newest(folder)).state == {"step": 10}


def test_a_second_run_in_the_same_folder_is_noticed(s3: Store) -> None:
    model, optimizer = build("one")
    with saver() as first, saver() as second:
        save_one(first, model, optimizer, 1)
        with pytest.raises(UserError, match=f"another run is saving checkpoints to '{FOLDER}'"):
            save_one(second, model, optimizer, 2)


def test_a_store_that_refuses_is_said_and_what_was_saved_stays(s3: Store) -> None:
    model, optimizer = build("one")
    with saver() as target:
        save_one(target, model, optimizer, 1)
        with s3.refusing(), pytest.raises(UserError, match=REFUSED):
            save_one(target, model, optimizer, 2)
        with s3.refusing(), pytest.raises(UserError, match=REFUSED):
            newest(folder_of(FOLDER))
        save_one(target, model, optimizer, 2)
    assert [number for number, _ in saved_steps(folder_of(FOLDER))] == [2, 1]
    with pytest.raises(UserError, match="there is no such bucket"):
        Saver("s3://no-such-bucket/run", keep=1)


def test_damage_on_the_server_is_named(s3: Store) -> None:
    model, optimizer = build("one")
    with saver() as target:
        save_one(target, model, optimizer, 1)
    key = "run/checkpoints/step-00000001/rank-00000.safetensors"
    data = s3.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
    path = newest(folder_of(FOLDER))
    s3.client().put_object(Bucket=BUCKET, Key=key, Body=data[:-1] + bytes([data[-1] ^ 1]))
    (damage,) = verify_checkpoint(path).damage
    assert damage.file == "rank-00000.safetensors" and len(damage.tensors) == 1
    with pytest.raises(CheckpointError, match=f"{damage.tensors[0]} in '{FOLDER}"):
        load_checkpoint(path, model=model, optimizer=optimizer, verify=True)
    s3.client().put_object(Bucket=BUCKET, Key=key, Body=data[:-1])
    with pytest.raises(CheckpointError, match="ends at byte"):
        load_checkpoint(path, model=model, optimizer=optimizer)


def train_as(environment: dict[str, str], job: str) -> None:
    """On each rank: what the command makes it do."""
    os.environ.update(environment)
    run_job(Job.model_validate_json(job))


@pytest.mark.turns(3)
def test_train_saves_to_a_url_and_goes_on_from_there(tmp_path: Path, s3: Store) -> None:
    table = {"folder": FOLDER, "every": 2, "async_save": True}
    config = configs.write_config(tmp_path, train={"steps": 4}, checkpoint=table)
    configs.train(config, "--strategy", "fsdp")
    assert [number for number, _ in saved_steps(folder_of(FOLDER))] == [4, 2]
    assert not list(tmp_path.rglob("*.safetensors")), "nothing of it is on the disk"
    found = inspect_checkpoint(FOLDER)
    assert found.manifest and found.manifest.ranks == 2 and found.manifest.state["position"] == 32
    assert not verify_checkpoint(FOLDER).damage
    again = read_config(config, ["parallel.strategy=ddp", "parallel.nproc=1", "train.steps=5"])
    run_world(train_as, 1, s3.environment, prepare_job(again, lambda text: None).job.to_json())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 5
    assert len(configs.losses(tmp_path)) == 5, "step 5 came after the first four, which were not done again"
    assert read_manifest(newest(folder_of(FOLDER))).step == 5
