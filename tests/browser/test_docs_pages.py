"""The documentation beside the planner: no dead link, nothing of another host, search, and planners in its pages."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from shardwise.web.answer import answer
from tests.browser.pages import SIZES, browser, why_not
from tests.browser.sites import built_site, served, why_no_site

REASON = why_not() or why_no_site()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or ""), pytest.mark.timeout(300)]
FIELDS = {"compile": "compiled", "any": "any_plan"}
# page and the strategy that it must let readers try; "" is any
TRIED = [("how-it-counts", "fsdp"), ("choosing-a-plan", "ddp"), ("choosing-a-plan", "zero2"),
         ("choosing-a-plan", "fsdp+offload"), ("from-ddp-to-fsdp", ""), ("tensor-parallel", "fsdp+tp8"),
         ("pipeline-parallel", "fsdp+pp2"), ("lora", "fsdp+qlora"), ("scaling", ""), ("what-to-rent", ""),
         ("serving", "serve")]  # fmt: skip
OUTSIDE = """
return [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1
  && !e.closest("pre, code, .md-typeset__scrollwrap, .md-typeset__table, .md-sidebar, .md-tabs, .md-search"))
  .map((e) => e.tagName + "." + e.className);
"""


class Page(HTMLParser):
    """What a page of HTML links to and loads, the places in it, and what a strict policy would stop."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.tries: list[str] = []
        self.inline: list[str] = []
        self.policy = ""
        self._try = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        facts = {name: value or "" for name, value in attributes}
        self.ids |= {facts[name] for name in ("id", "name") if name in facts}
        if tag == "a" and "href" in facts:
            (self.tries if "data-command" in facts else self.links).append(facts["href"])
        elif tag == "meta" and facts.get("http-equiv") == "Content-Security-Policy":
            self.policy = facts["content"]
        elif tag == "script" and "src" not in facts and facts.get("type") != "application/json":
            self.inline.append("script")
        elif tag == "style" or "style" in facts or any(name.startswith("on") for name in facts):
            self.inline.append(tag)
        self.loads += [facts[name] for name in ("src", "href") if name in facts and tag not in ("a", "base")]


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    site = built_site() / "some" / "where"
    return {path: Page(path) for path in sorted((site / "docs").rglob("*.html"))}


@pytest.fixture(scope="module")
def docs() -> Iterator[SimpleNamespace]:
    """The documentation in a browser of its own."""
    with served(built_site()) as address, browser() as chromium:
        yield SimpleNamespace(chromium=chromium, base=f"{address}/some/where/")


def test_every_link_leads_somewhere_on_the_site(pages):
    assert len(pages) > 60
    missing = []
    for path, page in pages.items():
        for link in [*page.links, *page.tries]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or parts.scheme:
                missing.append(f"{path.name}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                missing.append(f"{path.name}: {link}: no such place")
    assert missing == []


def test_nothing_is_loaded_from_elsewhere_or_against_the_policy(pages):
    for path, page in pages.items():
        assert page.inline == [], path
        assert "default-src 'none'" in page.policy and "unsafe" not in page.policy and "http" not in page.policy
        assert [load for load in page.loads if urlsplit(load).scheme not in ("", "data")] == [], path


def test_what_a_page_lets_readers_try_has_an_answer(pages):
    found: dict[str, list[str]] = {}
    for path, page in pages.items():
        for link in page.tries:
            words = {
                FIELDS.get(name, name).replace("-", "_"): value for name, value in parse_qsl(urlsplit(link).fragment)
            }
            reply = answer(words)
            served = "serve" in words
            assert reply["problems"] == [] and reply["document"]["options" if served else "candidates"], (
                path.name,
                link,
            )
            assert reply["document"]["recommended"] is not None or path.stem == "what-to-rent", (path.name, link)
            found.setdefault(path.stem, []).append("serve" if served else words.get("strategy", ""))
    assert [(page, strategy) for page, strategy in TRIED if strategy not in found.get(page, [])] == []


def test_search_finds_a_word_without_another_host(docs):
    docs.chromium.driver.get(f"{docs.base}docs/index.html")
    docs.chromium.run("document.querySelector('[data-md-toggle=search]').click()")
    box = docs.chromium.driver.find_element("css selector", ".md-search__input")
    box.send_keys("Adafactor")
    docs.chromium.wait("return document.querySelectorAll('.md-search-result__item a').length > 2")
    found = docs.chromium.run("return [...document.querySelectorAll('.md-search-result__item a')].map((a) => a.href)")
    assert any("lean-optimizers.html" in link for link in found)
    quiet(docs)


def test_a_planner_in_a_page_starts_by_a_click_and_answers(docs):
    docs.chromium.driver.get(f"{docs.base}docs/tensor-parallel.html")
    assert docs.chromium.run("return document.querySelectorAll('iframe').length") == 0
    assert not [url for url in docs.chromium.requests() if "/engine/" in url]
    docs.chromium.run("document.querySelector('p.try a').click()")
    docs.chromium.wait(
        "return Boolean(document.querySelector('iframe.planner').contentDocument?.querySelector('.hero h2'))"
    )
    frame = docs.chromium.driver.find_element("css selector", "iframe.planner")
    docs.chromium.driver.switch_to.frame(frame)
    assert "fsdp+tp8" in docs.chromium.run("return document.querySelector('.hero h2').textContent")
    shown = [
        docs.chromium.run(f"return getComputedStyle(document.querySelector('{one}')).display")
        for one in (".top", "#to-whole", "#devices-slider")
    ]
    assert shown[0] == "none" and "none" not in shown[1:]
    assert docs.chromium.run("return document.documentElement.scrollWidth <= innerWidth")
    docs.chromium.driver.switch_to.default_content()
    quiet(docs)


@pytest.mark.parametrize("size", SIZES)
def test_pages_are_as_wide_as_the_screen(docs, tmp_path, size):
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    docs.chromium.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for name in ("index", "choosing-a-plan", "config", "decisions/index", "source/benchmarks/accuracy/index"):
        docs.chromium.driver.get(f"{docs.base}docs/{name}.html")
        docs.chromium.wait("return document.querySelector('article h1')")
        assert docs.chromium.run("return document.documentElement.scrollWidth") <= width, name
        assert docs.chromium.run(OUTSIDE) == [], name
    quiet(docs)


def quiet(docs: SimpleNamespace) -> None:
    """Fail if a page wrote to the console, or asked anything but the site's own files."""
    assert docs.chromium.console() == []
    assert [url for url in docs.chromium.requests() if not url.startswith((docs.base, "blob:", "data:"))] == []
