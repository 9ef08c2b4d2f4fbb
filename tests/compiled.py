"""In a clean clone, files are compiled once, on all cores; else each worker of pytest-xdist would compile them all."""

from __future__ import annotations

import compileall
import multiprocessing
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]
_configs: list[pytest.Config] = []  # for the forks, which inherit it


def compile_once(config: pytest.Config) -> None:
    """Compile the package and the files that ``config`` asks for; most of the work is what pytest makes of asserts."""
    asked = [Path(config.invocation_params.dir, word.partition("::")[0]).resolve() for word in config.args]
    found = [file for file in (ROOT / "tests").rglob("test_*.py") if any(map(file.is_relative_to, asked))]
    cached = rewrite.assertstate_key in config.stash and not sys.dont_write_bytecode
    if cached and any(not _rewritten(file).exists() for file in found):
        context = multiprocessing.get_context("fork")
        _configs[:] = [config]
        with context.Pool() as pool:
            pool.map(_compile, [*found, *(ROOT / "src").rglob("*.py"), *(ROOT / "tests").glob("*.py")], chunksize=4)


def _compile(file: Path) -> None:
    if file.name.startswith("test_") and not _rewritten(file).exists():
        rewrite.try_makedirs(_rewritten(file).parent)
        source_hash, code = rewrite._rewrite_test(file, _configs[0])
        rewrite._write_pyc(_configs[0].stash[rewrite.assertstate_key], code, source_hash, _rewritten(file))
    elif not file.name.startswith("test_"):
        compileall.compile_file(file, quiet=2)


def _rewritten(file: Path) -> Path:
    return Path(rewrite.get_cache_dir(file), file.stem + rewrite.PYC_TAIL)
