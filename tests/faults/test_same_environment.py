"""Ranks of a launcher that do not go together: one message on all of them, which names the node, the value and the fix.

The ranks are forked from a server that has torch; a node is what SLURMD_NODENAME says.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import platform
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.distributed import same_environment
from shardwise.distributed.same_environment import interface_problems
from shardwise.environment import Rendezvous
from shardwise.errors import UserError
from tests import worlds  # noqa: F401 it says what the fork server loads
from tests.cli import configs
from tests.slurm import free_ports

CONFIG = {
    "train": {"steps": 12, "output": "/here/run"},
    "data": {"path": "/here/data"},
    "parallel": {"strategy": "ddp"},
}
LIMIT_S = 40.0
OTHERS = ("RANK", "WORLD", "LOCAL_", "MASTER_", "SLURM", "OMPI_", "PMI", "TORCHELASTIC", "GLOO_", "NCCL_", "SHARDWISE_")


@dataclass
class Rank:
    """A process of one case: its variables, the facts that are other there, and its config."""

    env: dict[str, str]
    facts: dict[str, str] = field(default_factory=dict)
    alike: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Ended:
    """How a rank ended: 0 where it joined, else the exit code of its error."""

    code: int | None
    message: str = ""


def two_nodes(*second: dict[str, Any], world: int = 2, per_node: int = 1) -> list[Rank]:
    """Ranks of nodes a and b; the dictionaries are what is other on those of b: ``env``, ``facts`` or ``alike``."""
    ranks = []
    for rank in range(world):
        env = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
        env |= {"MASTER_ADDR": "127.0.0.1", "SHARDWISE_JOIN_S": 3}
        env |= {"SLURMD_NODENAME": "abcd"[rank // per_node]}
        made = Rank({key: str(value) for key, value in env.items()}, alike={"": CONFIG, "plan": None})
        for change in second if rank >= per_node else ():
            made.env |= change.get("env", {})
            made.facts |= change.get("facts", {})
            made.alike = change.get("alike", made.alike)
        ranks.append(made)
    return ranks


def run(ranks: Sequence[Rank]) -> list[Ended]:
    """Start the ranks and wait for their ends; none of them is left."""
    [port] = free_ports(1)
    for rank in ranks:
        rank.env.setdefault("MASTER_PORT", str(port))
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / f"{number}.json" for number in range(len(ranks))]
        started = [context.Process(target=_main, args=pair) for pair in zip(ranks, files, strict=True)]
        for process in started:
            process.start()
        deadline = time.monotonic() + LIMIT_S
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in started if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        assert not late, f"{len(late)} ranks were left after {LIMIT_S:g} s"
        return [Ended(**json.loads(file.read_text())) if file.exists() else Ended(None) for file in files]


def _main(rank: Rank, file: Path) -> None:
    import gc

    from shardwise.distributed import process_group, rendezvous
    from shardwise.errors import ShardwiseError

    gc.disable()
    for name in [name for name in os.environ if name.startswith(OTHERS)]:
        del os.environ[name]
    os.environ.update(rank.env)
    rendezvous._GRACE_S = 2.0
    real = process_group.facts_of
    process_group.facts_of = lambda *args: real(*args) | rank.facts  # type: ignore[assignment]
    found = Ended(0)
    try:
        if "config" in rank.alike:
            _train(Path(rank.alike["config"]))
        else:
            ranks = process_group.join("cpu", 30.0, alike=rank.alike)
            process_group.gather_ints([ranks.rank], ranks)
            process_group.leave(ranks)
    except ShardwiseError as error:
        found = Ended(error.exit_code, str(error))
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(found.__dict__))
    partial.rename(file)
    os._exit(found.code or 0)


def _train(config: Path) -> None:
    """What ``shardwise train`` does under a launcher, with the error raised here."""
    from shardwise.run import rank_main
    from shardwise.train.config import read_config

    inner: list[Any] = []
    with (
        mock.patch.object(rank_main, "guarded", lambda work, logs: inner.append(work)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        rank_main.run_under_launcher(read_config(config, []), None, as_json=False)
        inner[0]()


def changed(table: str, key: str, value: Any) -> dict[str, Any]:
    return {"": {**CONFIG, table: {**CONFIG[table], key: value}}, "plan": None}


OLD = {"shardwise": "0.0.1", same_environment.CODE: "00000000"}
GPU = {"device": "NVIDIA H100 80GB HBM3"}
DIFFER: dict[str, tuple[list[Rank], Sequence[str]]] = {
    "another config": (
        two_nodes({"alike": changed("train", "steps", 14)}, world=4, per_node=2),
        ("train.steps = 14 on b (ranks 2, 3), but 12 on the others", "the same config"),
    ),
    "another plan": (
        two_nodes({"alike": {"": CONFIG, "plan": {"micro_batch": 2}}}),
        ("plan = given on b (rank 1), but not given on the others",),
    ),
    "older shardwise": (
        two_nodes({"facts": OLD}),
        ("shardwise = 0.0.1 on b (rank 1), but ", "install the same shardwise on all nodes"),
    ),
    "older code of one version": (
        two_nodes({"facts": {same_environment.CODE: "00000000"}}),
        ("shardwise's code = 00000000 on b (rank 1)", "install the same commit"),
    ),
    "another torch": (
        two_nodes({"facts": {"torch": "2.12.1+cu130"}}),
        ("torch = 2.12.1+cu130 on b (rank 1), but 2.", "install the same torch on all nodes"),
    ),
    "another Python": (
        two_nodes({"facts": {"python": "3.9"}}),
        ("python = 3.9 on b (rank 1), but ", "the same minor version"),
    ),
    "another device": (
        two_nodes({"facts": GPU}, world=3),
        ("device = cpu on a (rank 0), but NVIDIA H100 80GB HBM3 on the others", "one kind of device"),
    ),
    "no such interface": (
        two_nodes({"env": {"GLOO_SOCKET_IFNAME": "nope0"}}),
        ("GLOO_SOCKET_IFNAME = nope0: there is no such network interface, only ", "(on b (rank 1))"),
    ),
    "other processes per node": (
        [*two_nodes({"env": {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}}, world=3, per_node=2)],
        ("LOCAL_WORLD_SIZE = 1 on b (rank 2), but 2 on the others", "as many processes on each node"),
    ),
    "another world size": (
        two_nodes({"env": {"WORLD_SIZE": "4"}}),
        ("WORLD_SIZE = 4 on b (rank 1), but 2 on the others", "the same number of nodes"),
    ),
    "another launcher": (
        two_nodes({"facts": {"launcher": "srun"}}),
        ("launcher = srun on b (rank 1), but ", "start all ranks in one way"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFER)
def test_a_node_that_differs_is_named_on_all_ranks(case: str) -> None:
    ranks, words = DIFFER[case]
    found = run(ranks)
    assert [one.code for one in found] == [2] * len(ranks), found
    assert len({one.message for one in found}) == 1
    assert len(found[0].message.splitlines()) == 1, found[0].message
    for word in words:
        assert word in found[0].message


def test_what_may_differ_is_not_compared() -> None:
    other = {"train": {**CONFIG["train"], "output": "/there/run"}, "data": {"path": "/there/data"}}
    env = {
        "HOME": "/there",
        "OMP_NUM_THREADS": "3",
        "PATH": "/there/bin",
        "MASTER_ADDR": "localhost",
        "NCCL_DEBUG": "INFO",
    }
    ranks = two_nodes({"env": env, "alike": {"": {**CONFIG, **other}, "plan": None}}, world=3)
    ranks[2].env["SLURMD_NODENAME"] = socket.gethostname()
    assert [one.code for one in run(ranks)] == [0, 0, 0]


@pytest.mark.turns(3)
def test_a_rank_that_never_comes_is_named_with_its_node() -> None:
    found = run(two_nodes(world=4, per_node=2)[:3])
    assert [one.code for one in found] == [2] * 3
    assert "1 of 4 ranks have not come to 127.0.0.1:" in found[0].message
    assert " within 3 s: rank 3 on b; start them" in found[0].message
    assert len({one.message for one in found}) == 1


def test_a_rank_that_is_there_twice_is_named() -> None:
    ranks = two_nodes(world=3)
    ranks[2].env |= {"RANK": "1", "SLURMD_NODENAME": "c"}
    found = run(ranks)
    assert [one.code for one in found] == [2] * 3
    assert found[0].message.startswith("RANK = 1 on 2 processes (b and c): each rank is one process")
    assert len({one.message for one in found}) == 1


@pytest.mark.turns(3)
def test_two_masters_wait_for_each_other_in_vain() -> None:
    ranks = two_nodes()
    ranks[1].env["MASTER_PORT"] = str(free_ports(1)[0])
    one, other = run(ranks)
    assert (one.code, other.code) == (2, 2)
    assert (
        "1 of 2 ranks have not come" in one.message and "give all nodes this MASTER_ADDR and MASTER_PORT" in one.message
    )
    assert other.message.startswith("MASTER_ADDR = 127.0.0.1, MASTER_PORT = ")
    assert "rank 1 finds nobody there within 3 s (Connection refused)" in other.message


@pytest.mark.turns(3)
def test_a_master_that_has_no_address() -> None:
    ranks = two_nodes({"env": {"MASTER_ADDR": "no-such-node.invalid"}})
    _, other = run(ranks)
    assert other.code == 2
    assert "MASTER_ADDR = no-such-node.invalid" in other.message and "cannot resolve this name" in other.message


def test_a_port_that_another_process_has() -> None:
    ranks = two_nodes()
    with socket.create_server(("127.0.0.1", 0)) as held:
        ranks[0].env["MASTER_PORT"] = str(held.getsockname()[1])
        [one] = run(ranks[:1])
    assert one.code == 3 and "another process of this node has the port" in one.message


@pytest.mark.parametrize(
    ("strategy", "words"),
    [("ddp+tp2", "tp"), ("fsdp", "global batch 8 is not a multiple of dp 3; set train.global_batch")],
)
def test_a_world_that_strategy_or_batch_does_not_divide(tmp_path: Path, strategy: str, words: str) -> None:
    config = configs.write_config(tmp_path, parallel={"nproc": None, "strategy": strategy})
    ranks = two_nodes(world=3)
    for rank in ranks:
        rank.alike = {"config": str(config)}
    found = run(ranks)
    assert [one.code for one in found] == [2] * 3
    assert words in found[0].message and "3" in found[0].message
    assert "rank 0 could not prepare the run" in found[1].message


LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "9",
}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**LAUNCHED, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "srun says that this is task 1 of 2"),
        ({**LAUNCHED, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun says that this is task 0 of 4"),
        (
            {**LAUNCHED, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "mpirun says that this is task 1 of 2",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0"}, "MASTER_ADDR is not set"),
    ],
)
def test_variables_of_another_launcher(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], words: str) -> None:
    from shardwise.environment import rendezvous

    for name in [name for name in os.environ if name.startswith(OTHERS)]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        rendezvous()


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},  # the same task
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_RUN_ID": "1"},  # torchrun below srun
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8", "RANK": "5"},  # another launcher below it
    ],
)
def test_launchers_that_agree(monkeypatch: pytest.MonkeyPatch, more: dict[str, str]) -> None:
    from shardwise.environment import rendezvous

    for name in [name for name in os.environ if name.startswith(OTHERS)]:
        monkeypatch.delenv(name)
    for name, value in {**LAUNCHED, **more}.items():
        monkeypatch.setenv(name, value)
    assert isinstance(rendezvous(), Rendezvous)


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("eth", ""),
        ("eth0,ib0", ""),
        ("=eth0", ""),
        ("^docker", ""),
        ("ib", "ib"),
        ("=eth", "eth"),
        ("ib0,ib1", "ib0 and ib1"),
    ],
)
def test_nccls_interfaces_are_beginnings_of_names(monkeypatch: pytest.MonkeyPatch, value: str, wrong: str) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    found = interface_problems("cuda", ["lo", "eth0"])
    assert found == ([] if not wrong else found) and bool(found) is bool(wrong)
    assert not wrong or found[0].startswith(
        f"NCCL_SOCKET_IFNAME = {wrong}: there is no such network interface, only eth0"
    )
    assert interface_problems("cpu", ["lo", "eth0"]) == []


def test_the_facts_of_this_machine() -> None:
    place = Rendezvous(0, 2, 0, 1, "a", 1)
    facts = same_environment.facts_of(place, "2.13.0", "cpu", {"": CONFIG})
    assert facts["python"] == ".".join(platform.python_version().split(".")[:2])
    assert facts["train.steps"] == "12" and len(facts[same_environment.CODE]) == 8
