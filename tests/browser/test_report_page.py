"""The page of a run in a real browser: drawn, quiet, readable on a phone and a desktop, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.report.html import page as html
from shardwise.report.html.page import make_report
from shardwise.report.html.sample_files import read_links, read_scaling
from tests.browser.pages import SIZES, browser, why_not
from tests.reports import write_links, write_run, write_scaling
from tests.unit.test_report import evil_run

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
CHARTS = 8
# elements whose box ends outside of the page and that no scrolling box of their own holds
OUTSIDE = """
return [...document.querySelectorAll("body *")].filter((e) =>
  e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, nav, svg, details:not([open])")
).map((e) => e.tagName + "." + e.className);
"""
# texts of a chart that stick out of it, or lie over each other on one axis
CUT = """
return [...document.querySelectorAll("[data-figure]")].flatMap((box) => {
  const frame = box.getBoundingClientRect();
  return [...box.querySelectorAll("text")].filter((text) => {
    const place = text.getBoundingClientRect();
    return place.width && (place.left < frame.left - 2 || place.right > frame.right + 2);
  }).map((text) => box.dataset.figure + ": " + text.textContent);
});
"""
COLOURS = """
const box = document.querySelector("[data-figure=loss]");
return [getComputedStyle(document.body).backgroundColor, getComputedStyle(box.querySelector("path.js-line")).stroke,
        getComputedStyle(box.querySelector(".xtick text")).fill];
"""


@pytest.fixture
def page(tmp_path) -> Path:
    folder = write_run(tmp_path / "run")
    return make_report(folder, scaling=read_scaling(write_scaling(tmp_path)), links=read_links(write_links(tmp_path)))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_drawn_quiet_and_as_wide_as_the_screen(page, tmp_path, size, theme):
    with browser(size, theme) as chromium:
        chromium.open(page)
        assert chromium.console() == []
        assert chromium.requests() in ([page.as_uri()], [page.as_uri(), "data:,"])
        assert chromium.run("return document.querySelectorAll('[data-figure] svg.main-svg').length") >= CHARTS
        assert chromium.run("return document.documentElement.scrollWidth") == SIZES[size][0]
        assert chromium.run(OUTSIDE) == []
        assert chromium.run(CUT) == []
        assert chromium.run("return document.documentElement.dataset.theme") == theme
        small = (
            "return [...document.querySelectorAll('p, td, li, dd')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(chromium.run(small)) >= 13
        shot = chromium.screenshot(tmp_path / "page.png")
        assert shot.stat().st_size > 50_000


def test_the_theme_follows_the_system_and_the_button(page):
    with browser(theme="light") as chromium:
        chromium.open(page)
        light = chromium.run(COLOURS)
        chromium.scheme("dark")
        chromium.wait("return document.documentElement.dataset.theme === 'dark'")
        dark = chromium.run(COLOURS)
        assert all(one != other for one, other in zip(light, dark, strict=True))
        button = "const b = document.getElementById('theme'); b.click(); return b.textContent"
        assert chromium.run(button) == "dark page"
        assert chromium.run(COLOURS) == light
        assert chromium.console() == []


def test_a_hostile_run_is_only_text(tmp_path):
    page = make_report(evil_run(tmp_path / "run"))
    with browser() as chromium:
        chromium.open(page)
        assert chromium.run("return document.querySelectorAll('img, body script:not([type])').length") == 2  # ours
        assert "<script>alert" in chromium.run("return document.body.innerText")
        assert chromium.console() == []
        assert len(chromium.requests()) <= 2


def test_the_policy_forbids_the_network(page):
    """What somebody adds to the page later is refused by the browser itself."""
    with browser() as chromium:
        chromium.open(page)
        script = (
            "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('went'), () => done('refused'))"
        )
        assert chromium.driver.execute_async_script(script) == "refused"
        assert any("Content Security Policy" in line for line in chromium.console())


def test_a_killed_run_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run", without=("summary.json", "timing.json", "findings.json"), steps=17)
    page = make_report(folder)
    with browser("phone") as chromium:
        chromium.open(page)
        assert chromium.console() == []
        assert chromium.run("return document.querySelector('.badge').textContent") == "not finished"
        assert chromium.run(OUTSIDE) == []


def test_without_plotly_there_are_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "plotly_js", lambda: None)
    page = make_report(write_run(tmp_path / "run"))
    with browser("phone", "dark") as chromium:
        chromium.open(page)
        assert chromium.console() == []
        assert chromium.run("return document.querySelectorAll('details[open] table').length") >= 4
        assert chromium.run("return document.documentElement.dataset.theme") == "dark"
