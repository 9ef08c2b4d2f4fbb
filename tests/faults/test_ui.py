"""The local server against other sites, other users, hostile folders and a thousand readers; over real sockets."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from shardwise.observation.loop_facts import LoopFacts
from shardwise.observation.loop_times import LoopTimes
from shardwise.observation.run_output import LaterSteps, observed_loop
from shardwise.receipts.receipt import Line, Receipt
from shardwise.report.html.observed_folder import ObservedLoop
from shardwise.web import live_metrics, run_list
from shardwise.web.live_metrics import MOST_STREAMS, MetricsTail
from shardwise.web.run_list import find_runs
from tests.commands import ROOT, shardwise
from tests.reports import metrics, write_links, write_run
from tests.uis import Answer, Server, parsed, server

SECRET = "a secret outside of the root"
EVIL = '<script>alert("x")</script>'
NOBODY = 65534
READERS = 1000
CAPABILITIES = "-dac_override,-dac_read_search"
PLAIN_ROOT = ("setpriv", "--inh-caps", CAPABILITIES, "--bounding-set", CAPABILITIES)
COMMON = ("content-security-policy", "x-content-type-options", "referrer-policy", "cross-origin-resource-policy")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Runs and a built planner, beside a secret; anybody may read them, as far as the folders' own modes allow."""
    found = Path(tempfile.mkdtemp(prefix="shardwise-ui-test-"))
    found.chmod(0o755)
    runs, site = found / "runs", found / "site"
    write_run(runs / "good")
    write_run(runs / "group" / "deeper", without=("summary.json",), steps=9)
    (found / "secret.txt").write_text(SECRET)
    site.mkdir()
    (site / "index.html").write_text("<h1>planner</h1>")
    (site / "leak.txt").symlink_to(found / "secret.txt")
    yield found
    shutil.rmtree(found)


@pytest.fixture(scope="module")
def ui(folder: Path) -> Iterator[Server]:
    with server(folder / "runs", "--site", str(folder / "site")) as found:
        yield found


def refused(answer: Answer, status: int) -> None:
    """Refused in one sentence, under every header, and with nothing of the pages."""
    assert answer.status == status, (answer.status, answer.body[:200])
    assert all(name in answer.headers for name in COMMON)
    assert "set-cookie" not in answer.headers and b"good" not in answer.body


def test_only_the_token_opens_the_page_and_then_the_cookie(ui):
    refused(ui.get("/", cookie=None), 401)
    refused(ui.get("/runs/x/events", cookie=None), 401)
    refused(ui.get("/ui/ui.js", cookie=None), 401)
    refused(ui.get("/planner/index.html", cookie=None), 401)
    refused(ui.get("/?token=", cookie=None), 401)
    refused(ui.get(f"/?token={ui.token[:-1]}", cookie=None), 401)
    refused(ui.get(f"/?token={quote('ü')}", cookie=None), 401)
    refused(ui.get("/", cookie=f"shardwise-ui-{ui.port}={ui.token}x"), 401)
    refused(ui.get("/", cookie=f"other={ui.token}"), 401)
    entered = ui.get(f"/?token={ui.token}", cookie=None)
    assert entered.status == 200 and b'url=/"' in entered.body and b"good" not in entered.body
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    page = ui.get("/", cookie=cookie.partition(";")[0])
    assert page.status == 200 and "good" in page.text and ui.token not in page.text
    twisted = ui.get(f"//other.example/%22%3E?token={ui.token}", cookie=None)
    assert b'url=/"' in twisted.body, "it moves on to an address of its own"


def test_another_host_or_origin_is_refused(ui):
    for host in ("evil.example", f"evil.example:{ui.port}", "127.0.0.1", f"127.0.0.1:{ui.port + 1}", "", None):
        answer = ui.get("/", host=host)
        assert answer.status in (400, 403) and b"good" not in answer.body, host
    twice = ui.request("/").replace(b"\r\n", b"\r\nHost: evil.example\r\n", 1)
    with ui.connect() as found:
        found.sendall(twice)
        assert parsed(found.recv(2**16)).status in (400, 403)
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{ui.port + 1}", f"https://127.0.0.1:{ui.port}"):
        refused(ui.get("/", origin=origin), 403)
        refused(ui.get(f"/?token={ui.token}", origin=origin), 403)
    for site in ("cross-site", "same-site"):  # another port of this machine is the same site
        refused(ui.get("/", Sec_Fetch_Site=site), 403)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"):
        refused(ui.get("/", method), 405)
    assert ui.get("/", host=f"LOCALHOST:{ui.port}").status == 200
    own = ui.get("/", origin=f"http://127.0.0.1:{ui.port}", Sec_Fetch_Site="same-origin")
    assert own.status == 200 and "access-control-allow-origin" not in own.headers
    assert "script-src 'self'" in own.headers["content-security-policy"]


def test_it_listens_on_loopback_alone(ui):
    import psutil

    listening = [c.laddr.ip for c in psutil.Process(ui.process.pid).net_connections() if c.status == "LISTEN"]
    assert listening == ["127.0.0.1"]


def test_no_path_leads_out_of_the_folders(ui, folder):
    assert ui.get("/planner/index.html").text == "<h1>planner</h1>"
    ups = ["..", "%2e%2e", "%2E%2E", "..%2f..", "%2e%2e%2f%2e%2e", "..%5c..", "%252e%252e", "....//"]
    paths = [f"/planner/{up}/{up}/secret.txt" for up in ups]
    paths += [f"/planner/{up}/secret.txt" for up in ups] + [f"/planner/{quote(str(folder / 'secret.txt'), safe='')}"]
    paths += [f"/planner/{folder}/secret.txt", "/planner/leak.txt", "/planner/%00", f"/planner/{'a' * 5000}"]
    paths += [f"/runs/{up}/events" for up in ups] + [f"/runs/{quote('../secret.txt', safe='')}/report"]
    paths += [f"/ui/{up}%2fserver.py" for up in ups] + ["/ui/../server.py", "/ui/ui.css%00", "/runs/%ff%fe"]
    for path in paths:
        answer = ui.get(path)
        assert answer.status in (404, 400), (path, answer.status)
        assert SECRET not in answer.text and "Starlette" not in answer.text, path


def test_links_pipes_and_devices_are_not_read(tmp_path):
    secret = tmp_path / "secret.jsonl"
    secret.write_text(json.dumps({"step": 1, "loss": 4242.0}) + "\n")
    write_run(tmp_path / "elsewhere" / "private")
    runs = tmp_path / "runs"
    write_run(runs / "good")
    (runs / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("points", "pipe", "device"):
        write_run(runs / name, without=("metrics.jsonl",))
    (runs / "points" / "metrics.jsonl").symlink_to(secret)
    os.mkfifo(runs / "pipe" / "metrics.jsonl")
    (runs / "device" / "metrics.jsonl").mkdir()
    found = {run.name: run for run in find_runs(runs).runs}
    assert set(found) == {"good", "points", "pipe", "device"}
    assert not found["good"].problem
    assert "symbolic link" in found["points"].problem
    assert "plain file" in found["pipe"].problem and "plain file" in found["device"].problem
    with server(runs) as ui:
        for name in ("points", "pipe", "device"):
            key = found[name].key
            assert ui.get(f"/runs/{key}/report").status == 422
            assert ui.get(f"/runs/{key}/events").status == 403
            assert "is not read" in ui.get(f"/runs/{key}").text
    with pytest.raises(OSError, match="symbolic links"):
        MetricsTail(runs / "points" / "metrics.jsonl").read()


def test_a_run_of_another_user_is_named_and_not_read(folder):
    as_root = os.getuid() == 0
    if as_root and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, since root reads everything")
    mine = write_run(folder / "runs" / "private")
    half = write_run(folder / "runs" / "half")
    for private in (mine, half / "job.json"):
        if as_root:
            os.chown(private, NOBODY, NOBODY)
        private.chmod(0o700 if as_root else 0)
    try:
        with server(folder / "runs", before=PLAIN_ROOT if as_root else ()) as ui:
            text = ui.get("/").text
            assert text.count("Permission denied") == 2 and "good" in text
            assert set(ui.keys()) == {"good", "group/deeper"}
            for run in find_runs(folder / "runs").runs:
                if run.name in ("private", "half"):
                    assert ui.get(f"/runs/{run.key}/report").status == 422
                    assert ui.get(f"/runs/{run.key}/events").status == 403
    finally:
        mine.chmod(0o755)
        shutil.rmtree(mine)
        shutil.rmtree(half)


def test_hostile_names_and_contents_are_only_text(tmp_path):
    names = [
        EVIL.replace("/", "\u2215"),
        "two\nlines",
        "..hidden",
        "' onfocus='x",
        "{{ 7 * 7 }}",
        "\u202egnp.exe",
        "%2e%2e",
    ]
    for name in names:
        write_run(tmp_path / name, steps=3)
    bad = tmp_path / os.fsdecode(b"no-utf8-\xff")
    write_run(bad, steps=3)
    (bad / "report.html").write_text(f"<title>old</title>{EVIL}")
    job = json.loads((bad / "job.json").read_text())
    job["config"]["data"] = {"path": EVIL, "lone": "\ud800"}
    (bad / "job.json").write_text(json.dumps(job))
    with server(tmp_path) as ui:
        page = ui.get("/").text
        assert "<script>alert" not in page and page.count("<script") == 1
        assert "two\\nlines" in page and "\\u202egnp" in page and "{{ 7 * 7 }}" in page and "no-utf8-\ufffd" in page
        assert "' onfocus" not in page
        keys = ui.keys()
        assert len(keys) == len(names) + 1
        for key in keys.values():
            shown, report = ui.get(f"/runs/{key}"), ui.get(f"/runs/{key}/report")
            assert shown.status == 200 and shown.text.count("<script") == 1
            assert (
                report.status == 200
                and "alert("
                not in report.text.replace("&lt;script&gt;alert(", "")
                .replace("\\u003cscript\\u003ealert(", "")
                .split("plotly.js v")[0]
            )
            assert "sandbox allow-scripts" in report.headers["content-security-policy"]
            assert "<title>old</title>" not in report.text, "a file of the folder is never sent"
        several = ui.get("/compare?" + "&".join(f"run={key}" for key in [*keys.values()][:4]))
        assert several.status == 200 and several.text.count("<script") == 1 and "<script>alert" not in several.text
        assert ui.get("/compare?run=nothing&run=../..").status == 200


def events(ui: Server, key: str, until: str, *, seconds: float = 20.0) -> str:
    """What a stream says until ``until`` is in it."""
    with ui.connect() as found:
        found.settimeout(seconds)
        found.sendall(ui.request(f"/runs/{key}/events"))
        text, deadline = "", time.monotonic() + seconds
        while until not in text:
            assert time.monotonic() < deadline, text[-500:]
            chunk = found.recv(2**20).decode(errors="replace")
            assert chunk, text[-500:]
            text += chunk
        return text


def test_a_metrics_file_that_is_broken_half_written_replaced_or_huge(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\nno json\n[1]\n{"step": "x"}\n' + "[" * 9000 + '\n{"step": 2, "lo')
    tail = MetricsTail(path)
    assert [(row["step"], row["loss"]) for row in tail.read()] == [(1, 2.5)]
    assert tail.bad_lines == 4
    with path.open("a") as more:
        more.write('ss": NaN}\n{"step": 3, "loss": ' + "9" * 400 + "}\n")
    assert [(row["step"], row["loss"]) for row in tail.read()] == [(2, None), (3, None)]
    with path.open("ab") as more:  # a line without an end is not kept in memory
        for _ in range(40):
            more.write(b"x" * live_metrics.READ_BYTES)
    while tail._offset < path.stat().st_size:
        assert tail.read() == [] and len(tail._rest) <= live_metrics.LINE_BYTES
    with path.open("ab") as more:
        more.write(b'\n{"step": 4, "loss": 1.0}\n')
    assert [row["step"] for row in tail.read()] == [4] and tail.bad_lines == 5
    new = tmp_path / "new"
    new.write_text('{"step": 1, "loss": 3.0}\n')
    new.replace(path)
    assert [row["loss"] for row in tail.read()] == [3.0] and tail.restarted
    with path.open("w") as huge:
        huge.truncate(2**33)
        huge.seek(2**33)
        huge.write('\n{"step": 7, "loss": 7.0}\n')
    rows, tail = [], MetricsTail(path)
    while tail._offset < path.stat().st_size:
        rows += tail.read()
    assert [row["step"] for row in rows] == [7]
    assert tail._offset - tail.skipped_bytes == live_metrics.TAIL_BYTES
    assert run_list.too_large(tmp_path).startswith("metrics.jsonl has 8.00 GiB")


def test_live_metrics_follow_a_run_that_is_written(tmp_path):
    run = write_run(tmp_path / "run", without=("summary.json", "metrics.jsonl"))
    (run / "metrics.jsonl").write_text("")
    (run / "report.json.tmp").write_text("{")
    (run / "summary.json").write_text('{"schema": 1, "ste')  # a report, and a summary, that are being written
    huge = write_run(tmp_path / "huge", without=("metrics.jsonl",))
    with (huge / "metrics.jsonl").open("w") as file:
        file.truncate(2**33)
    with server(tmp_path) as ui:
        keys = ui.keys()
        assert ui.get(f"/runs/{keys['run']}/report").status == 200
        assert b"8.00 GiB" in ui.get(f"/runs/{keys['huge']}/report").body
        assert b"8.00 GiB" in ui.get(f"/compare?run={keys['huge']}&run={keys['run']}").body
        assert "only the last 1 MiB" in events(ui, keys["huge"], "only the last")
        with ui.connect() as found:
            found.sendall(ui.request(f"/runs/{keys['run']}/events"))
            said = ""
            for line in metrics(3):
                with (run / "metrics.jsonl").open("a") as log:
                    log.write(json.dumps(line) + "\n")
                while f"[[{float(line['step'])}" not in said:
                    said += found.recv(2**16).decode()
        assert "text/event-stream" in said and said.count("event: rows") == 3


def test_a_thousand_readers_are_bounded_and_leave_nothing(ui):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < READERS + 200:
        pytest.skip(f"needs {READERS + 200} open files, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, READERS + 200), hard))
    key = ui.keys()["good"]
    try:
        storm(ui, key)  # what Python keeps for the next time is there from now on
        time.sleep(2)
        memory, descriptors = ui.memory(), ui.descriptors()
        for _ in range(2):
            statuses = storm(ui, key)
            assert statuses.count(200) == MOST_STREAMS and statuses.count(503) == READERS - MOST_STREAMS
        deadline = time.monotonic() + 20
        while ui.descriptors() > descriptors and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ui.descriptors() <= descriptors
        assert ui.memory() - memory < 16 * 2**20
        assert "event: rows" in events(ui, key, "event: rows"), "there is room again"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def storm(ui: Server, key: str) -> list[int]:
    """Open a thousand streams at once; their statuses. Pages are served meanwhile."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(READERS):
            found = ui.connect()
            found.sendall(ui.request(f"/runs/{key}/events", connection="keep-alive"))
            sockets.append(found)
        statuses = [int(found.recv(12).split()[1]) for found in sockets]
        assert ui.get("/").status == 200
        return statuses
    finally:
        for found in sockets:
            found.close()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and status_of_stream(ui, key) == 503:
            time.sleep(0.1)


def status_of_stream(ui: Server, key: str) -> int:
    with ui.connect() as found:
        found.sendall(ui.request(f"/runs/{key}/events"))
        return int(found.recv(12).split()[1])


def test_links_history_and_the_missing_planner(tmp_path):
    links = write_links(tmp_path)
    with server(tmp_path / "none", "--calibration", str(links), "--site", str(tmp_path / "no-site")) as ui:
        assert "no run in this folder" in ui.get("/").text
        page = ui.get("/machine").text
        assert "all_reduce" in page and "processor" in page and "1.1" in page
        assert "make site" in ui.get("/planner/").text
        assert ui.get("/planner/index.html").status == 404
        links.write_text("no calibration")
        assert "is no TOML" in ui.get("/machine").text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_while_a_stream_is_open(tmp_path, number):
    write_run(tmp_path / "run")
    with server(tmp_path) as ui:
        key = ui.keys()["run"]
        with ui.connect() as found:
            found.sendall(ui.request(f"/runs/{key}/events"))
            assert b"200" in found.recv(100)
            code, err = ui.stop(number)
    assert code == (0 if number == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in err and "ERROR" not in err
    assert ("Stopped." in err) == (number == signal.SIGINT)


def test_wrong_options_are_told_together(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    wrong = ["ui", "--no-browser", "--runs", str(file), "--calibration", str(tmp_path / "none.toml")]
    told = shardwise(*wrong, exit_code=2).stderr
    assert "2 problems" in told and "is not a folder" in told and "bench comm" in told
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = shardwise("ui", "--no-browser", "--port", str(port), exit_code=3).stderr
        assert f"--port {port} cannot be used" in told and "Traceback" not in told
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    told = shardwise("ui", "--no-browser", exit_code=2).stderr
    assert told == "shardwise: shardwise ui needs uvicorn: pip install 'shardwise[ui]'\n"


def test_the_sessions_of_the_page(tmp_path):
    page = (ROOT / "docs" / "ui.md").read_text()
    sessions = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", page)
    assert len(sessions) == 2
    (tmp_path / "runs").mkdir()
    for command, expected in sessions:
        _, *words = command.split()
        started = subprocess.Popen(
            [sys.executable, "-m", "shardwise", *words, "--port", "0"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert started.stdout is not None
            said = "".join(started.stdout.readline() for _ in expected.splitlines())
            started.send_signal(signal.SIGINT)
            rest, _ = started.communicate(timeout=20)
        finally:
            started.kill()
        assert re.sub(r":\d+/\?token=[\w-]+", ":8765/?token=...", said) == expected
        assert (rest, started.returncode) == ("Stopped.\n", 0)


def test_states_of_runs(tmp_path):
    write_run(tmp_path / "done")
    resumed = write_run(tmp_path / "resumed")
    with (resumed / "metrics.jsonl").open("a") as log:
        log.write('{"step": 121, "loss": 3.0}\n{"step": 122, "lo')
    killed = write_run(tmp_path / "killed", without=("summary.json",))
    os.utime(killed / "metrics.jsonl", (1.0e9, 1.0e9))
    half = write_run(tmp_path / "half")
    (half / "summary.json").write_text('{"steps": 120')
    write_observation(tmp_path / "loops" / "seen")
    states = {run.name: run.state for run in find_runs(tmp_path).runs}
    assert states == {
        "done": "finished",
        "resumed": "live",
        "killed": "unfinished",
        "half": "live",
        "loops/seen": "observed",
    }


def test_observed_loops_are_listed_beside_runs(tmp_path):
    write_run(tmp_path / "own")
    write_observation(tmp_path / "seen")
    write_observation(tmp_path / "broken", "{}")
    write_observation(tmp_path / "elsewhere")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "observed.json").symlink_to(tmp_path / "elsewhere" / "observed.json")
    with server(tmp_path) as ui:
        keys = ui.keys()
        assert set(keys) == {"own", "seen", "broken", "elsewhere"}
        page = ui.get(f"/runs/{keys['seen']}").text
        assert "observed" in page and "Live metrics" not in page
        report = ui.get(f"/runs/{keys['seen']}/report").text
        assert "the first 7 steps of a loop were observed" in report.lower()
        assert "Rank 1 is slower than the others" in report and "diagnosis of slow link" in report
        assert "planned FSDP2" not in report and '<td data-label="planned">FSDP2' in report
        assert ui.get(f"/runs/{keys['broken']}/report").status == 422
        table = ui.get(f"/compare?run={keys['own']}&run={keys['seen']}").text
        assert "observed" in table and "80.0 ms" in table
        assert "symbolic link" in ui.get("/").text


def write_observation(folder: Path, text: str = "") -> None:
    """Write what `shardwise.observe` does of two ranks of a loop, the second one of which is late."""
    folder.mkdir(parents=True)
    (folder / "observed.json").write_text(text or observation().model_dump_json())


def observation() -> ObservedLoop:
    late, waits = {"other": 0.04}, {"exposed_dp": 0.04}
    usual = {"data": 0.0, "forward": 0.015, "backward": 0.02, "optimizer": 0.005, "other": 0.0, "exposed_dp": 0.0}
    rows = [[LoopTimes(step_s=0.08, own_s=0, operators=9, parts=usual | one)] * 5 for one in (waits, late)]
    facts = [
        LoopFacts(rank=rank, world_size=2, wrapper="DDP", parameters=(), times=row[0]) for rank, row in enumerate(rows)
    ]
    line = Line(name="wrapper", planned="FSDP2", found="DDP", ok=False)
    return observed_loop(Receipt(title="observed loop", lines=(line,)), facts, LaterSteps(rows, None))
