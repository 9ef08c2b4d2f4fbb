"""Which layers of a model are converted to fp8."""

from __future__ import annotations

from torch import nn

from shardwise.model.read import read_model
from shardwise.parallel.fp8 import decided


class Block(nn.Module):
    """Its layer ``up`` is in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rest = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32))
        self.rest.append(self.up)


def test_a_layer_in_two_places_is_tied_and_stays_as_it_is() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])})
    found = decided(model, read_model(model))
    assert found.layers == ["blocks.0.rest.0", "blocks.1.rest.0"]
    assert found.kept == {"blocks.0.up": "tied to another", "blocks.1.up": "tied to another"}
