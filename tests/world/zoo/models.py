"""All cases of the zoo, by name."""

from tests.world.zoo import losses, routes, shared, stacks, vision  # noqa: F401 each adds its cases
from tests.world.zoo.case import CASES

LATER: dict[str, str] = {
    "multiplies by the world's size": "asks for another result on more ranks; verify names it",
    "parametrized: spectral norm": "one iteration for each forward: one process has more forwards in a step",
    "parametrized in blocks: spectral norm": "one iteration for each forward: one process has more forwards in a step",
    "order of blocks by sample": "stopped by name, but in the step that first reorders, and on the rank that does",
    "a loss that some samples do not have": "the same: what runs first depends on samples",
    "adaptive depth": "right, and the receipt counts more gathers than planned on four ranks",
}
"""Cases that are not right or refused yet, and why."""

__all__ = ["CASES", "LATER"]
