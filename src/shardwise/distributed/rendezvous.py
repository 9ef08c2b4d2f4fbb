"""Rendezvous of ranks that a launcher started: they compare their environments, and get keys of their own.

torchrun restarts workers on the store of the attempt before, where gloo would find the addresses of dead ranks. Rank 0
therefore numbers the attempts, and names the processes that belong to one: others on the same store wait for the next.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwise.distributed.same_environment import Hello, missing_text, problems_of
from shardwise.environment import Rendezvous, join_limit_s, uses_agent_store
from shardwise.errors import MachineError, UserError

_ROOT = "shardwise/world"
_CALL, _COUNT = f"{_ROOT}/call", f"{_ROOT}/attempts"
_GRACE_S = 10.0
"""Time in which the other ranks come after a problem was seen, so that one message has all of them."""
_REPLY_S = 5.0
"""Time for rank 0's verdict to arrive, and for the others to have read it."""


def meet(place: Rendezvous, mine: Hello, timeout_s: float) -> Store:
    """Return a store for this attempt alone, once all ranks have come and have the same facts.

    Raises:
        UserError: on all ranks, with all problems and the nodes that have them.
        MachineError: another process has the port.
    """
    limit_s = join_limit_s()
    store = _connect(place, limit_s, timeout_s)
    try:
        attempt = _lead(store, place, mine, limit_s) if place.rank == 0 else _follow(store, place, mine, limit_s)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise MachineError(
            f"rank {place.rank} has lost {place.master_addr}:{place.master_port} before all ranks had come; the output "
            f"of rank 0 shows the reason ({' '.join(str(error).split()):.200})"
        ) from error
    return PrefixStore(f"{_ROOT}/{attempt}", store)


def _connect(place: Rendezvous, limit_s: float, timeout_s: float) -> TCPStore:
    """Connect to the store, and host it on rank 0 unless an agent does."""
    where = f"MASTER_ADDR = {place.master_addr}, MASTER_PORT = {place.master_port}"
    try:
        socket.getaddrinfo(place.master_addr, place.master_port)
    except OSError as error:
        raise UserError(
            f"{where}: rank {place.rank} cannot resolve this name ({error.strerror}); MASTER_ADDR must be the name or "
            "the address of rank 0's node on all nodes"
        ) from None
    hosts = place.rank == 0 and not uses_agent_store()
    if not hosts:
        _wait_for_port(place, where, limit_s)
    try:
        return TCPStore(
            place.master_addr,
            place.master_port,
            is_master=hosts,
            timeout=timedelta(seconds=limit_s if hosts else timeout_s),
            wait_for_workers=False,
            multi_tenant=hosts,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        text = " ".join(str(error).split())
        if "EADDRINUSE" in text:
            raise MachineError(
                f"{where}: another process of this node has the port: another rank 0, or another job; end it, or "
                "choose another MASTER_PORT"
            ) from error
        raise UserError(
            f"{where}: rank {place.rank} cannot be reached there; MASTER_ADDR must be its own node ({text:.200})"
        ) from error


def _wait_for_port(place: Rendezvous, where: str, limit_s: float) -> None:
    """Wait until the host of the store listens.

    Raises:
        UserError: it does not.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((place.master_addr, place.master_port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{where}: rank {place.rank} finds nobody there within {limit_s:g} s ({error.strerror or error}); "
                    "rank 0 has not started or has ended, a firewall is between, or MASTER_ADDR is not rank 0's node "
                    "(SHARDWISE_JOIN_S=300 waits longer)"
                ) from None
        time.sleep(0.1)


def _lead(store: Store, place: Rendezvous, mine: Hello, limit_s: float) -> int:
    """Wait for all ranks as rank 0, and send the verdict; returns the number of the attempt."""
    attempt = int(store.add(_COUNT, 1))
    board = PrefixStore(f"{_ROOT}/{attempt}/meeting", store)
    store.set(_CALL, str(attempt))
    hellos, ranks, last = [mine], {mine.rank}, time.monotonic()
    wait_s = _GRACE_S if mine.problems else limit_s
    while len(ranks) < place.world_size and time.monotonic() - last < wait_s:
        if not board.check([f"hello/{len(hellos)}"]):
            time.sleep(0.02)
            continue
        one, last = Hello(**json.loads(board.get(f"hello/{len(hellos)}"))), time.monotonic()
        alike = one.facts == mine.facts and not one.problems  # nearly all ranks are, and only the others are judged
        if one.rank in ranks or (not alike and problems_of([mine, one])):
            wait_s = _GRACE_S
        hellos.append(one)
        ranks.add(one.rank)
    problems = problems_of(hellos)
    if not problems and len(ranks) < place.world_size:
        problems = [missing_text(hellos, place, limit_s)]
    board.set("verdict", json.dumps({"nonces": [one.nonce for one in hellos], "problems": problems}))
    if problems:
        end = time.monotonic() + _REPLY_S
        while int(board.add("left", 0)) < len(hellos) - 1 and time.monotonic() < end:
            time.sleep(0.02)  # the store ends with this process
        raise _refused(problems)
    return attempt


def _follow(store: Store, place: Rendezvous, mine: Hello, limit_s: float) -> int:
    """Present this rank at each attempt that rank 0 begins, until one has a verdict about this process."""
    attempt, came, last, pause_s = "", -1, time.monotonic(), 0.01
    board = PrefixStore(_ROOT, store)
    while time.monotonic() - last < limit_s + _REPLY_S:
        if store.check([_CALL]) and (call := store.get(_CALL).decode()) != attempt:
            attempt, board, pause_s = call, PrefixStore(f"{_ROOT}/{call}/meeting", store), 0.01
            board.set(f"hello/{board.add('came', 1)}", json.dumps(asdict(mine)))
        if attempt and board.check(["verdict"]):
            verdict: dict[str, Sequence[str]] = json.loads(board.get("verdict"))
            if mine.nonce in verdict["nonces"]:
                if verdict["problems"]:
                    board.add("left", 1)
                    raise _refused(verdict["problems"])
                return int(attempt)
        if attempt and (number := int(board.add("came", 0))) != came:
            came, last = number, time.monotonic()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)
    raise UserError(
        f"MASTER_ADDR = {place.master_addr}, MASTER_PORT = {place.master_port}: rank 0 has not answered rank "
        f"{place.rank} on {mine.node} within {limit_s:g} s; it has not started, or has another MASTER_ADDR"
    )


def _refused(problems: Sequence[str]) -> UserError:
    error = UserError(*problems)
    error.on_all_ranks = True
    return error


def hello(place: Rendezvous, node: str, facts: Mapping[str, str], problems: Sequence[str]) -> Hello:
    """Return how this process presents itself."""
    return Hello(place.rank, node, os.urandom(8).hex(), dict(facts), tuple(problems))
