"""torchao for the tests of fp8, in a folder of its own: transformers imports it at each start, where it finds it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "fp8"
"""Where ``make setup`` puts it."""


def use_torchao() -> None:
    """Let this process import torchao, or skip the module that calls this."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if importlib.util.find_spec("torchao") is None:  # looked for, not imported: each worker would, for seconds
        pytest.skip("torchao is not installed: make setup puts it into .venv/fp8", allow_module_level=True)
