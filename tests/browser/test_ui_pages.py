"""The pages of the local server in a real browser: entered by token, quiet, readable at both widths, light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.pages import SIZES, browser, why_not
from tests.faults.test_ui import EVIL
from tests.reports import metrics, write_links, write_run
from tests.uis import Server, server

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
OUTSIDE = """
return [...document.querySelectorAll("body *")].filter((e) =>
  e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, svg, .skip")
).map((e) => e.tagName + "." + e.className);
"""
SMALL = "return Math.min(...[...document.querySelectorAll('p, td, th, dt, dd, svg text')]" + (
    ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
)


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("ui")
    runs = folder / "runs"
    write_run(runs / "baseline")
    write_run(runs / "warm-up" / "longer", steps=90)
    write_run(runs / EVIL.replace("/", "\u2215"), steps=30)
    write_run(runs / "live", without=("summary.json", "timing.json", "findings.json"), steps=40)
    write_run(runs / "broken")
    (runs / "broken" / "job.json").unlink()
    (runs / "broken" / "job.json").symlink_to("/etc/hostname")
    with server(runs, "--calibration", str(write_links(folder)), "--site", str(folder / "site")) as found:
        yield found, runs


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_pages_are_quiet_and_as_wide_as_the_screen(ui, tmp_path, size, theme):
    found, runs = ui
    keys = found.keys()
    with browser(size, theme) as chromium:
        chromium.driver.get(found.url)
        chromium.wait("return document.querySelector('h1')?.textContent === 'Runs'")
        assert found.token not in chromium.driver.current_url
        assert chromium.run("return document.cookie") == ""
        live = f"/runs/{keys['live']}"
        compare = f"/compare?run={keys['baseline']}&run={keys['warm-up/longer']}"
        for name, path in {
            "runs": "/",
            "machine": "/machine",
            "planner": "/planner/",
            "run": live,
            "compare": compare,
        }.items():
            chromium.driver.get(f"http://127.0.0.1:{found.port}{path}")
            if name == "run":
                chromium.wait("return document.querySelector('[data-tile=step]').textContent === '40'")
                with (runs / "live" / "metrics.jsonl").open("a") as log:
                    log.write(json.dumps({**metrics(1)[0], "step": 41}) + "\n")
                chromium.wait("return document.querySelector('[data-tile=step]').textContent === '41'")
                lines = (runs / "live" / "metrics.jsonl").read_text().splitlines(keepends=True)
                (runs / "live" / "metrics.jsonl").write_text("".join(lines[:-1]))
            if name in ("run", "compare"):
                assert chromium.run("return document.querySelectorAll('polyline').length") == 2
                chromium.run("scrollTo(0, document.body.scrollHeight)")
                frame = chromium.driver.find_element("css selector", "iframe")
                chromium.driver.switch_to.frame(frame)
                chromium.wait("return document.querySelectorAll('[data-figure] svg.main-svg').length > 0")
                chromium.driver.switch_to.default_content()
            assert chromium.run(OUTSIDE) == []
            assert chromium.run("return document.documentElement.scrollWidth") == SIZES[size][0]
            assert chromium.run(SMALL) >= 13
            assert chromium.screenshot(tmp_path / f"{name}.png").stat().st_size > 5_000
        assert chromium.console() == []
        own = (f"http://127.0.0.1:{found.port}/", "data:")
        assert [url for url in chromium.requests() if not url.startswith(own)] == []


def test_runs_are_marked_and_compared(ui):
    found, _ = ui
    with browser() as chromium:
        chromium.driver.get(found.url)
        chromium.wait("return document.querySelector('h1')?.textContent === 'Runs'")
        chromium.wait("return document.querySelector('button').disabled")  # the script runs after the page is read
        assert "<script>alert" in chromium.run("return document.body.innerText")
        assert "symbolic link" in chromium.run("return document.body.innerText")
        chromium.run("for (const box of document.querySelectorAll('input')) box.click()")
        assert chromium.run("return document.querySelectorAll('input:checked').length") == 4
        chromium.run("document.querySelector('button').click()")
        chromium.wait("return document.querySelector('h1')?.textContent === 'Side by side'")
        assert chromium.run("return document.querySelectorAll('polyline').length") == 4
        assert chromium.console() == []


def test_another_site_gets_nothing(ui, tmp_path):
    """A page of another origin, in the browser that has the cookie."""
    found, _ = ui
    page = tmp_path / "evil.html"
    address = f"http://127.0.0.1:{found.port}"
    page.write_text(f"<script src='{address}/ui/ui.js'></script><iframe src='{address}/'></iframe>")
    with browser() as chromium:
        chromium.driver.get(found.url)
        chromium.wait("return document.querySelector('h1')?.textContent === 'Runs'")
        chromium.driver.get(page.as_uri())
        script = """
        const done = arguments[0];
        fetch(arguments[1], {credentials: 'include'}).then((r) => r.text(), () => 'refused').then(done)
        """.replace("arguments[0]", "arguments[arguments.length - 1]").replace("arguments[1]", "arguments[0]")
        assert chromium.driver.execute_async_script(script, address) == "refused"
        told = " ".join(chromium.console())
        assert "NotSameOrigin" in told and "ui.js" in told


def test_a_launched_page_enters(ui, tmp_path):
    """As the command opens it: from a file, whose navigation is another site's."""
    from shardwise.cli.ui import OPEN

    found, _ = ui
    page = tmp_path / "open.html"
    page.write_text(OPEN.format(url=found.url))
    with browser() as chromium:
        chromium.driver.get(page.as_uri())
        chromium.wait("return document.querySelector('h1')?.textContent === 'Runs'")
        assert chromium.console() == []
