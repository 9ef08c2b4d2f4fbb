"""Scripts of ``benchmarks/`` that are no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str, path: str) -> ModuleType:
    """Load ``path`` below ``benchmarks/`` as the module ``name``."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
