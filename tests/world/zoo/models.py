"""All cases of the zoo, by name."""

from tests.world.zoo import losses, routes, shared, stacks, vision  # noqa: F401 each adds its cases
from tests.world.zoo.case import CASES

LATER: dict[str, str] = {}
"""Cases that are not right or refused yet, and why."""

__all__ = ["CASES", "LATER"]
