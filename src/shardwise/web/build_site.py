"""Build the static site: the planner page with its engine, and the documentation.

``python -m shardwise.web.build_site -o build/site`` is what ``make site`` runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.units import bytes_text
from shardwise.web import site_parts
from shardwise.web.build_docs import build_docs

ASSETS = Path(__file__).with_name("assets")
PACKAGE = Path(__file__).parents[1]
PAGE = "index.html"
# what plans: of these, every file that does not import torch or numpy when it is loaded
LAYERS = (
    *("__init__.py", "collector.py", "document.py", "environment.py", "errors.py", "import_object.py", "units.py"),
    *("hardware", "model", "plan", "cost", "search"),
    *("report/__init__.py", "report/plan_json.py", "report/plan_sentences.py"),
    *("report/serving_json.py", "report/serving_sentences.py"),
    *("web/__init__.py", "web/answer.py", "web/serving_answer.py"),
)
HEAVY = re.compile(r"^(?:import|from) (?:torch|numpy|typer|rich)\b", re.MULTILINE)
STAMP = (1980, 1, 1, 0, 0, 0)  # the same sources make the same bytes


def build_site(output: Path, *, cache: Path, repository: Path | None = None) -> Path:
    """Write the site to ``output``, with the documentation of ``repository``; ``cache`` keeps what is downloaded.

    Raises:
        UserError: npm, Node.js or MkDocs is missing.
        MachineError: a part cannot be downloaded, or a link of the documentation leads nowhere.
    """
    pyodide = site_parts.npm_package(*site_parts.PYODIDE, cache)
    found = site_parts.wheels(cache)
    if output.is_dir():
        shutil.rmtree(output)
    shutil.copytree(ASSETS, output)
    build_engine(output / "engine", pyodide, found)
    if repository is not None:
        build_docs(repository, output / "docs")
    (output / "site.json").write_text(json.dumps(facts_of(output), indent=1) + "\n")
    return output


def build_engine(engine: Path, pyodide: Path, wheels: list[Path]) -> None:
    """Write Pyodide and the planner to ``engine``, compiled; of the list of Pyodide's packages nothing is used."""
    site_parts.unpack_npm(pyodide, site_parts.PYODIDE_FILES, engine)
    lock = json.loads((engine / "pyodide-lock.json").read_text())
    (engine / "pyodide-lock.json").write_text(json.dumps(lock | {"packages": {}}))
    pack_engine(engine / "shardwise.zip", wheels)
    site_parts.precompile(engine, engine / "shardwise.zip")


def pack_engine(target: Path, wheels: list[Path]) -> None:
    """Pack the planning layers and the wheels they import as one zip, which Pyodide unpacks."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in engine_files():
            _add(archive, str(Path("shardwise") / path.relative_to(PACKAGE)), path.read_bytes())
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as source:
                for name in sorted(source.namelist()):
                    if not name.endswith("/") and not site_parts.UNUSED_OF_WHEELS.match(name):
                        _add(archive, name, source.read(name))


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, STAMP), data, zipfile.ZIP_DEFLATED)


def engine_files() -> Iterator[Path]:
    """Yield the files of the package that the browser gets."""
    for name in LAYERS:
        start = PACKAGE / name
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.suffix in (".toml", ".csv") or (path.suffix == ".py" and not HEAVY.search(path.read_text())):
                yield path


def facts_of(site: Path) -> dict[str, object]:
    """Return the version, and size and hash of each file of the engine."""
    files = [path for path in sorted(site.rglob("*")) if path.is_file()]
    engine = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted((site / "engine").iterdir())
    }
    return {
        "version": _version(),
        "machine": False,
        "docs": (site / "docs").is_dir(),
        "bytes": sum(path.stat().st_size for path in files),
        "engine": engine,
    }


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shardwise")
    except PackageNotFoundError:
        return "unknown"


def main() -> None:
    """Build the site, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/site"))
    parser.add_argument("--cache", type=Path, default=Path("build/parts"))
    words = parser.parse_args()
    try:
        repository = PACKAGE.parents[1]
        with_docs = (repository / "mkdocs.yml").is_file()
        site = build_site(words.output, cache=words.cache, repository=repository if with_docs else None)
    except ShardwiseError as error:
        print(f"site: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(f"{site}: {bytes_text(size)}; show it with: python -m http.server -d {site}")


if __name__ == "__main__":
    main()
