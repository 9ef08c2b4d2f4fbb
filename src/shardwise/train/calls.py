"""Number of model calls per micro batch, and deviations from the first step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Calls:
    """Number of model calls with gradients in each micro batch, now and in the first step.

    Other ranks gather in each of these calls: usual calls need no message, others do.
    """

    usual: list[int] = field(default_factory=list)
    micro: int = -1
    now: int = 0

    def begin_step(self) -> None:
        """Reset before the first micro batch of a step."""
        self.micro, self.now = -1, 0

    def begin_micro(self) -> None:
        """Begin the next micro batch."""
        self.micro, self.now = self.micro + 1, 0

    def is_news(self, first: bool) -> bool:
        """Count a model call.

        Return whether it exceeds the usual number (always in the ``first`` step).
        """
        self.now += 1
        return first or not 0 <= self.micro < len(self.usual) or self.now > self.usual[self.micro]

    def ended(self, first: bool) -> bool:
        """End the micro batch's forwards; return whether there were fewer calls than usual."""
        if first:
            self.usual[self.micro :] = [self.now]
        return first or not 0 <= self.micro < len(self.usual) or self.now < self.usual[self.micro]
