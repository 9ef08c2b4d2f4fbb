"""`Exported`: a plan as another tool's file, and what that file does not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Exported:
    """File of another tool.

    ``lost`` are parts of the plan or the config that the tool's file cannot express, a line each; ``notes`` what the
    user does beside it. ``document`` are the keys and values, where the file has such; ``beside`` writes what belongs
    in the file's folder.
    """

    text: str
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    document: dict[str, Any] | None = None
    beside: Callable[[Path], None] | None = None
