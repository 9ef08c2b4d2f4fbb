"""`undrawn`: random initial values of meta tensors, which have none, cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DRAWS = frozenset({"normal_", "uniform_"})


@contextmanager
def undrawn() -> Iterator[None]:
    """Make draws into meta tensors return at once.

    torch decomposes each into a dozen operators in Python, which takes more than half the time in which transformers
    builds a model on the meta device. No generator advances, with or without.
    """
    before = {name: vars(torch.Tensor).get(name) for name in DRAWS}
    for name in DRAWS:
        setattr(torch.Tensor, name, _unless_meta(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:  # inherited
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _unless_meta(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        refused = self.requires_grad and torch.is_grad_enabled()  # a leaf: rank 0's real weight raises, so this does
        return self if self.is_meta and not refused else draw(self, *args, **options)

    return drawn
