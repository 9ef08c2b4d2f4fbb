"""What each test file costs: ranks and processes that it starts, counted; seconds, told and never judged.

``pytest --record`` writes ``benchmarks/tests/budgets.json`` and ``durations.json`` anew for the files that it has run.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.turns import DURATIONS

FOLDER = Path(__file__).parents[1] / "benchmarks" / "tests"
BUDGETS = FOLDER / "budgets.json"
TOLD_S = 0.1
FACTOR, SLACK = 1.25, 8
"""A file may start a quarter and eight more than was recorded: a fixture of the session counts for whoever is first."""

_counts: Counter[tuple[str, str]] = Counter()
_seconds: dict[str, dict[str, float]] = {}
_fixtures: dict[str, dict[str, float]] = {}
_running = {"file": ""}


def spent(what: str, number: int = 1) -> None:
    """The running test starts ``number`` more ``ranks`` or ``processes``."""
    _counts[_running["file"], what] += number


@contextmanager
def uncounted() -> Iterator[None]:
    """Around a question that is asked again and again until its answer changes: a slow machine asks more often."""
    before, _running["file"] = _running["file"], ""
    try:
        yield
    finally:
        _running["file"] = before


def counted(file: str) -> dict[str, int]:
    """What the tests of ``file`` have started so far."""
    return {what: _counts[file, what] for what in ("ranks", "processes")}


def over(file: str, found: dict[str, int], budgets: dict[str, dict[str, Any]]) -> str:
    """Why ``found`` is beyond the budget of ``file``; empty where it is not."""
    budget = budgets.get(file, {})
    much = [
        f"{number} {what} where {budget.get(what, 0)} are its budget"
        for what, number in found.items()
        if number > FACTOR * budget.get(what, 0) + SLACK
    ]
    if not much:
        return ""
    return (
        f"{file} starts {', '.join(much)}; put more cases into one world, or record what it is worth: pytest --record "
        f"{file}"
    )


def _heard(event: str, _: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn"):
        spent("processes")


class Ledger:
    """The plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self.record = config.getoption("--record")
        self.budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
        sys.addaudithook(_heard)  # for the rest of this process

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        _running["file"] = item.nodeid.partition("::")[0]
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
        """Whichever test comes first has set up what several share; each of them would."""
        began = time.perf_counter()
        made = yield
        took = time.perf_counter() - began
        if fixturedef.scope != "function" and took >= TOLD_S:
            request._pyfuncitem.user_properties.append((f"fixture {fixturedef.argname}", took))
        return made

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.partition("::")
        if report.when == "setup":
            made = [(name, s) for name, s in report.user_properties if name.startswith("fixture ")]
            for name, s in made:
                shared = _fixtures.setdefault(file, {})
                shared[name] = max(s, shared.get(name, 0.0))
        tests = _seconds.setdefault(file, {})
        tests[test] = tests.get(test, 0.0) + report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker of pytest-xdist has counted; it runs whole files, with ``--dist loadfile``."""
        for file, what, number in getattr(node, "workeroutput", {}).get("ledger", ()):
            _counts[file, what] += number

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["ledger"] = [(*key, number) for key, number in _counts.items()]
            return
        if not self.record:
            return
        FOLDER.mkdir(exist_ok=True)
        budgets = {**self.budgets, **{file: counted(file) for file in _seconds}}
        BUDGETS.write_text(json.dumps(_existing(budgets), indent=1) + "\n")
        before = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        durations = {**before, **{file: _told(tests, _fixtures.get(file, {})) for file, tests in _seconds.items()}}
        DURATIONS.write_text(json.dumps(_existing(durations), indent=1) + "\n")


def _existing(files: dict[str, Any]) -> dict[str, Any]:
    return {file: files[file] for file in sorted(files) if (FOLDER.parents[1] / file).exists()}


def _told(tests: dict[str, float], fixtures: dict[str, float]) -> dict[str, float]:
    """Seconds of a file, and of its tests and shared fixtures that take long."""
    found = sorted((tests | fixtures).items(), key=lambda item: -item[1])
    return {"all": round(sum(tests.values()), 1), **{name: round(s, 1) for name, s in found if s >= TOLD_S}}


@pytest.fixture(autouse=True, scope="module")
def within_its_budget(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file that starts far more ranks or processes than was recorded of it fails at its end."""
    yield
    plugin = request.config.pluginmanager.get_plugin("ledger")
    soaks = any(item.get_closest_marker("soak") for item in request.session.items)  # they poll as long as they last
    if plugin is None or plugin.record or soaks:
        return
    file = request.node.nodeid
    problem = over(file, counted(file), plugin.budgets)
    if problem:
        pytest.fail(problem)
