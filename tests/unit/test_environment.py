"""The environment: what a launcher set, what a child rank gets, and what is said of a half-set one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import environment
from shardwise.environment import Rendezvous
from shardwise.errors import UserError

WHOLE = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}
HERE = Rendezvous(rank=3, world_size=8, local_rank=1, local_world_size=2, master_addr="node-0", master_port=29500)


@pytest.fixture
def launched(monkeypatch):
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_what_torchrun_sets_is_read(launched):
    assert environment.rendezvous() == HERE


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_nobody_launched_this_process(launched, name):
    launched.delenv(name)
    assert environment.rendezvous() is None


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_rendezvous_names_what_is_missing(launched, name):
    launched.delenv(name)
    with pytest.raises(UserError, match=rf"^{name} is not set.*torchrun"):
        environment.rendezvous()


def test_an_empty_variable_is_a_missing_one(launched):
    launched.setenv("MASTER_PORT", "")
    with pytest.raises(UserError, match=r"^MASTER_PORT is not set"):
        environment.rendezvous()


@pytest.mark.parametrize("text", ["two", "-1", "1.5", "²"])
def test_a_number_that_is_none_is_named(launched, text):
    launched.setenv("RANK", text)
    with pytest.raises(UserError, match=f"^RANK is '{text}'"):
        environment.rendezvous()


def test_several_problems_are_told_at_once(launched):
    launched.setenv("LOCAL_RANK", "x")
    launched.delenv("MASTER_ADDR")
    with pytest.raises(UserError) as raised:
        environment.rendezvous()
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("RANK", "8", "RANK is 8 and WORLD_SIZE is 8"),
        ("LOCAL_RANK", "2", "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
        ("LOCAL_WORLD_SIZE", "9", "LOCAL_WORLD_SIZE is greater"),
        ("MASTER_PORT", "0", "MASTER_PORT is 0"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536"),
    ],
)
def test_numbers_that_cannot_be(launched, name, text, says):
    launched.setenv(name, text)
    with pytest.raises(UserError, match=says):
        environment.rendezvous()


def test_a_child_rank_reads_back_what_it_was_given(monkeypatch):
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("A_USERS_OWN", "kept")
    env = environment.rank_environment(HERE, 4, error_file=Path("/some/where"), parent_fd=7)
    assert "RANK" not in os.environ, "the parent's own environment is left alone"
    assert env["A_USERS_OWN"] == "kept"
    monkeypatch.setattr(os, "environ", env)
    assert environment.rendezvous() == HERE
    assert (environment.take_error_file(), environment.take_parent_fd()) == (Path("/some/where"), 7)
    assert (environment.take_error_file(), environment.take_parent_fd()) == (None, None), "a child must not see them"


def test_a_childs_environment_does_not_hand_on_the_parents_private_variables(monkeypatch):
    given = environment.rank_environment(HERE, 1, parent_hosts_store=True, error_file=Path("/e"), parent_fd=7)
    monkeypatch.setattr(os, "environ", given)
    env = environment.rank_environment(HERE, 1)
    monkeypatch.setattr(os, "environ", env)
    assert (environment.take_error_file(), environment.take_parent_fd()) == (None, None)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env


def test_the_store_is_the_parents_only_where_it_hosts_one():
    name = "TORCHELASTIC_USE_AGENT_STORE"
    assert environment.rank_environment(HERE, 1, parent_hosts_store=True)[name] == "True"
    assert name not in environment.rank_environment(HERE, 1)


@pytest.mark.parametrize(("users", "expected"), [(None, "4"), ("", "4"), ("11", "11")])
def test_the_users_threads_win(monkeypatch, users, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", users)
    assert environment.rank_environment(HERE, 4)["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("2, 0", ["2", "0"]),
        ("1,-1,0", ["1"]),
        ("GPU-8932f937,MIG-x", ["GPU-8932f937", "MIG-x"]),
    ],
)
def test_visible_devices(monkeypatch, text, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert environment.visible_devices() == expected


def test_neither_the_environment_nor_a_ranks_guard_loads_torch():
    code = "import sys, shardwise.environment, shardwise.launch.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_segments_are_expandable_unless_the_user_has_configured_the_allocator(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert environment.rank_environment(HERE, 1)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert "PYTORCH_ALLOC_CONF" not in environment.rank_environment(HERE, 1)


SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPIEXEC = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.fixture
def alone(monkeypatch):
    for name in (*WHOLE, *SRUN, *OPEN_MPI, *MPIEXEC, "LOCAL_SIZE"):
        monkeypatch.setenv(name, "")  # so that what is written meanwhile is taken away again
        monkeypatch.delenv(name)
    return monkeypatch


def set_all(monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_task_of_srun_is_a_rank(alone):
    set_all(alone, SRUN)
    assert environment.is_rank()
    port = 15000 + 12 * 7 + 3
    assert environment.rendezvous() == Rendezvous(5, 7, 1, 3, "gpu07", port)
    assert os.environ["LOCAL_RANK"] == "1"  # for PyTorch and whatever else reads it


def test_one_task_of_srun_is_nobodys_rank(alone):
    set_all(alone, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"})
    assert environment.rendezvous() is None


def test_torchrun_below_srun_goes_first(alone):
    set_all(alone, {**SRUN, **WHOLE})
    assert environment.rendezvous() == HERE


def test_ranks_of_mpirun_on_one_node_meet_there(alone):
    set_all(alone, OPEN_MPI)
    found = environment.rendezvous()
    assert (found.rank, found.world_size, found.local_world_size, found.master_addr) == (1, 4, 4, "127.0.0.1")


def test_ranks_of_mpiexec_on_several_nodes_need_a_meeting_point(alone):
    set_all(alone, MPIEXEC)
    with pytest.raises(UserError, match="mpiexec started 4 ranks on several nodes, and MASTER_ADDR is not set"):
        environment.rendezvous()
    set_all(alone, {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"})
    assert environment.rendezvous() == Rendezvous(2, 4, 0, 2, "node-0", 29500)


def test_deepspeeds_launcher_says_local_size(alone):
    set_all(alone, {**WHOLE, "LOCAL_SIZE": "2"})
    alone.delenv("LOCAL_WORLD_SIZE")
    assert environment.rendezvous() == HERE


@pytest.mark.parametrize(
    ("text", "first"),
    [("gpu[07-09,11]", "gpu07"), ("a,b", "a"), ("rack1-[2,5]-ib", "rack1-2-ib"), ("node3", "node3"), ("", "")],
)
def test_the_first_host_of_a_list(text, first):
    assert environment._first_host(text) == first
