"""Python's garbage collector, switched off where much is made and nothing of it is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable garbage collection.

    Many live objects are created, and the collector would scan them repeatedly: in imports, in a search, in a manifest.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
