"""The report of a run: what is read, what is said to be missing, what is written, and that nothing breaks the page."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import UndefinedError

import shardwise
from shardwise.diagnosis.finding import Finding
from shardwise.errors import MachineError, UserError
from shardwise.measure.comm_facts import bus_factor
from shardwise.measure.gpu.nvml import GpuMachine, GpuState
from shardwise.measure.step_time.timing import BETWEEN, PHASES, PhaseStats
from shardwise.report.html import figures as html_figures
from shardwise.report.html import page as html
from shardwise.report.html.page import make_report, render, write_report
from shardwise.report.html.run_folder import read_run, series_of
from shardwise.report.html.run_record import BenchSamples, RunRecord
from shardwise.report.html.sample_files import read_links, read_scaling, together
from shardwise.report.html.text import milliseconds, percent, rendered, sampled
from shardwise.report.sample_preview import MarkedText, html_page
from shardwise.run import run_summary
from shardwise.run.rank_main import finite
from shardwise.run.run_summary import environment_facts, loss_text, write_environment
from shardwise.units import count_text
from tests.reports import FINDINGS, MEANS, RANKS, SLOW_S, USE, metrics, timing, write_links, write_run, write_scaling

FILES = ("summary.json", "job.json", "timing.json", "findings.json", "environment.json", "metrics.jsonl")
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & "quoted" \''


class Page(HTMLParser):
    """The text of a page, its elements with their attributes, and what its scripts hold."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self._inside.append(tag)

    def handle_endtag(self, tag):
        assert self._inside and self._inside.pop() == tag, f"</{tag}> closes nothing that is open"

    def handle_data(self, data):
        inside = self._inside[-1] if self._inside else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def charts(self) -> set[str]:
        return {attrs["data-figure"] or "" for _, attrs in self.elements if "data-figure" in attrs}


def page_of(folder: Path, **options: BenchSamples | None) -> Page:
    return Page(make_report(folder, **options).read_text())


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run")


def test_figures_are_those_of_the_run(run):
    record = read_run(run)
    f = record.figures
    lines = [line for line in metrics() if "loss" in line]
    assert (record.state, f.steps, f.steps_planned) == ("finished", 120, 120)
    assert record.missing == ()
    assert (f.first_loss, f.last_loss) == (lines[0]["loss"], lines[-1]["loss"])
    assert f.tokens_per_s == timing().tokens_per_s and f.step_s == timing().median_step_s
    assert f.mfu == USE.mfu and f.step_predicted_s == 0.265
    seconds = sum(line["step_time_s"] for line in lines)
    assert f.step_seconds == pytest.approx(seconds) and f.pause_seconds == pytest.approx(3 * 0.21)
    assert f.device_hours == pytest.approx((seconds + 0.63) * RANKS / 3600)
    assert f.cost == pytest.approx(f.device_hours * 2.0)
    assert f.peak_bytes == max(record.memory.peaks.values())
    assert record.series.parts_s.keys() == MEANS.keys()
    assert [(save.step, save.stall_s) for save in record.saves] == [(40, 0.21), (80, 0.21), (120, 0.21)]
    assert record.findings == FINDINGS


def test_the_page_says_it_all(run):
    page = page_of(run)
    for words in (
        "Rank 2 is slower than the others, and all of them wait for it.",
        "49.6 ms of a step (16 %) · $1.26 an hour · rank 2",
        "Fix: look at the clocks of its GPU",
        "predicted 265 ms",
        "global batch 32 = micro batch 4 × accumulation 2 × dp 4",
        "checked claims hold: 3 of 3",
        "The highest peak is 43 % of the 80.00 GiB of a device.",
        "4 × A100-SXM-80GB",
        "Rank 2 came last most often: in 94 % of the steps.",
        "recompute (nothing is computed again under recompute none)",
    ):
        assert words in page.text, words
    assert page.charts == {"loss", "heldout", "throughput", "parts", "ranks", "memory"}
    assert "Missing from this report" not in page.text


def test_verdict_comes_first(run):
    text = page_of(run).text
    places = [text.index(title) for title in ("costs time", "Key figures", "Training loss", "Peak of live bytes")]
    assert places == sorted(places)


def test_page_is_made_from_the_record_alone(run, tmp_path):
    page = make_report(run)
    document = (run / "report.json").read_text()
    for file in FILES:
        (run / file).unlink()
    assert render(RunRecord.model_validate_json(document)) == page.read_text()
    assert json.loads(document)["schema"] == 1


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named_and_the_rest_is_shown(tmp_path, file):
    folder = write_run(tmp_path / "run", without=(file,))
    page = page_of(folder)
    assert file in page.text and "Missing from this report" in page.text
    others = {"timing.json": "ranks", "metrics.jsonl": "loss"}
    assert others.get(file) not in page.charts
    assert "Plan" in page.text


@pytest.mark.parametrize("file", [file for file in FILES if file != "metrics.jsonl"])
@pytest.mark.parametrize("content", ['{"half": ', "[1, 2", '"text"', '{"steps": NaN}', "[[]]", "3"])
def test_a_damaged_file_is_said_and_never_fatal(tmp_path, file, content):
    folder = write_run(tmp_path / "run")
    (folder / file).write_text(content)
    make_report(folder)


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 99, "loss": "x", "tokens": "y"}',
        b'{"step": 99, "loss": 1.0, "tokens": 1.5, "checkpoint_bytes": 0.5}',
        b'{"step": 99, "loss": 1%s}' % (b"0" * 400),
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_damaged_metrics_are_never_fatal(tmp_path, line):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    make_report(folder)
    (folder / "job.json").write_text("[" * 100_000)
    assert any("job.json cannot be read" in problem for problem in read_run(folder).missing)


def test_a_file_of_another_form_is_said(tmp_path):
    folder = write_run(tmp_path / "run", timing_json={"steps": 3}, findings_json=[{"kind": "ghost"}])
    record = read_run(folder)
    assert record.timing is None and record.findings is None
    assert any(line.startswith("timing.json is not understood (warm_up: ") for line in record.missing)
    assert any(line.startswith("findings.json is not understood (0.kind: ") for line in record.missing)


def test_a_wrong_part_of_a_file_costs_only_that_part(run):
    job = json.loads((run / "job.json").read_text())
    job["estimate"] = {"phases": 3}
    job["cluster"] = "8xA100"
    (run / "job.json").write_text(json.dumps(job))
    summary = json.loads((run / "summary.json").read_text())
    summary["memory"] = {"parameters": "many", "gradients": 5, "peaks": {"allocated": {"forward": None, "backward": 7}}}
    (run / "summary.json").write_text(json.dumps(summary))
    record = read_run(run)
    assert record.plan is not None and record.config and record.figures.step_predicted_s == 0.265
    assert record.memory.predicted is None and record.memory.device_memory_bytes is None and record.figures.cost is None
    assert (record.memory.at_rest, record.memory.peaks) == ({"gradients": 5}, {"backward": 7})
    (said,) = record.missing
    assert said.startswith("job.json is not understood (") and said.endswith(": the predicted memory is left out")
    assert said in page_of(run).text


def test_a_number_too_large_is_unknown(run):
    text = (run / "job.json").read_text().replace('"price_per_device_hour": 2.0', '"price_per_device_hour": 1e999')
    (run / "job.json").write_text(text)
    assert "1e999" in text and "cost unknown no price known" in page_of(run).text


def test_a_killed_run_says_how_far_it_came(tmp_path):
    folder = write_run(
        tmp_path / "run", without=("summary.json", "timing.json", "findings.json", "environment.json"), steps=17
    )
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 18, "lo')
    record = read_run(folder)
    assert (record.state, record.figures.steps) == ("unfinished", 17)
    page = page_of(folder)
    assert "It stopped before its end: step 17 of 120 is the last one logged." in page.text
    assert "No verdict" in page.text and "MFU unknown" in page.text
    assert {"loss", "parts", "throughput"} <= page.charts


def test_a_run_that_is_held_is_running(tmp_path):
    import fcntl

    folder = write_run(tmp_path / "run", without=("summary.json",), steps=17)
    with (folder / ".lock").open("w") as lock:
        assert read_run(folder).state == "unfinished"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
        assert read_run(folder, ended=True).state == "unfinished", "the run itself asks at its end"


def test_an_older_summary_is_not_taken_for_the_whole(tmp_path):
    folder = write_run(tmp_path / "run")
    job = json.loads((folder / "job.json").read_text())
    job["config"]["train"]["steps"] = 200
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(150)))
    record = read_run(folder)
    assert (record.state, record.through_step, record.figures.steps) == ("unfinished", 120, 150)
    assert "ends at step 120, and the run went on to step 150" in record.missing[-1]


def test_what_is_no_number_is_null(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = [{**line, "loss": float("nan")} if line.get("loss") else line for line in metrics(5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_report(folder)
    document = json.loads((folder / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert document["figures"]["last_loss"] is None and set(document["series"]["loss"]) == {None}
    job = json.loads((folder / "job.json").read_text())
    job["cluster"]["price_per_device_hour"] = float("nan")
    (folder / "job.json").write_text(json.dumps(job))
    page = page_of(folder)
    assert "loss unknown" in page.text and "cost unknown no price known" in page.text


def test_a_timing_that_is_no_number_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run", timing_json={**timing().model_dump(mode="json"), "step_s": float("nan")})
    assert "timing.json is not understood (step_s: " in page_of(folder).text


def test_a_claim_that_is_false_is_shown_as_false(tmp_path):
    summary = json.loads((write_run(tmp_path / "run") / "summary.json").read_text())
    summary["receipts"]["effects"]["lines"][0] |= {"found": "bfloat16", "ok": False}
    summary["receipts"]["fit"] = None
    page = page_of(write_run(tmp_path / "run", summary_json=summary))
    assert "effects: 1 of 3 checked claims are false" in page.text and "✗ parameter dtype" in page.text
    assert "fit Not checked: the run ended before it could be." in page.text


def test_a_run_from_before_there_were_parts(tmp_path):
    folder = write_run(tmp_path / "run", without=("timing.json",))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(parts=False)))
    record = read_run(folder)
    assert record.series.parts_s == {}
    times = sorted(line["step_time_s"] for line in metrics() if line["step"] > 1 and "loss" in line)
    assert record.figures.step_s == pytest.approx(times[len(times) // 2])
    assert "parts" not in page_of(folder).charts


def test_no_run_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        make_report(tmp_path / "none")
    with pytest.raises(UserError, match=r"contains no run: neither metrics\.jsonl nor summary\.json nor job\.json"):
        make_report(tmp_path)


def test_a_report_never_costs_the_run_anything(run, tmp_path, monkeypatch):
    said: list[str] = []
    assert write_report(run, said.append) == run / "report.html" and not said
    assert write_report(tmp_path / "none", said.append) is None
    assert "no report: " in said.pop()
    (run / "report.json").unlink()
    (run / "report.json").mkdir()
    assert write_report(run, said.append) is None
    assert "cannot be written" in said.pop()
    monkeypatch.setattr(html, "read_folder", lambda *_, **__: 1 / 0)
    assert write_report(run, said.append) is None
    assert "ZeroDivisionError" in said.pop()


def test_output_is_an_html_file(run, tmp_path):
    page = make_report(run, output=tmp_path / "shown" / "page.html")
    assert page.exists() and (tmp_path / "shown" / "page.json").exists() and not (run / "report.html").exists()
    with pytest.raises(UserError, match=r"must end in \.html"):
        make_report(run, output=tmp_path / "page.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        make_report(run, output=tmp_path / "file" / "page.html")


def evil_run(folder: Path) -> Path:
    """A run whose every text is hostile."""
    findings = [FINDINGS[0].model_copy(update={"text": EVIL, "evidence": (EVIL,), "fix": EVIL}).model_dump(mode="json")]
    write_run(folder, findings_json=findings, environment_json={EVIL: EVIL})
    job = json.loads((folder / "job.json").read_text())
    job["config"]["data"] = {"path": EVIL, EVIL: [EVIL]}
    job["plan"]["reason"] = EVIL
    (folder / "job.json").write_text(json.dumps(job))
    summary = json.loads((folder / "summary.json").read_text())
    summary["receipts"][EVIL] = {"lines": [{"name": EVIL, "planned": EVIL, "found": EVIL, "ok": False}]}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [{**line, "parts": {**line["parts"], EVIL: 0.1}} if "parts" in line else line for line in metrics()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = timing()
    parts = {**told.parts, EVIL: told.parts["forward"]}
    ranks = tuple({**rank, EVIL: 0.1} for rank in told.ranks)
    evil = told.model_copy(update={"parts": parts, "ranks": ranks, "unmeasured": {"recompute": EVIL}})
    (folder / "timing.json").write_text(evil.model_dump_json())
    return folder


def test_every_text_is_escaped(tmp_path):
    folder = evil_run(tmp_path / "<i>run")
    samples = BenchSamples(source=EVIL, columns=(EVIL, EVIL), rows=((EVIL, EVIL),), notes=(EVIL,))
    page = page_of(folder, scaling=samples, links=samples)
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert "img" not in [tag for tag, _ in page.elements]
    assert page.text.count('<script>alert("x")</script>') >= 10, "it is shown as text"
    assert not any("onerror" in key for _, attrs in page.elements for key in attrs)


def test_templates_trust_only_files_of_the_package():
    texts = "".join(path.read_text() for path in (html.ASSETS.parent / "templates").iterdir())
    assert [name.strip() for name in re.findall(r"([^{|]*)\|\s*safe\b", texts)] == ["css", "library", "js"]
    assert len(re.findall(r"\bsafe\b", texts)) == 3 and "autoescape" not in texts


def test_a_fact_that_is_missing_is_no_empty_text(run):
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        rendered("sample_preview.html.j2", facts=(), roles=(), documents=())


def test_a_hostile_sample_is_text():
    part = MarkedText(EVIL, '"><b>', True)
    page = Page(html_page(EVIL, [EVIL], [(EVIL, [part])]))
    assert page.text.count('<script>alert("x")</script>') == 5, "title, heading, fact, name and text"
    assert not {"script", "img", "b"} & {tag for tag, _ in page.elements}
    assert ("mark", {"class": '"><b>'}) in page.elements


def test_a_sample_keeps_its_spaces_and_says_what_has_a_loss():
    parts = [
        MarkedText("a  b\n", "user", False),
        MarkedText("  c", "assistant", True),
        MarkedText("d", "user", False, True),
    ]
    page = html_page("t", [], [("document 0", parts)])
    assert (
        '<pre><span class="user">a  b\n</span><mark class="assistant">  c</mark><del class="user">d</del></pre>' in page
    )


def test_the_package_contains_every_file_it_reads():
    root = Path(shardwise.__file__).parent
    globs = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in globs["shardwise"] for path in root.glob(pattern)}
    others = (path for path in root.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
    assert set(others) == packed


def test_names_in_charts_are_text(tmp_path):
    figures = html_figures.all_figures(read_run(evil_run(tmp_path / "run")))
    written = re.sub(r"</?extra>", "", json.dumps([figures[name]["data"] for name in ("parts", "ranks")]))
    assert "&lt;script&gt;" in written and "<" not in written


def test_nothing_is_loaded_from_anywhere(run):
    page = page_of(run)
    links = [attrs[key] for _, attrs in page.elements for key in ("src", "href", "action") if key in attrs]
    assert links and all(link and link.startswith(("#", "data:,")) for link in links)
    policy = next(attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'") and "http" not in policy
    ours = "".join(page.scripts[:1] + page.scripts[-1:]) + (html.ASSETS / "report.css").read_text()
    assert not re.search(r"https?:|//[a-z]|@import|fetch\(|XMLHttp|url\(", ours.replace("// ", ""))


def test_without_plotly_the_numbers_are_open(run, monkeypatch):
    drawn = page_of(run)
    assert not any("open" in attrs for tag, attrs in drawn.elements if tag == "details")
    monkeypatch.setattr(html, "plotly_js", lambda: None)
    page = page_of(run)
    assert "pip install 'shardwise[ui]'" in page.text and not page.charts
    assert sum("open" in attrs for tag, attrs in page.elements if tag == "details") >= 4
    assert (run / "report.html").stat().st_size < 200_000


def test_plotly_js_is_embedded_once_and_not_imported(run):
    code = (
        "import sys; from pathlib import Path; from shardwise.report.html.page import make_report;"
        "assert 'jinja2' not in sys.modules, 'only a page needs it';"
        f"make_report(Path({str(run)!r})); print(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"plotly", "torch", "matplotlib", "transformers"} & set(done.stdout.split())
    assert (run / "report.html").read_text().count("plotly.js v") == 1


def test_figures_are_what_plotly_takes(run, tmp_path):
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="needs plotly (the extra ui)")
    options = {"scaling": read_scaling(write_scaling(tmp_path)), "links": read_links(write_links(tmp_path))}
    figures = html_figures.all_figures(read_run(run, **options))
    assert set(figures) == {"loss", "heldout", "throughput", "parts", "ranks", "memory", "scaling", "links"}
    for name, figure in figures.items():
        text = re.sub(r'"var:[a-z0-9_-]+"', '"#123456"', json.dumps({k: figure[k] for k in ("data", "layout")}))
        drawn = graph_objects.Figure(json.loads(text))
        assert drawn.data, name


def themes() -> dict[str, dict[str, str]]:
    text = (html.ASSETS / "report.css").read_text()
    light, dark = re.findall(r":root(?:\[[^]]*])? \{(.*?)\}", text, re.S)[:2]
    return {
        name: dict(re.findall(r"--([a-z0-9_-]+): ([^;]+);", block))
        for name, block in {"light": light, "dark": dark}.items()
    }


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, of two colours #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_read(run, tmp_path, theme):
    colours = themes()[theme]
    figures = html_figures.all_figures(
        read_run(run, scaling=read_scaling(write_scaling(tmp_path)), links=read_links(write_links(tmp_path)))
    )
    used = set(re.findall(r'"var:([a-z0-9_-]+)"', json.dumps(figures)))
    used |= {html_figures.colour(part) for part in (*PHASES, *BETWEEN)}
    used |= set(re.findall(r"var\(--([a-z0-9_-]+)\)", (html.ASSETS / "report.css").read_text()))
    assert not used - colours.keys()
    pairs = [(text, ground) for text in ("ink", "soft", "accent", "good", "bad") for ground in ("page", "card")]
    pairs += [(tone, f"{tone}-bg") for tone in ("good", "warn", "bad")] + [("ink", "bad-bg"), ("ink", "warn-bg")]
    assert {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs if _weak(colours, pair, 4.5)} == {}
    lines = [("accent", "card"), *((f"c{i}", "card") for i in range(1, 7))]
    assert [pair for pair in lines if _weak(colours, pair, 3.0)] == []


def _weak(colours: dict[str, str], pair: tuple[str, str], least: float) -> bool:
    return contrast(colours[pair[0]], colours[pair[1]]) < least


def test_every_part_is_in_one_family():
    listed = [part for parts in html_figures.FAMILIES.values() for part in parts]
    assert sorted(listed) == sorted(PHASES)
    assert sum(seconds for _, seconds in html_figures.families(timing())) == pytest.approx(timing().step_s)


def test_rows_of_a_long_run_are_means():
    lines = [{"step": i, "loss": float(i), "tokens": i, "parts": {"forward": float(i)}} for i in range(1, 1001)]
    series = series_of(lines, rows=10)
    assert series.lines_per_row == 100 and series.step == tuple(range(100, 1001, 100))
    assert series.loss == tuple(50.5 + 100 * i for i in range(10)) == series.parts_s["forward"]
    assert series.tokens == series.step and series.grad_norm == (None,) * 10


def test_a_part_that_is_not_told_apart_is_no_zero(tmp_path):
    lines = [{"step": 1, "loss": 1.0, "parts": {"forward": 0.1, "recompute": None}}]
    assert series_of(lines).parts_s == {"forward": (0.1,)}


def test_one_slow_step_does_not_flatten_the_others(run):
    figure = html_figures.parts_figure(read_run(run).series)
    assert figure and figure["off_scale"].startswith("step 1 (") and "and" not in figure["off_scale"]
    assert figure["layout"]["yaxis"]["range"][1] < 1e3 * 1.5 * sum(MEANS.values())
    assert "Off the scale: step 1" in page_of(run).text


def test_of_many_ranks_the_extremes_are_drawn():
    told = timing()
    ranks = tuple({"forward": 0.1 + 0.001 * ((7 * i) % 64), "exposed_dp": 0.5} for i in range(64))
    shown = html_figures.shown_ranks(told.model_copy(update={"ranks": ranks}))
    by_work = sorted(range(64), key=lambda i: ranks[i]["forward"])
    assert shown == sorted(by_work[:4] + by_work[-12:])
    figure = html_figures.ranks_figure(told.model_copy(update={"ranks": ranks}))
    assert figure and figure["whose"].startswith("16 of 64 ranks")


def test_bars_of_ranks_are_their_steps(run):
    figure = html_figures.ranks_figure(timing())
    assert figure is not None
    length = [sum(bar["x"][rank] for bar in figure["data"]) for rank in range(RANKS)]
    assert length == pytest.approx([1e3 * sum(v for k, v in r.items() if k not in BETWEEN) for r in timing().ranks])
    forward = next(bar for bar in figure["data"] if bar["name"] == "forward")["x"]
    assert max(forward) - min(forward) == pytest.approx(1e3 * SLOW_S * 0.33)


def test_numbers_in_words():
    assert [milliseconds(v) for v in (None, 0, 0.00012, 0.0234, 0.61, 12.0)] == [
        "unknown",
        "0 ms",
        "0.12 ms",
        "23.4 ms",
        "610 ms",
        "12.0 s",
    ]
    assert [percent(v) for v in (None, 0, 0.0004, 0.034, 0.5)] == ["unknown", "0 %", "< 0.1 %", "3.4 %", "50 %"]
    assert sampled(3) == [0, 1, 2] and sampled(1000)[0] == 0 and sampled(1000)[-1] == 999 and len(sampled(1000)) == 12


def test_scaling_samples(tmp_path):
    found = read_scaling(write_scaling(tmp_path))
    measured, predicted, linear = found.curves
    assert linear.ideal and linear.x == (1.0, 32.0) and linear.y == (1000.0, 32000.0)
    assert measured.group == predicted.group != linear.group
    assert (measured.name, predicted.name) == ("weak, measured", "weak, predicted")
    assert measured.x == (1.0, 2.0) and measured.y == (1000.0, 1600.0)
    assert predicted.predicted and all(
        low < y < high for low, y, high in zip(predicted.low, predicted.y, predicted.high, strict=True)
    )
    assert found.rows[1][4].startswith("80 %") and "600 tokens/s (60 %)" in found.rows[1][6]


def test_link_samples(tmp_path):
    found = read_links(write_links(tmp_path))
    curve = next(curve for curve in found.curves if curve.name == "all_reduce")
    assert curve.y[-1] == pytest.approx(bus_factor("all_reduce", 2) * 2**24 / 0.016 / 1e9)
    assert all(a < b for a, b in pairwise(curve.x))
    assert found.rows[0][:4] == ("all_reduce", "dp_shard", "2", "50 µs")


def test_samples_that_are_none_are_all_said(tmp_path):
    (tmp_path / "no.json").write_text("[]")
    (tmp_path / "no.toml").write_text("a = ")
    with pytest.raises(UserError) as caught:
        together(lambda: read_scaling(tmp_path / "no.json"), lambda: read_links(tmp_path / "no.toml"))
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["--scaling", "--links"]
    (tmp_path / "other.json").write_text('{"schema": 1}')
    with pytest.raises(UserError, match=r"give the calibration file of that measurement: '.*other\.toml'"):
        read_links(tmp_path / "other.json")
    with pytest.raises(UserError, match=r"contains no samples of shardwise bench scaling \(subject: "):
        read_scaling(tmp_path / "other.json")


def test_environment_names_no_place(tmp_path):
    import socket

    write_environment(tmp_path)
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert facts == environment_facts() and {"Python", "torch", "shardwise", "CPU"} <= facts.keys()
    assert socket.gethostname() not in json.dumps(facts) and str(Path.home()) not in json.dumps(facts).replace(
        "/root", ""
    )


def test_environment_counts_the_gpus(monkeypatch):
    gpus = tuple(GpuState(index=index, name=name) for index, name in enumerate(("A100", "A100", "L4")))
    source = SimpleNamespace(read=lambda: GpuMachine(gpus=gpus, driver="580.65"))
    monkeypatch.setattr(run_summary, "NvmlSource", lambda: source)
    facts = environment_facts()
    assert (facts["GPU"], facts["driver"]) == ("2 × A100, 1 × L4", "580.65")


def test_the_command(run, tmp_path):
    command = [sys.executable, "-m", "shardwise", "report", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stderr
    record = RunRecord.model_validate_json(done.stdout.splitlines()[-1])
    assert record.to_json() == (run / "report.json").read_text().strip()
    done = subprocess.run([*command[:4], str(tmp_path / "none")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("shardwise: '")


def test_healthy_is_said_too(tmp_path):
    fine = Finding(kind="healthy", level="fine", text="Nothing to win: 96 % of a step is computing.")
    folder = write_run(tmp_path / "run", findings_json=[fine.model_dump(mode="json")])
    assert "healthy Nothing to win" in page_of(folder).text


def test_no_findings_are_no_praise(tmp_path):
    folder = write_run(tmp_path / "run", findings_json=[])
    assert "No verdict: 115 steps are too few to judge what this run loses time to." in page_of(folder).text


def test_the_last_line_of_a_run_is_json_whatever_its_loss():
    assert [finite(value) for value in (1.5, math.nan, math.inf, None)] == [1.5, None, None, None]
    assert loss_text({"loss": None}) == "loss unknown"
    assert loss_text({"loss": 1.5, "heldout_bits_per_byte": 2.0}) == "loss 1.5000, 2.000 held-out bits per byte"


def test_a_step_without_parts_is_no_zero_in_the_stack(run):
    """The first step has none: drawn as zero, the stack would rise from nothing, which no step did."""
    series = read_run(run).series
    holed = {part: (None, *column[1:]) for part, column in series.parts_s.items()}
    figure = html_figures.parts_figure(series.model_copy(update={"parts_s": holed}))
    assert figure is not None
    assert all(area["x"] == list(series.step[1:]) and None not in area["y"] for area in figure["data"])


def test_labels_stand_beside_their_lines_and_checkpoints_are_seen(run):
    figures = html_figures.all_figures(read_run(run))
    for name in ("loss", "throughput"):
        (label,) = figures[name]["layout"]["annotations"]
        assert (label["xref"], label["x"], label["xanchor"]) == ("paper", 1, "left")
        assert figures[name]["layout"]["margin"]["r"] >= 60
    marks = figures["throughput"]["data"][-1]
    assert marks["name"] == "checkpoint" and marks["marker"]["size"] >= 12 and marks["marker"]["line"]["width"]


def test_it_is_said_which_step_time_is_which(run):
    told = timing().model_copy(update={"between_s": {"checkpoint": 0.005, "evaluation": 0.0}})
    (run / "timing.json").write_text(told.model_dump_json())
    full = milliseconds(told.step_s + 0.005)
    text = page_of(run).text
    assert f"median step {milliseconds(told.median_step_s)}" in text
    assert (
        f"{milliseconds(told.median_step_s)} is the median (key figures), {milliseconds(told.step_s)} the average "
        f"(where it goes), {full} the average with the checkpoints and evaluations between steps (findings)"
    ) in text


def test_each_line_of_a_chart_is_named(run):
    text = page_of(run).text
    rate = count_text(timing().tokens_per_s)
    assert f"Dashed: their average after the warm-up, {rate}. Thin: the points; thick: their running median." in text
    assert "Training loss, 10.625 at first and 3.322 at last. Thin: the points; thick: their running median." in text


def test_a_run_of_samples_has_no_tokens_on_its_page(tmp_path):
    folder = write_run(tmp_path / "run", timing_json={**timing().model_dump(mode="json"), "tokens_per_s": None})
    lines = [
        {**line, "samples_per_s": 7.0, "labels": 9 * line["step"]} if "loss" in line else line for line in metrics()
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({k: v for k, v in line.items() if not k.startswith("tokens")}) + "\n" for line in lines)
    )
    page = page_of(folder)
    assert "Samples a second of all devices together. Dashed: their median, 7." in page.text
    assert "trained on 1.1 k labels in" in page.text and "throughput" in page.charts
    assert not re.search(r"tokens (a second|in|/s)|tokens/s", page.text)
    assert "nats" not in json.dumps(html_figures.all_figures(read_run(folder)))


def test_a_rank_without_a_core_is_told_beside_what_is_called_computing(run):
    waited = PhaseStats(mean_s=0.1, low_s=0.1, high_s=0.1, highest_rank=0)
    (run / "timing.json").write_text(timing().model_copy(update={"cpu_wait_s": waited}).model_dump_json())
    assert (
        "For 100 ms of it (32 %) an average rank was ready to run and had no core; this time counts as"
        in page_of(run).text
    )
    (run / "timing.json").write_text(timing().model_copy(update={"cpu_wait_s": None}).model_dump_json())
    assert "had no core" not in page_of(run).text


def test_the_memory_table_has_no_unknown_in_it(run):
    """What was not predicted, or not measured apart, is a dash with its meaning below; what is neither has no row."""
    job = json.loads((run / "job.json").read_text())
    job["estimate"] |= {"logits": None, "phases": [*job["estimate"]["phases"], {"name": "load", "allocated": 1}]}
    (run / "job.json").write_text(json.dumps(job))
    text = page_of(run).text
    table = text[text.index("bytes on the fullest rank") : text.index("Measured, too")]
    assert "unknown" not in table and "logits" not in table
    assert "peak in load 1 B –" in table and "–: not predicted, or not measured apart from the rest." in table


def test_a_loss_that_does_not_fall_is_not_called_lost_time(run):
    finding = FINDINGS[0].model_copy(update={"kind": "loss-rises", "text": "The loss rises."})
    (run / "findings.json").write_text(json.dumps([finding.model_dump(mode="json")]))
    assert "does not learn" in page_of(run).text and "costs time" not in page_of(run).text
