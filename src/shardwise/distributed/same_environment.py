"""Facts of a rank that must be equal on all ranks, and one message about those that differ. No torch here."""

from __future__ import annotations

import functools
import platform
import socket
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise.environment import Rendezvous, gloo_interfaces, launcher, nccl_interfaces
from shardwise.units import listed

CODE = "shardwise's code"
_FIXES = {
    "python": "use the same minor version of Python on all nodes",
    "torch": "install the same torch on all nodes",
    "shardwise": "install the same shardwise on all nodes",
    CODE: "install the same commit on all nodes",
    "launcher": "start all ranks in one way",
    "WORLD_SIZE": "give all nodes the same number of nodes and of processes per node",
    "LOCAL_WORLD_SIZE": "start as many processes on each node",
    "device": "a plan is for one kind of device: leave the node out, or set parallel.device",
}
_OF_CONFIG = "give all nodes the same config, plan and options"
_SHOWN = 8  # ranks and differences that a message names


@dataclass(frozen=True)
class Hello:
    """One rank as it presents itself: where it runs, its ``facts``, and ``problems`` that it alone can see.

    ``nonce`` tells its process from others with the same rank.
    """

    rank: int
    node: str
    nonce: str
    facts: Mapping[str, str]
    problems: Sequence[str] = field(default=())


def facts_of(place: Rendezvous, torch: str, device: str, more: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of this rank.

    ``more`` has the config and the plan, as JSON. Local paths, host names and the user's variables may differ.
    """
    facts = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch,
        "shardwise": version("shardwise"),
        CODE: code_digest(),
        "launcher": launcher(),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "device": device,
    }
    return facts | {key: text for name, value in more.items() for key, text in _flat(value, name)}


def interface_problems(device: str, names: Iterable[str] | None = None) -> list[str]:
    """Return what is wrong with the network interfaces that the variables of gloo and NCCL name on this node."""
    here = sorted(name for _, name in socket.if_nameindex()) if names is None else sorted(names)
    wrong = {"GLOO_SOCKET_IFNAME": [name for name in gloo_interfaces() if name not in here]}
    if device != "cpu":
        asked, exact = nccl_interfaces()
        found = [name for name in asked if name in here or (not exact and any(one.startswith(name) for one in here))]
        wrong["NCCL_SOCKET_IFNAME"] = [] if found else asked  # NCCL takes those that there are
    return [
        f"{variable} = {listed(names)}: there is no such network interface, only {listed(here)}; name one of them, "
        "or unset the variable"
        for variable, names in wrong.items()
        if names
    ]


def problems_of(hellos: Sequence[Hello]) -> list[str]:
    """Return what keeps these ranks from forming a world, one sentence each, with the nodes."""
    together: dict[str, list[Hello]] = defaultdict(list)
    for one in hellos:
        for problem in one.problems:
            together[problem].append(one)
    problems = [f"{problem} (on {_where(ones)})" for problem, ones in together.items()]
    by_rank: dict[int, set[str]] = defaultdict(set)
    for one in hellos:
        by_rank[one.rank].add(one.nonce)
    for rank in sorted(rank for rank, nonces in by_rank.items() if len(nonces) > 1):
        nodes = sorted({one.node for one in hellos if one.rank == rank})
        problems.append(
            f"RANK = {rank} on {len(by_rank[rank])} processes ({listed(nodes)}): each rank is one process; give each "
            "node a rank of its own"
        )
    return problems + _differences(hellos)


def missing_text(hellos: Sequence[Hello], place: Rendezvous, waited_s: float) -> str:
    """Return a sentence about the ranks that have not come, with their node where a neighbour has."""
    came, size = {one.rank: one for one in hellos}, place.local_world_size
    missing = [rank for rank in range(place.world_size) if rank not in came]
    nodes = []
    for start in range(0, place.world_size, size):
        block = range(start, min(start + size, place.world_size))
        known = next((came[rank].node for rank in block if rank in came), None)
        if absent := [rank for rank in block if rank not in came]:
            nodes.append(f"{_ranks(absent)} on {known or f'node number {start // size}'}")
    shown = "; ".join(nodes[:_SHOWN]) + (f" and {len(nodes) - _SHOWN} more nodes" if len(nodes) > _SHOWN else "")
    return (
        f"{len(missing)} of {place.world_size} ranks have not come to {place.master_addr}:{place.master_port} within "
        f"{waited_s:g} s: {shown}; start them, give all nodes this MASTER_ADDR and MASTER_PORT, and look at their "
        "output (SHARDWISE_JOIN_S=300 waits longer)"
    )


@functools.cache
def code_digest() -> str:
    """Return a checksum of this package's source."""
    root, digest = Path(__file__).parents[1], 0
    for path in sorted(root.rglob("*.py")):
        digest = zlib.crc32(path.read_bytes(), zlib.crc32(path.relative_to(root).as_posix().encode(), digest))
    return f"{digest:08x}"


def _flat(value: Any, name: str) -> Iterable[tuple[str, str]]:
    """Yield the leaves of a JSON document under dotted names, and of each table that it is there."""
    if isinstance(value, Mapping):
        if name:
            yield name, "given"
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, "not given" if value is None else str(value)


def _differences(hellos: Sequence[Hello]) -> list[str]:
    if all(one.facts == hellos[0].facts for one in hellos):
        return []
    keys = dict.fromkeys(key for one in hellos for key in one.facts)
    problems: dict[str, str] = {}
    for key in keys:
        if any(key.startswith(f"{table}.") for table in problems):
            continue  # a table that is not there on some
        groups: dict[str, list[Hello]] = defaultdict(list)
        for one in hellos:
            groups[one.facts.get(key, "not given")].append(one)
        same_version = len({one.facts.get("shardwise") for one in hellos}) == 1
        if len(groups) == 1 or (key == CODE and not same_version) or all(_is_path(text) for text in groups):
            continue
        usual = max(groups, key=lambda text: (len(groups[text]), min(groups[text], key=_rank).rank == 0))
        parts = [f"{text} on {_where(ones)}" for text, ones in groups.items() if text != usual]
        problems[key] = f"{key} = {' and '.join(parts)}, but {usual} on the others; {_FIXES.get(key, _OF_CONFIG)}"
    more = [f"{len(problems) - _SHOWN} more facts differ"] if len(problems) > _SHOWN else []
    return [*problems.values()][:_SHOWN] + more


def _is_path(text: str) -> bool:
    """Return whether it is a place on a node's own disk, which may have another name there."""
    return text.startswith(("/", "~"))


def _where(hellos: Sequence[Hello]) -> str:
    """Format ``a (ranks 0, 1) and b (rank 2)``."""
    nodes: dict[str, list[int]] = defaultdict(list)
    for one in sorted(hellos, key=_rank):
        nodes[one.node].append(one.rank)
    shown = [f"{node} ({_ranks(ranks)})" for node, ranks in [*nodes.items()][:_SHOWN]]
    return listed(shown) + (f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else "")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _rank(one: Hello) -> int:
    return one.rank
