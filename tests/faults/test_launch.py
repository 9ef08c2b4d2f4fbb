"""Ranks that raise, die, hang and are interrupted: who is blamed, and that nothing is left behind.

The ranks are real processes. Most of them are wired with plain sockets, as those start fast; the last ones use gloo.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from shardwise import errors
from shardwise.errors import DataError, DoesNotFit, Interrupted, RankError, UserError
from shardwise.launch import local
from shardwise.launch.local import run_local
from shardwise.watch import exit_status as fate
from shardwise.watch.exit_status import OomKills

COMMON = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
from shardwise import errors
from shardwise.launch.rank import guarded

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here = Path(__file__).parent

def mark(name, text=""):
    (here / f".{name}").write_text(text)
    (here / f".{name}").rename(here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.005)
    return (here / name).read_text()

def wire(culprit):
    '''Every other rank holds a connection to the culprit; returns them on the culprit, and never on the others.'''
    if rank == culprit:
        with socket.create_server(("127.0.0.1", 0)) as server:
            mark("port", str(server.getsockname()[1]))
            return [server.accept()[0] for _ in range(world - 1)]
    with socket.create_connection(("127.0.0.1", int(wait_for("port")))) as peer:
        peer.recv(1)
    raise RuntimeError(sys.argv[2])

def main():
{body}
    return 0

guarded(main)
"""

DRIVER = """
import sys
from pathlib import Path
from shardwise.errors import ShardwiseError
from shardwise.launch.local import run_local
try:
    run_local([sys.executable, sys.argv[1]], 2, threads=1, logs=Path(sys.argv[1]).parent / "logs")
except ShardwiseError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(error.exit_code)
"""


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what is kept of a rank's output must not rest on it
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    for process in left:
        process.kill()
    assert not left


@pytest.fixture
def script(tmp_path):
    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(COMMON.replace("{body}", textwrap.indent(textwrap.dedent(body), "    ")))
        return path

    return write


def launch(path: Path, world_size: int, *args: object, **more) -> int:
    command = [sys.executable, str(path), *(str(a) for a in args)]
    return run_local(command, world_size, threads=1, logs=path.parent / "logs", **more)


def gone(pid: int) -> bool:
    """Ended, though perhaps not reaped by whoever inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(done, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


@contextlib.contextmanager
def driving(path: Path):
    """A launcher in a process of its own, to be interrupted or killed."""
    driver = path.parent / "driver.py"
    driver.write_text(DRIVER)
    with subprocess.Popen([sys.executable, str(driver), str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def pids(tmp_path: Path, name: str) -> list[int]:
    files = [tmp_path / f"{name}{rank}" for rank in range(2)]
    wait_until(lambda: all(f.exists() for f in files), 30)
    return [int(f.read_text()) for f in files]


def test_the_ranks_get_their_places_and_their_output_is_kept(script, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = script("""
        mark(f"env{rank}", " ".join(os.environ[n] for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")))
        assert os.getsid(0) == os.getpid(), "a terminal's Ctrl-C is for the parent alone"
        print(f"hello from {rank}", end="")
        print(f"trouble from {rank}", file=sys.stderr)
    """)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.error.json").write_text("of a run before")
    assert launch(path, 2) == 0
    assert [(tmp_path / f"env{r}").read_text() for r in range(2)] == ["0 2 1", "1 2 1"]
    assert capfd.readouterr() == ("hello from 0", "trouble from 0\n")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "trouble from 1\nhello from 1"
    assert [f.name for f in (tmp_path / "logs").iterdir()] == ["rank-1.log"]


@pytest.mark.turns(2)
def test_a_rank_that_raises_is_blamed_though_its_victims_speak_first(script, tmp_path):
    path = script("""
        for peer in wire(int(sys.argv[1])):
            peer.close()
        time.sleep(0.1)
        try:
            {}["the cause"]
        except KeyError:
            raise ValueError("the second half of the batch is missing")
    """)
    for turn in range(10):
        (tmp_path / "port").unlink(missing_ok=True)
        with pytest.raises(RankError) as raised:
            launch(path, 3, turn % 3, "[pair.cc:553] Connection closed by peer [127.0.0.1]:2957")
        lines = str(raised.value).splitlines()
        assert lines[0] == f"rank {turn % 3} raised ValueError: the second half of the batch is missing"
        assert lines[-1] == f"the whole of it is in {tmp_path / 'logs' / f'rank-{turn % 3}.log'}"
        assert any("in main" in line for line in lines) and len(lines) <= 17
        assert "KeyError: 'the cause'" in (tmp_path / "logs" / f"rank-{turn % 3}.log").read_text()


@pytest.mark.parametrize("victims_say", ["Connection closed by peer", "something that nobody has a rule for"])
def test_a_rank_that_is_killed_is_blamed_and_not_its_victims(script, tmp_path, victims_say):
    path = script("""
        wire(int(sys.argv[1]))
        print("the last words")
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    for turn in range(5):
        (tmp_path / "port").unlink(missing_ok=True)
        with pytest.raises(
            RankError, match=rf"^rank {turn % 3} was killed by SIGKILL \(not by the kernel for want of memory: .*GiB\)"
        ) as raised:
            launch(path, 3, turn % 3, victims_say)
        assert ("the last words" in str(raised.value)) == (turn % 3 > 0)  # rank 0's are on the screen


def test_a_rank_that_takes_long_to_die_is_blamed_all_the_same(script, monkeypatch):
    monkeypatch.setattr(local, "REPORT_S", 0.2)
    path = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for peer in wire(1):
            peer.close()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL"):
        launch(path, 2, 1, "Connection closed by peer")


def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_told_from_others(tmp_path, monkeypatch):
    monkeypatch.setattr(fate, "_PROC", tmp_path)
    monkeypatch.setattr(fate, "_CGROUPS", tmp_path / "groups")
    group, machine = tmp_path / "groups" / "pod" / "memory.events", tmp_path / "vmstat"
    group.parent.mkdir(parents=True)
    (tmp_path / "self").mkdir()

    def counted(own: int | None, all_of_them: int | None) -> OomKills:
        for file, number in ((group, own), (machine, all_of_them)):
            file.unlink(missing_ok=True)
            if number is not None:
                file.write_text(f"oom 7\noom_kill {number}\noom_group_kill 0\n")
        return OomKills.now()

    (tmp_path / "self" / "cgroup").write_text("1:cpu:/x\n0::/pod\n")
    assert counted(3, 9) == OomKills(3, 9) and counted(None, None) == OomKills(None, None)
    assert counted(4, 9).why(OomKills(3, 9)).startswith("out of memory: the kernel killed it")
    assert counted(3, 10).why(OomKills(3, 9)).startswith("not by the kernel"), "another container's process"
    assert counted(None, 10).why(OomKills(None, 9)).startswith("out of memory: the kernel killed a process of this")
    assert counted(None, 9).why(OomKills(None, 9)).startswith("not by the kernel")
    assert counted(None, None).why(OomKills(None, None)) == "out of memory? The kernel does not say"
    (tmp_path / "self" / "cgroup").write_text("4:cpu,memory:/elsewhere\n")
    older = tmp_path / "groups" / "memory" / "memory.oom_control"
    older.parent.mkdir()
    older.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert OomKills.now().group == 2, "version 1, seen from a container"


@pytest.mark.turns(2)
def test_a_rank_that_is_stopped_is_named_and_left_alone(script, monkeypatch, capfd):
    importlib.import_module("torch.distributed")  # what the launcher waits for before it looks at its ranks
    monkeypatch.setattr(local, "STILL_S", 0.6)
    path = script("""
        mark(f"pid{rank}", str(os.getpid()))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            stopped = int(wait_for("pid1"))
            time.sleep(2.5)
            os.kill(stopped, signal.SIGCONT)
    """)
    assert launch(path, 2) == 0
    pid = (path.parent / "pid1").read_text()
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"shardwise: rank 1 \(process {pid}\) has not moved for [0-2] s, and the others wait for it: "
        rf"it is stopped \(SIGSTOP\); kill -CONT {pid} lets it go on",
        line,
    )


def test_a_fault_in_native_code_leaves_the_python_line_in_the_log(script):
    path = script("""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
    """)
    where = r"^rank 1 was killed by SIGSEGV \(a fault in native code\); it stood at .* in main"
    with pytest.raises(RankError, match=where):
        launch(path, 2)
    assert "Fatal Python error: Segmentation fault" in (path.parent / "logs" / "rank-1.log").read_text()


def test_an_abort_after_another_ranks_error_is_what_a_victim_does(script):
    path = script("""
        if rank == 0:
            raise ValueError("the cause")
        wait_for("logs/rank-0.error.json")
        os.abort()
    """)
    with pytest.raises(RankError, match=r"^rank 0 raised ValueError: the cause"):
        launch(path, 2)


def test_only_symptoms_are_better_than_nothing(script):
    path = script("""
        if rank == 1:
            raise ConnectionResetError("Connection reset by peer") if sys.argv[1] == "raise" else SystemExit(0)
        wait_for("logs/rank-1.error.json") if sys.argv[1] == "raise" else time.sleep(0.5)
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError:
            raise KeyError("while cleaning up")
    """)
    with pytest.raises(RankError, match=r"^rank 1 raised ConnectionResetError"):
        launch(path, 2, "raise")
    with pytest.raises(
        RankError, match=r"^rank 1 ended with exit code 0 in .*\nrank 0, which lost it, raised KeyError"
    ):
        launch(path, 2, "leave")


@pytest.mark.parametrize(("who", "says"), [("0,1,2", "all ranks"), ("0,2", "ranks 0, 2"), ("1", "rank 1")])
def test_a_mistake_of_the_user_is_told_once(script, capfd, who, says):
    path = script("""
        if str(rank) in sys.argv[1]:
            raise errors.DataError("no such file", "no such folder")
    """)
    with pytest.raises(DataError) as raised:
        launch(path, 3, who)
    assert list(raised.value.problems) == ["no such file", f"no such folder (on {says})"]
    assert raised.value.exit_code == 2
    assert capfd.readouterr() == ("", ""), "the parent speaks"


def test_an_answer_and_an_exception_of_the_users_own_keep_their_exit_code(script):
    path = script("""
        class Mine(errors.DoesNotFit):
            exit_code = 7
        raise Mine("too large")
    """)
    with pytest.raises(DoesNotFit, match=r"^too large$") as raised:
        launch(path, 1)
    assert raised.value.exit_code == 7


@pytest.mark.parametrize(
    ("ending", "error", "says"),
    [
        ("sys.exit('not like this')", UserError, "^not like this$"),
        ("sys.exit(5)", RankError, "^rank 0 ended with exit code 5"),
        ("return 5", RankError, "^rank 0 ended with exit code 5"),
        ("raise KeyboardInterrupt", Interrupted, "^interrupted"),
        ("eval('1 +* 2')", RankError, "^rank 0 raised SyntaxError: "),
        ("e = ValueError('x'); e.add_note('y'); raise e", RankError, "^rank 0 raised ValueError: x\n"),
    ],
)
def test_how_a_rank_may_end(script, ending, error, says):
    with pytest.raises(errors.ShardwiseError, match=says) as raised:
        launch(script(ending), 1)
    assert type(raised.value) is error


def test_without_a_launcher_a_rank_speaks_for_itself(script, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for body, code, says in [
        ("raise errors.DoesNotFit('too large')", 1, "too large\n"),
        ("{}['x']", 3, "KeyError: 'x'\n"),
    ]:
        done = subprocess.run([sys.executable, script(body)], stderr=subprocess.PIPE, text=True, timeout=30)
        assert done.returncode == code and done.stderr.endswith(says)
        assert done.stderr.startswith("too large") or done.stderr.startswith("Traceback")


def test_ranks_that_hang_are_ended_with_sigterm_and_then_sigkill_and_their_children_too(script, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "REPORT_S", 0.3)
    path = script("""
        if rank == 0:
            wait_for("ready1"), wait_for("ready2")
            raise errors.DataError("the cause")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        def on_term(number, frame):
            mark(f"term{rank}")
            if rank == 1:
                os._exit(0)
        signal.signal(signal.SIGTERM, on_term)
        mark(f"ready{rank}", str(child.pid))
        while True:
            time.sleep(1)
    """)
    started = time.monotonic()
    with pytest.raises(DataError, match=r"^the cause \(on rank 0\)$"):
        launch(path, 3, grace_s=1.0)
    assert 1.3 < time.monotonic() - started < 10
    assert (tmp_path / "term1").exists() and (tmp_path / "term2").exists()
    wait_until(lambda: all(gone(int((tmp_path / f"ready{r}").read_text())) for r in (1, 2)), 2)


def test_what_a_rank_leaves_running_ends_with_it(script, tmp_path):
    path = script("""
        mark("child", str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid))
    """)
    assert launch(path, 1) == 0
    wait_until(lambda: gone(int((tmp_path / "child").read_text())), 2)


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^port {port} cannot be used .*in use.* name 0 for any free one"):
            run_local([sys.executable], 1, threads=1, logs=tmp_path, master_port=port)
    with pytest.raises(UserError, match="65535"):
        run_local([sys.executable], 1, threads=1, logs=tmp_path, master_port=65536)


def test_a_fixed_port_is_the_one_the_ranks_get_and_is_free_afterwards(script, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = script('mark("port", os.environ["MASTER_PORT"])')
    for _ in range(2):
        assert launch(path, 1, master_port=port) == 0
    assert (tmp_path / "port").read_text() == str(port)


def test_a_command_that_cannot_be_started(tmp_path):
    with pytest.raises(UserError, match="cannot start '/no/such/command'"):
        run_local(["/no/such/command"], 2, threads=1, logs=tmp_path / "logs")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="logs in"):
        run_local([sys.executable, "-c", ""], 2, threads=1, logs=tmp_path / "file")


def test_ranks_end_when_their_parent_is_killed(script, tmp_path):
    path = script("""
        mark(f"pid{rank}", str(os.getpid()))
        while True:
            time.sleep(1)
    """)
    with driving(path) as driver:
        ranks = pids(tmp_path, "pid")
        driver.send_signal(signal.SIGKILL)
        driver.wait(5)
        try:
            wait_until(lambda: all(gone(pid) for pid in ranks), 2)
        finally:
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.turns(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_the_ranks_save_and_leave(script, tmp_path, number):
    path = script("""
        asked = []
        signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
        signal.signal(signal.SIGTERM, lambda number, frame: mark(f"hurried{rank}"))
        mark(f"pid{rank}", str(os.getpid()))
        while not asked:
            time.sleep(0.01)
        time.sleep(0.2 + 3.0 * rank)   # longer than what the others have after a failure
        mark(f"saved{rank}", str(len(asked)))
        raise errors.Interrupted("stopped after step 7")
    """)
    with driving(path) as driver:
        pids(tmp_path, "pid")
        driver.send_signal(number)
        assert driver.communicate(timeout=20)[0] == "Interrupted stopped after step 7\n"
    assert driver.returncode == 130
    assert [(tmp_path / f"saved{r}").read_text() for r in range(2)] == ["1", "1"]
    assert not list(tmp_path.glob("hurried*"))


@pytest.mark.turns(3)
def test_an_interrupt_that_one_rank_cannot_hear_does_not_wait_for_it(script, tmp_path):
    """Rank 1 has no handler yet, and rank 0 waits for it in native code."""
    path = script("""
        if rank == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        mark(f"pid{rank}", str(os.getpid()))
        while True:
            time.sleep(1)
    """)
    with driving(path) as driver:
        pids(tmp_path, "pid")
        driver.send_signal(signal.SIGINT)
        assert driver.communicate(timeout=20)[0] == "Interrupted interrupted before the work was done\n"
    assert driver.returncode == 130


def test_a_second_interrupt_kills(script, tmp_path):
    path = script("""
        signal.signal(signal.SIGINT, lambda number, frame: mark(f"heard{rank}", str(os.getpid())))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark(f"pid{rank}", str(os.getpid()))
        while True:
            time.sleep(1)
    """)
    with driving(path) as driver:
        pids(tmp_path, "pid")
        driver.send_signal(signal.SIGINT)
        ranks = pids(tmp_path, "heard")
        driver.send_signal(signal.SIGTERM)  # a scheduler's, which says the same again
        time.sleep(0.3)
        assert driver.poll() is None
        driver.send_signal(signal.SIGINT)
        assert driver.communicate(timeout=4)[0].startswith("Interrupted interrupted; all ranks had to be killed before")
        assert driver.returncode == 130
        assert all(gone(pid) for pid in ranks)


def test_ranks_that_do_not_stop_are_killed_after_a_while(script, monkeypatch):
    monkeypatch.setattr(local, "STOP_S", 0.5)
    path = script("""
        if rank == 0:
            wait_for("deaf")
            raise errors.Interrupted("stopped after step 7")
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        mark("deaf")
        while True:
            time.sleep(1)
    """)
    with pytest.raises(Interrupted, match=r"rank 1 had to be killed, as they did not stop in 0.5 s"):
        launch(path, 2, grace_s=0.2)


def test_a_failure_while_stopping_is_not_hidden(script):
    path = script("""
        if rank == 0:
            raise errors.Interrupted("stopped")
        wait_for("logs/rank-0.error.json")
        raise errors.CheckpointError("the disk is full")
    """)
    with pytest.raises(errors.CheckpointError, match=r"^the disk is full \(on rank 1\)$"):
        launch(path, 2)


def test_the_signal_handlers_are_those_that_were_there(script):
    path = script("pass")
    mine = lambda number, frame: None  # noqa: E731
    before, interrupt = signal.signal(signal.SIGTERM, mine), signal.getsignal(signal.SIGINT)
    try:
        launch(path, 1)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread(script):
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(launch(script("pass"), 1)))
    thread.start()
    thread.join(30)
    assert codes == [0]


GLOO = """
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
"""


@pytest.mark.turns(2)
def test_gloo_ranks_meet_at_the_parents_store(script, tmp_path, capfd):
    path = script(
        GLOO
        + """
    if rank == 0:
        mark("pid", str(os.getpid()))
    else:
        pid = wait_for("pid")
        time.sleep(0.5)
        assert ") Z " not in Path(f"/proc/{pid}/stat").read_text(), "a rank that is done waits for the others"
    mark(f"total{rank}", str(total.item()))
    """
    )
    assert launch(path, 2) == 0
    assert [(tmp_path / f"total{r}").read_text() for r in range(2)] == ["3.0", "3.0"]
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == ""


@pytest.mark.turns(3)
@pytest.mark.parametrize("how", ["raise", "raise", "kill"])
def test_gloo_ranks_that_wait_in_a_collective_are_not_blamed(script, how):
    path = script(
        GLOO
        + """
    if rank == 1 and sys.argv[1] == "raise":
        raise ValueError("the cause")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    """
    )
    with pytest.raises(RankError, match={"raise": "^rank 1 raised ValueError: the", "kill": "^rank 1 was killed"}[how]):
        launch(path, 2, how)
