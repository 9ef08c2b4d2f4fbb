"""The picture of the docs: ``python -m tests.browser.picture [RUN] [-o docs/images/report.png]``.

Without a run it shows the hand-made one of the tests.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from PIL import Image

from shardwise.report.html.page import make_report
from tests.browser.pages import browser
from tests.reports import write_run

HEIGHT, MOST_BYTES = 1480, 300_000


def main() -> None:
    """Make the report of a run and keep its upper part, as a desktop shows it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/images/report.png"))
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        run = words.run or write_run(Path(folder) / "llama-1b-code")
        chromium.open(make_report(run, output=Path(folder) / "report.html"))
        shot = chromium.screenshot(Path(folder) / "shot.png", HEIGHT)
        words.output.parent.mkdir(parents=True, exist_ok=True)
        Image.open(shot).convert("RGB").save(words.output, optimize=True)
    size = words.output.stat().st_size
    print(f"{words.output}: {size} bytes{'' if size <= MOST_BYTES else ', which is too much for the docs'}")


if __name__ == "__main__":
    main()
