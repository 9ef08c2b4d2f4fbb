"""The documents have no misspelt word that codespell knows; words of the field are in ``pyproject.toml``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.commands import ROOT


def test_no_word_is_misspelt():
    pytest.importorskip("codespell_lib", reason="needs codespell (the extra dev)")
    folders = ["docs", "README.md", "CONTRIBUTING.md", "src", "examples"]
    command = [sys.executable, "-m", "codespell_lib", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
