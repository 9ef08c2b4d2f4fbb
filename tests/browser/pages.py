"""A headless Chromium for tests, which says what a page has asked of the network and written to the console."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-component-update",
    "--disable-features=OptimizationGuideModelDownloading,OptimizationGuideOnDeviceModel,OnDeviceModelPerformanceParams",
)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
LOAD_S = 60


def why_not() -> str | None:
    """What is missing for a browser; ``None`` where all is there."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium (the extra dev)"
    missing = [
        name for name, path in (("chromium", _chromium()), ("chromedriver", shutil.which("chromedriver"))) if not path
    ]
    return f"needs {' and '.join(missing)}" if missing else None


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page at a time, of a given size and colour scheme."""

    def __init__(self, driver: Any, size: tuple[int, int]) -> None:
        self.driver, self.size = driver, size

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that ``script`` returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def open(self, page: Path) -> None:
        """Load a file, and wait until its charts are drawn."""
        self.driver.get(page.resolve().as_uri())
        self.wait(
            "return [...document.querySelectorAll('[data-figure]')].every(box => box.querySelector('svg.main-svg'))"
        )

    def wait(self, script: str) -> None:
        """Until ``script`` returns something true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, LOAD_S).until(lambda driver: driver.execute_script(script))

    def scheme(self, theme: str) -> None:
        """What the reader's system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def console(self) -> list[str]:
        """What was written to the console since last time: errors, warnings and what the policy forbade."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page has asked for since last time, the page itself included."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path, height: int | None = None) -> Path:
        """The whole page, or its upper part, as PNG."""
        full = height or int(self.run("return document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": self.size[0], "height": full, "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))
        return path


@contextmanager
def browser(size: str = "desktop", theme: str = "light") -> Iterator[Browser]:
    """A browser of its own process, closed at the end whatever happens."""
    from selenium import webdriver

    width, height = SIZES[size]
    options = webdriver.ChromeOptions()
    options.binary_location = _chromium() or ""
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(LOAD_S)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        found = Browser(driver, (width, height))
        found.scheme(theme)
        yield found
    finally:
        family = psutil.Process(driver.service.process.pid).children(recursive=True)
        driver.quit()
        _, left = psutil.wait_procs(family, timeout=3)
        for process in left:  # a helper of Chromium's that has outlived it
            with suppress(psutil.NoSuchProcess):
                process.kill()
