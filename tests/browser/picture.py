"""The pictures of the docs: ``python -m tests.browser.picture {report,planner,planner-phone,docs} [--run RUN]``.

The report is that of a run, or of the hand-made one of the tests; the other pages are those of ``build/site``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image

from shardwise.report.html.page import make_report
from tests.browser.pages import Browser, browser
from tests.browser.sites import served
from tests.commands import ROOT
from tests.reports import write_run

HEIGHTS = {"report": 1480, "planner": 1560, "planner-phone": 1500, "docs": 1100}
IMAGES, MOST_BYTES = ROOT / "docs" / "images", 300_000
QUESTION = {
    "model": "llama-3.1-8b",
    "cluster": "8xA100-SXM-80GB",
    "seq-len": "4096",
    "global-batch": "64",
    "tokens": "10B",
}
CURVES = """
const box = document.querySelector("#curves");
return box?.querySelectorAll("tr").length > 9 && !box.textContent.includes("…");
"""


def open_page(name: str, chromium: Browser, address: str) -> None:
    """Open a page of the site, and wait for all that it shows."""
    if name != "docs":
        chromium.driver.get(f"{address}/index.html#{urlencode(QUESTION)}")
        chromium.wait(CURVES)
        return
    metrics = {"width": 1280, "height": HEIGHTS[name], "deviceScaleFactor": 1, "mobile": False}
    chromium.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)  # its tabs hide in a part of a page
    chromium.driver.get(f"{address}/docs/tensor-parallel.html")
    chromium.run("document.querySelector('p.try a').click()")
    chromium.wait("return Boolean(document.querySelector('iframe.planner').contentDocument?.querySelector('#curves'))")


def main() -> None:
    """Take a picture of the upper part of a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=HEIGHTS)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--theme", default="light")
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    output = words.output or IMAGES / f"{words.name}.png"
    size = "phone" if words.name.endswith("phone") else "desktop"
    with tempfile.TemporaryDirectory() as folder, browser(size, words.theme) as chromium:
        if words.name == "report":
            run = words.run or write_run(Path(folder) / "llama-1b-code")
            chromium.open(make_report(run, output=Path(folder) / "report.html"))
            shot = chromium.screenshot(Path(folder) / "shot.png", HEIGHTS["report"])
        else:
            with served(ROOT / "build" / "site") as address:
                open_page(words.name, chromium, address)
                shot = Path(folder) / "shot.png"
                if words.name == "docs":
                    chromium.driver.save_screenshot(
                        str(shot)
                    )  # what the window shows: a capture of more hides the tabs
                else:
                    chromium.screenshot(shot, HEIGHTS[words.name])
        output.parent.mkdir(parents=True, exist_ok=True)
        Image.open(shot).convert("RGB").quantize(128).save(output, optimize=True)
    bytes_ = output.stat().st_size
    print(f"{output}: {bytes_} bytes{'' if bytes_ <= MOST_BYTES else ', which is too much for the docs'}")


if __name__ == "__main__":
    main()
