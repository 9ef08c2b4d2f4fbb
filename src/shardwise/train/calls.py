"""How often a loop calls its model in a micro batch: what is usual, and what is not."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Calls:
    """How often the model is called with gradients in each micro batch, and how often it was in the first step.

    Other ranks gather in each of these calls, so what is usual needs no message and what is not does.
    """

    usual: list[int] = field(default_factory=list)
    micro: int = -1
    now: int = 0

    def begin_step(self) -> None:
        """No micro batch has begun."""
        self.micro, self.now = -1, 0

    def begin_micro(self) -> None:
        """The next one begins."""
        self.micro, self.now = self.micro + 1, 0

    def is_news(self, first: bool) -> bool:
        """The model is called: whether that is more often than usual; in the ``first`` step everything is."""
        self.now += 1
        return first or not 0 <= self.micro < len(self.usual) or self.now > self.usual[self.micro]

    def ended(self, first: bool) -> bool:
        """The micro batch's backward begins: whether the model was called less often than usual."""
        if first:
            self.usual[self.micro :] = [self.now]
        return first or not 0 <= self.micro < len(self.usual) or self.now < self.usual[self.micro]
