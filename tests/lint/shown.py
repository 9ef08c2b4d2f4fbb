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
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
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
KEYS = ("# shows: ", "# needs: ", "# nodes: ")
KEPT = HERE.parents[1] / "benchmarks" / "lint" / "shown.json"
WAITS_S, WORKS_S = 3.0, 40.0
"""Timeout of collectives where a rank is to wait in vain, and where none is: the machine may be busy."""


def header(path: Path) -> dict[str, str]:
    """What the first comments of a fixture tell this module.

    ``shows``: ``hang``, ``result`` and what the value is, or ``error`` and a part of its text. ``needs``: two GPUs,
    without which it is not run. ``nodes``: each rank is the only one of its node.
    """
    found = {}
    for line in path.read_text().split("\n"):
        key, colon, value = line.removeprefix("# ").partition(": ")
        if not colon or not line.startswith(KEYS):
            break
        found[key] = value
    return found


def is_missing(path: Path) -> bool:
    """Whether a fixture needs GPUs that this machine does not have."""
    return "needs" in header(path) and torch.cuda.device_count() < 2


def showing() -> dict[str, str]:
    """What each fixture promises to show, of those that can run here."""
    paths = [path for path in sorted(HERE.glob("SW*/bad.py")) if not is_missing(path)]
    scripts = {path.parent.name: promise for path in paths if (promise := header(path).get("shows"))}
    return scripts | shown_launches.showing()


def run_pair(path: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Call ``main()`` of a fixture on two ranks: what each returned or raised; nothing for one that waits on."""
    for package, names in re.findall(r"^from (accelerate|transformers) import (.+)", path.read_text(), re.M):
        for name in names.split(", "):
            getattr(importlib.import_module(package), name)  # seconds in each rank
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
    place = ("0", "1") if "nodes" in header(path.with_name("bad.py")) else (str(rank), "2")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=place[0], LOCAL_WORLD_SIZE=place[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    sys.argv = [str(path)]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # pytest makes errors of them
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  the process ends with it
    for stream in (1, 2):  # what C++ prints
        os.dup2(sys.stdout.fileno(), stream)
    dist.init_process_group = functools.partial(
        _init,
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
        if timeout_s == WORKS_S and dist.is_initialized():  # nobody exits while the other one still reads
            dist.barrier()
    except BaseException as error:
        said = {"raised": f"{type(error).__name__}: {error}", "at": traceback.format_exc()[-400:]}
    (Path(folder) / f"{rank}.tmp").write_text(json.dumps(said))
    (Path(folder) / f"{rank}.tmp").rename(Path(folder) / f"{rank}.json")
    os._exit(0)


def _init(real: Callable[..., None], backend: str | None = None, **given: Any) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        backend = "cuda:gloo"  # as with NCCL, the group has a backend for CUDA tensors alone
    real(backend, **given)


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
    kind, _, text = promise.partition(" ")
    bad = run_pair(HERE / id / "bad.py", WAITS_S if kind == "hang" else WORKS_S)
    repaired = HERE / id / "good.py"
    good = [] if is_missing(repaired) else run_pair(repaired, WORKS_S)
    assert all("returned" in one for one in good), f"{id}: the good fixture fails: {good}"
    unseen = "" if good else f"; the repaired one was not run, as it needs {header(repaired)['needs']}"
    if kind == "hang":
        assert any(is_waiting(one) for one in bad), f"{id}: no rank waits: {bad}"
        timeout = any(not one or "timed out" in one.get("raised", "").lower() for one in bad)
        until = "the timeout" if timeout else "the other one has ended, and fails"
        return {"shows": kind, "says": f"a rank waits until {until}"}
    if kind == "error":
        raised = [one["raised"] for one in bad if text in one.get("raised", "")]
        assert raised, f"{id}: nobody raises '{text}': {bad}"
        stands_in = '"nccl"' in (HERE / id / "bad.py").read_text() and not torch.cuda.is_available()
        where = ", of a group without a CPU backend that takes the place of NCCL's" if stands_in else ""
        return {"shows": kind, "says": f"{raised[0].partition(':')[0]} with “{text}”{where}{unseen}"}
    values = [[_rounded(one.get("returned")) for one in each] for each in (bad, good)]
    assert all("returned" in one for one in bad) and values[0] != values[1], f"{id}: no difference: {bad}, {good}"
    assert good or all(values[0]), f"{id}: a value that says that nothing is wrong: {bad}"
    told = [[one for one in each if one is not None] or each for each in values]
    words = [", ".join(dict.fromkeys(json.dumps(one) for one in each)) for each in told]
    return {"shows": kind, "says": f"{text}: {words[0]}{unseen or f'; as repaired, {words[1]}'}"}


def _rounded(value: Any) -> Any:
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.6g}"))


def main(ids: list[str]) -> int:
    """Run the fixtures; returns the exit code."""
    failed, rules, started = 0, {}, time.monotonic()
    for id, promise in showing().items():
        if ids and id not in ids:
            continue
        at = time.monotonic()
        try:
            rules[id] = show(id, promise)
            print(f"{id} {time.monotonic() - at:4.1f} s  {rules[id]['shows']}: {rules[id]['says']}", flush=True)
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
