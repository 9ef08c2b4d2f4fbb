"""A test that leaves something behind fails: what one test leaks, another one trips over."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Set
from typing import Any

import psutil
import pytest

from shardwise import environment
from shardwise.launch import fork_server
from tests import kept, turns
from tests.fast import Fast
from tests.ledger import DURATIONS, Ledger, within_its_budget

__all__ = ["within_its_budget"]

SERVERS = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "shardwise.launch.fork_server",
)  # live as long as the test process
os.environ.setdefault("SHARDWISE_HISTORY", "off")  # tests are no runs of this machine
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait by spinning take other ranks' cores
# else it looks at everything imported so far again and again while tests are collected
gc.set_threshold(50_000, 20, 50)
GRACE_S = 2.0  # for what is on its way out; waited for only where something is left


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write what each file costs to benchmarks/tests")
    parser.addoption("--fast", action="store_true", help="leave out what was recorded as long")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Ledger(config), "ledger")
    if config.getoption("--fast"):
        config.pluginmanager.register(Fast(), "fast")
    turns.choose(config)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="shardwise-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[kept.FOLDER] = folder.name  # workers and ranks inherit it


def pytest_report_header() -> str:
    return f"cases by turns: {turns.VARIABLE}={os.environ[turns.VARIABLE]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(pytest_report_header())  # where -q leaves out the head


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests are nobody's garbage; the collector would walk millions of objects again and again


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers take the files that last longest first, so that none is left alone with one at the end."""
    turns.leave_out(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        recorded = {file: tests["all"] for file, tests in json.loads(DURATIONS.read_text()).items()}
        items.sort(key=lambda item: -recorded.get(item.nodeid.partition("::")[0], 0.0))


@pytest.fixture(autouse=True)
def leaves_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    names -= environment.SET_BY_LIBRARIES.keys()
    for name in names:  # the next test is not to suffer
        os.environ.pop(name, None)
        os.environ.update({name: before[name]} if name in before else {})
    if names:
        pytest.fail(f"environment variables changed: {', '.join(sorted(names))}")


@pytest.fixture(autouse=True, scope="module")
def leaves_no_fork_server_of_another_environment() -> Iterator[None]:
    """Stop the server of a file that started it with variables of its own; none of the next file's ranks would suit."""
    yield
    server = fork_server.running()
    if server is not None and not server.suits(environment.snapshot()):
        fork_server.stop()


@pytest.fixture(autouse=True)
def leaves_no_child_process() -> Iterator[None]:
    before = set(psutil.pids())  # of the whole machine: far cheaper than asking each one for its parent
    yield
    left = _settled(
        lambda: [process for pid in psutil.pids() if pid not in before for process in _offspring(pid, before)]
    )
    if left:
        pytest.fail(f"child processes left: {'; '.join(left)}")


@pytest.fixture(autouse=True)
def leaves_no_thread() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = _settled(lambda: [t for t in threading.enumerate() if t not in before and not t.daemon])
    if left:
        pytest.fail(f"threads left: {', '.join(thread.name for thread in left)}")


@pytest.fixture(autouse=True)
def leaves_torch_as_it_was() -> Iterator[None]:
    before = _torch_state()
    yield
    after = _torch_state()
    wrong = [f"{name} was {before[name]}, is {after[name]}" for name in before if before[name] != after[name]]
    if not before and after.get("process group"):
        wrong.append("a process group was made and not destroyed")
    if wrong:
        pytest.fail(f"torch is not as it was: {'; '.join(wrong)}")


def _torch_state() -> dict[str, Any]:
    """What a test might have changed; empty as long as nobody has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return {}
    dist = sys.modules.get("torch.distributed")
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "process group": dist is not None and dist.is_available() and dist.is_initialized(),
    }


def _settled(look: Callable[[], list[Any]]) -> list[Any]:
    """What ``look`` still finds after a while; at once where it finds nothing."""
    deadline = time.monotonic() + GRACE_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _offspring(pid: int, before: Set[int] = frozenset()) -> list[str]:
    """The process in words, if it descends from this one and works; else nothing."""
    try:
        process = psutil.Process(pid)
        words, parents = process.cmdline(), process.parents()
        if all(parent.pid != os.getpid() for parent in parents):
            return []
        if any(parent.pid in before and parent.name() == "chromedriver" for parent in parents):
            return []  # a helper of a file's own browser, which starts and ends them when it likes
        if process.status() == psutil.STATUS_ZOMBIE or any(server in word for word in words for server in SERVERS):
            return []
        server = fork_server.running()
        if server is not None and server.pid == pid:  # a rank that it has forked has the same words
            return []
        return [f"{pid} {' '.join(words)[:80]}"]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
