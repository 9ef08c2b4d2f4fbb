"""Merge the metadata of ranks with different parts of a model (pipeline stages).

No rank has all names or complete parameter groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.format import ParamGroup, short_list
from shardwise.checkpoint.layout import part_of
from shardwise.errors import CheckpointError

Groups = Sequence[Mapping[str, Any]]  # of one optimizer, as JSON: ``params`` and ``options``


def is_in_parts(model: nn.Module) -> bool:
    """Return whether ranks have different parts of the model; the same answer on every rank."""
    ownership = part_of(model)
    return ownership is not None and len(ownership.ranks) < exchange.world_size()


def owners_of(buffers: list[str]) -> dict[str, int]:
    """Map buffers that several stages have to the first rank that has them, which writes them.

    Collective.
    """
    claims: dict[str, list[int]] = {}
    for rank, names in enumerate(exchange.gather_json(buffers)):
        for name in names:
            claims.setdefault(name, []).append(rank)
    owners = {name: ranks[0] for name, ranks in claims.items() if len(ranks) > 1}
    found: dict[str, int] = exchange.broadcast_json(owners)
    return found


def merged_groups(stages: Mapping[int, Groups], order: Sequence[str]) -> list[ParamGroup]:
    """Merge the parameter groups of all stages, given by reporting rank.

    Names are in the model's ``order``, or in a single stage's order if there is one. A group takes its options from a
    stage where it is not empty.

    Raises:
        CheckpointError: a group has other options on one stage than on another.
    """
    if len(stages) == 1:
        return [ParamGroup.model_validate(group) for group in next(iter(stages.values()))]
    numbers = {rank: len(groups) for rank, groups in stages.items()}
    first = next(iter(stages))
    odd = next((rank for rank, number in numbers.items() if number != numbers[first]), None)
    if odd is not None:
        raise CheckpointError(
            f"the optimizer has {numbers[first]} parameter groups on rank {first} and {numbers[odd]} on rank {odd}; "
            "it must have the same groups on every pipeline stage"
        )
    place = {name: number for number, name in enumerate(order)}
    made: list[ParamGroup] = []
    problems: list[str] = []
    for number in range(numbers[first]):
        stage_groups = {rank: groups[number] for rank, groups in stages.items()}
        filled = {rank: group for rank, group in stage_groups.items() if group["params"]} or stage_groups
        names = {name for group in stage_groups.values() for name in group["params"]}
        params = tuple(sorted(names, key=lambda name: (place.get(name, len(place)), name)))
        speaker = next(iter(filled))
        options = filled[speaker]["options"]
        for rank, group in filled.items():
            for key in sorted({*options, *group["options"]}):
                one, other = options.get(key), group["options"].get(key)
                if one != other:
                    problems.append(f"group {number} has {key} {one} on rank {speaker} and {other} on rank {rank}")
        made.append(ParamGroup(params=params, options=options))
    if problems:
        raise CheckpointError(
            f"the optimizer's options differ between pipeline stages: {short_list(problems)}; "
            "set every group alike on all ranks"
        )
    return made


def joined(problems: list[str], ownerships: list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """Merge the problems of all ranks without duplicates, and ``ownerships`` for complete groups.

    Collective. ``ownerships`` are, for each group of the live optimizer, the numbers of the saved groups that its
    parameters are in.
    """
    rows = exchange.gather_json([problems, ownerships])
    found: list[list[Any]] = [[], []]
    if rows:
        found[0] = [*dict.fromkeys(problem for row, _ in rows for problem in row)]
        columns = itertools.zip_longest(*(row for _, row in rows), fillvalue=[])
        found[1] = [sorted({at for stage_groups in column for at in stage_groups}) for column in columns]
    all_problems, all_ownerships = exchange.broadcast_json(found)
    return all_problems, all_ownerships
