"""Bad fixtures on two gloo ranks: each one that says ``# shows:`` does what its rule says, and its good one does not.

``python -m tests.lint.shown --write`` runs them all and writes ``benchmarks/lint/shown.json``; ids run only these,
and write only theirs. Launch files and configs: `shown_launches`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it: seconds in each rank
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

from tests.lint import shown_launches

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "benchmarks" / "lint" / "shown.json"
WAITS_S, WORKS_S = 3.0, 40.0
"""Timeout of collectives where a rank is to wait in vain, and where none is: the machine may be busy."""


def showing() -> dict[str, str]:
    """What each fixture promises to show: ``hang``, ``result``, or ``error`` with a part of its text."""
    found = {}
    for path in sorted(HERE.glob("SW*/bad.py")):
        first, _, _ = path.read_text().partition("\n")
        if first.startswith("# shows: "):
            found[path.parent.name] = first.removeprefix("# shows: ")
    return found | shown_launches.showing()


def run_pair(path: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Call ``main()`` of a fixture on two ranks: what each returned or raised; nothing for one that waits on."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, path, folder, timeout_s)) for rank in range(2)]
        for one in ranks:
            one.start()
        deadline = time.monotonic() + timeout_s + 2
        for one in ranks:
            one.join(max(0.0, deadline - time.monotonic()))
        for one in ranks:
            one.kill()
            one.join()
        files = [Path(folder) / f"{rank}.json" for rank in range(2)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def _rank(rank: int, path: Path, folder: str, timeout_s: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  the process ends with it
    dist.init_process_group = functools.partial(
        dist.init_process_group,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
    )
    dist.destroy_process_group = lambda: None  # it races with the exit of the other rank
    spec = importlib.util.spec_from_file_location("fixture", path)
    module = importlib.util.module_from_spec(spec)
    said: dict[str, Any]
    try:
        spec.loader.exec_module(module)
        said = {"returned": module.main()}
        if timeout_s == WORKS_S:  # nobody exits while the other one still reads
            dist.barrier()
    except BaseException as error:
        said = {"raised": f"{type(error).__name__}: {error}", "at": traceback.format_exc()[-400:]}
    (Path(folder) / f"{rank}.tmp").write_text(json.dumps(said))
    (Path(folder) / f"{rank}.tmp").rename(Path(folder) / f"{rank}.json")
    os._exit(0)


def is_waiting(said: dict[str, Any]) -> bool:
    """Whether a rank waited for another: it is still at it, or gave up when the time was over or the other had left."""
    signs = ("timed out", "timeout", "connection closed", "connection reset", "connection refused", "broken pipe")
    return not said or any(sign in said.get("raised", "").lower() for sign in signs)


def show(id: str, promise: str) -> dict[str, str]:
    """Run both fixtures of a rule; what they did, in words.

    Raises:
        AssertionError: the bad one does not show its fault, or the good one shows one.
    """
    if id in shown_launches.SHOWS:
        return shown_launches.show(id)
    bad = run_pair(HERE / id / "bad.py", WAITS_S if promise == "hang" else WORKS_S)
    good = run_pair(HERE / id / "good.py", WORKS_S)
    assert all("returned" in one for one in good), f"{id}: the good fixture fails: {good}"
    kind, _, text = promise.partition(" ")
    if kind == "hang":
        assert any(is_waiting(one) for one in bad), f"{id}: no rank waits: {bad}"
        timeout = any(not one or "timed out" in one.get("raised", "").lower() for one in bad)
        until = "the timeout" if timeout else "the other one has ended, and fails"
        return {"shows": kind, "says": f"a rank waits until {until}"}
    if kind == "error":
        raised = [one["raised"] for one in bad if text in one.get("raised", "")]
        assert raised, f"{id}: nobody raises '{text}': {bad}"
        return {"shows": kind, "says": f"{raised[0].partition(':')[0]} with “{text}”"}
    values = [[one.get("returned") for one in each] for each in (bad, good)]
    assert all("returned" in one for one in bad) and values[0] != values[1], f"{id}: no difference: {bad}, {good}"
    words = [", ".join(dict.fromkeys(json.dumps(one) for one in each)) for each in values]
    return {"shows": kind, "says": f"main() returns {words[0]}; as repaired, {words[1]}"}


def main(ids: list[str]) -> int:
    """Run the fixtures; returns the exit code."""
    failed, rules, started = 0, {}, time.monotonic()
    for id, promise in showing().items():
        if ids and id not in ids:
            continue
        at = time.monotonic()
        try:
            rules[id] = show(id, promise)
            print(f"{id} {time.monotonic() - at:4.1f} s  {promise}: {rules[id]['says']}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {error}", flush=True)
    print(f"{len(rules)} shown, {failed} not, {time.monotonic() - started:.0f} s")
    if "--write" in sys.argv and not failed:
        kept = json.loads(KEPT.read_text())["rules"] if ids else {}
        rules = dict(sorted((kept | rules).items()))
        facts = {"schema": 1, "torch": torch.__version__, "ranks": 2, "backend": "gloo", "rules": rules}
        KEPT.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if word.startswith("SW")]))
