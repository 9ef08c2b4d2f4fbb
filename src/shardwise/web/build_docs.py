"""Build the documentation below the planner page: MkDocs, with local assets, offline search and a strict policy.

A fenced ``shardwise plan`` command that the page can answer gets a button, which starts the planner in the page.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from shardwise.errors import MachineError, UserError
from shardwise.model.catalogue import find_architecture

ASSETS = Path(__file__).with_name("docs_assets")
PLANNER = "../index.html"  # beside the folder of the documentation
POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; connect-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'"
)
PAGE_OPTIONS = (
    *("cluster", "seq-len", "global-batch", "tokens", "precision", "optimizer", "strategy", "micro-batch"),
    *("recompute", "loss", "program", "weights", "accumulate", "reduce", "rounding", "fp8", "objective", "lora-rank"),
    *("lora-targets", "virtual-stages", "recompute-layers", "loss-chunks", "document-len", "framework-overhead"),
    *("context", "concurrency", "quant", "kv-cache", "tp"),
)
PAGE_FLAGS = ("compile", "any", "optimizer-in-backward", "serve")
FENCE = re.compile(r"^```.*?^```[^\n]*\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)
TEXT_FILES = (".py", ".toml", ".jsonl", ".yaml")
WAIT_S = 300


def build_docs(root: Path, output: Path) -> Path:
    """Write the documentation of the repository ``root`` to ``output``, which lies beside the planner page.

    Raises:
        UserError: MkDocs is missing.
        MachineError: it fails, or a link leads nowhere.
    """
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "docs"
        Pages(root, source).write()
        settings = {"INHERIT": str(root.resolve() / "mkdocs.yml"), "docs_dir": str(source), "nav": navigation(source)}
        (Path(made) / "mkdocs.yml").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--clean"]
        command += ["-f", str(Path(made) / "mkdocs.yml"), "-d", str(output.resolve())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    if "No module named mkdocs" in done.stderr:
        raise UserError("the documentation is built by mkdocs-material, which is not installed: make setup")
    if done.returncode:
        raise MachineError(f"the documentation cannot be built: {(done.stderr or done.stdout).strip()[-2000:]}")
    for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"):  # for a site with an address of its own
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(output / "assets" / "javascripts" / "lunr")  # other languages
    for path in output.rglob("*.map"):
        path.unlink()
    for page in output.rglob("*.html"):
        page.write_text(strict(page.read_text(), page, output))
    return output


class Pages:
    """The Markdown that the generator reads: docs/, and of the repository what its pages link to."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root, self.docs, self.target = root.resolve(), root.resolve() / "docs", target
        self._written: set[Path] = set()

    def write(self) -> None:
        """Write all pages, images, and the list of decisions."""
        shutil.copytree(self.docs, self.target)
        shutil.copytree(ASSETS, self.target / "assets")
        for page in sorted(self.docs.rglob("*.md")):
            self._page(page)
        names = [path.name for path in sorted((self.docs / "decisions").glob("[0-9]*.md"))]
        lines = [f"- [{title(self.docs / 'decisions' / name)}]({name})" for name in names]
        (self.target / "decisions" / "index.md").write_text("\n".join(["# Decisions", "", *lines, ""]))

    def _place(self, path: Path) -> Path:
        """Return the place of a file of the repository below the documentation."""
        if path.is_relative_to(self.docs):
            return self.target / path.relative_to(self.docs)
        inner = path.relative_to(self.root)
        return self.target / "source" / (inner.with_name(f"{inner.name}.txt") if path.suffix in TEXT_FILES else inner)

    def _page(self, page: Path) -> None:
        place = self._place(page)
        if place in self._written:
            return
        self._written.add(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        text, parts, at = page.read_text(), [], 0
        for fence in FENCE.finditer(text):
            parts += [self._linked(text[at : fence.start()], page), fence[0], button(fence[0], place, self.target)]
            at = fence.end()
        place.write_text("".join([*parts, self._linked(text[at:], page)]))

    def _linked(self, text: str, page: Path) -> str:
        return LINK.sub(lambda found: self._link(found, page), text)

    def _link(self, found: re.Match[str], page: Path) -> str:
        mark, label, link = found.groups()
        name, _, anchor = link.partition("#")
        if not name or "://" in name:
            return found[0]
        path = (page.parent / name).resolve()
        if path == self.docs / "decisions":
            path = path / "index.md"
        elif path.is_relative_to(self.docs):  # its place is as before, but not that of a page from elsewhere
            if page.is_relative_to(self.docs):
                return found[0]
        elif path.suffix == ".md" and path.is_file():
            self._page(path)
        elif path.is_file() and (mark or (path.suffix in TEXT_FILES and page.is_relative_to(self.docs))):
            self._place(path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self._place(path))
        else:
            return label  # a folder, or raw data: it is in the repository
        where = os.path.relpath(self._place(path), self._place(page).parent)
        return f"{mark}[{label}]({where}{'#' if anchor else ''}{anchor})"


def title(page: Path) -> str:
    """Return the first heading of a page."""
    return page.read_text().splitlines()[0].lstrip("# ").strip()


def navigation(docs: Path) -> list[object]:
    """Return the navigation that ``index.md`` lists under its bold words, the decisions, and the planner."""
    parts: dict[str, dict[str, str]] = {}
    for line in (docs / "index.md").read_text().splitlines():
        if bold := re.fullmatch(r"\*\*(\w+)\*\*", line.strip()):
            parts[bold[1]] = {}
        elif parts:
            parts[list(parts)[-1]] |= {link: label for _, label, link in LINK.findall(line) if "decisions" not in link}
    listed = {
        name: [{label[0].upper() + label[1:]: link} for link, label in links.items()]
        for name, links in parts.items()
        if links
    }
    decisions = [
        "decisions/index.md",
        *(f"decisions/{path.name}" for path in sorted((docs / "decisions").glob("[0-9]*"))),
    ]
    return [
        {"Start": "index.md"},
        *({name: links} for name, links in listed.items()),
        {"Decisions": decisions},
        {"Planner": PLANNER},
    ]


def button(fence: str, place: Path, docs: Path) -> str:
    """Return a link to the planner for each command of a fenced block that it can answer."""
    links = []
    for command in commands(fence):
        words = question(command)
        if words:
            where = os.path.relpath(docs.parent / "index.html", place.parent)
            href, shown = escape(f"{where}#{urlencode(words)}"), escape(shlex.join(command))
            links.append(f'<a href="{href}" data-command="{shown}">Try it in this page</a>')
    return "".join(f'\n<p class="try">{link}</p>\n' for link in links)


def commands(fence: str) -> Iterator[list[str]]:
    """Yield the ``shardwise plan`` commands of a fenced block, as words, without those that it shows to be refused."""
    found: list[list[str]] = []
    for line in fence.replace("\\\n", " ").splitlines():
        if line.removeprefix("$ ").startswith("shardwise plan "):
            found.append(shlex.split(line.removeprefix("$ "), comments=True))
        elif line.startswith("shardwise: "):
            del found[-1:]
    yield from found


def question(command: list[str]) -> list[tuple[str, str]] | None:
    """Return the state of the planner page for a command; ``None`` where the page cannot answer it."""
    model, words = "", []
    rest = iter(command[2:])
    for word in rest:
        name = word.removeprefix("--")
        if not word.startswith("--") and not model:
            model = word
        elif word.startswith("--") and name in PAGE_FLAGS:
            words.append((name, "on"))
        elif word.startswith("--") and name in PAGE_OPTIONS:
            words.append((name, next(rest, "")))
        else:
            return None
    if not model or find_architecture(model) is None or "cluster" not in dict(words):
        return None
    return [("model", model), *words]


def strict(html: str, page: Path, docs: Path) -> str:
    """Give a page the policy, and move its scripts into files, which the policy allows."""

    def moved(found: re.Match[str]) -> str:
        name = f"assets/{hashlib.sha256(found[1].encode()).hexdigest()[:12]}.js"
        (docs / name).write_text(found[1])
        return f'<script src="{os.path.relpath(docs / name, page.parent)}"></script>'

    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    return INLINE.sub(moved, html).replace("<head>", f"<head>{policy}", 1)
