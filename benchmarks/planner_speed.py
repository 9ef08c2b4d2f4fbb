"""How long the planner takes and how much memory it needs: seconds with and without imports, and raw samples.

    python benchmarks/planner_speed.py [--repeats 5] [--prove] [--output FOLDER]

Each sample is a fresh process, so nothing is cached from the one before. ``wall_s`` is what a user waits, from the
start of the interpreter to its end; ``after_import_s`` leaves the interpreter's start and the imports out. Beside each
stand the seconds of processor time: on a machine that does other work too, they say what the wait would have been.
Memory is the largest resident set of the process and of those that it started. ``--prove`` takes about a minute more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

GIB = 1024**3
LARGE = ("llama-3.1-405b", "2048x8xH100-SXM", 8192, 2048)  # model, cluster, length, global batch: 16 Mi tokens a step
PLAN = shlex.split("plan llama-3.1-70b --cluster 8xA100-80GB --seq-len 4096 --global-batch 64")
PROVE = shlex.split(
    "plan llama-3.1-70b --cluster 16x8xH100-SXM --seq-len 4096 --global-batch 128 --strategy fsdp --prove"
)
MODULES = (
    "search.advice",
    "cost.memory.estimate_memory",
    "cost.time.estimate_time",
    "model.load_model",
    "hardware.parse_cluster",
)
RSS_TARGET_BYTES = 3 * GIB // 2


def search_inside() -> dict[str, Any]:
    """In a fresh process: import, then read the model and search once."""
    began = time.perf_counter()
    for name in MODULES:
        importlib.import_module(f"shardwise.{name}")
    from shardwise.hardware.parse_cluster import parse_cluster
    from shardwise.model.load_model import load_profile
    from shardwise.plan.workload import Workload
    from shardwise.search.search import search

    imported, used = time.perf_counter(), time.process_time()
    model, cluster, length, batch = LARGE
    result = search(
        load_profile(model, seq_len=length), Workload(seq_len=length, global_batch=batch), parse_cluster(cluster)
    )
    facts = since(began, imported, used)
    best = result.candidates[result.recommended or 0].plan.strategy
    return facts | {"considered": result.considered, "recommended": best}


def plan_inside() -> dict[str, Any]:
    """In a fresh process: import all that the command imports, then run it."""
    began = time.perf_counter()
    for name in (*MODULES, "cli.plan"):
        importlib.import_module(f"shardwise.{name}")
    from shardwise.cli.main import main

    imported, used = time.perf_counter(), time.process_time()
    sys.argv = ["shardwise", *PLAN]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    return since(began, imported, used)


def since(began: float, imported: float, used: float) -> dict[str, Any]:
    """Seconds of the imports, and of what came after them by the wall and by the processor."""
    now, processor = time.perf_counter(), time.process_time()
    return {"import_s": imported - began, "after_import_s": now - imported, "after_import_cpu_s": processor - used}


def sample(command: list[str]) -> dict[str, Any]:
    """Run a command once: its wall seconds, largest resident bytes and exit status."""
    environment = os.environ | {"SHARDWISE_HISTORY": "off", "COLUMNS": "132"}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        if process.returncode not in (0, 1):  # 1: nothing fits, which is an answer
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {errors.read().decode()[-2000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    return {"wall_s": wall, "cpu_s": cpu, "rss_bytes": usage.ru_maxrss * 1024, "exit": process.returncode}


def inside(what: str) -> dict[str, Any]:
    """One fresh process of this file that looks at its own clock."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "facts.json"
        seen = sample([sys.executable, __file__, "--inside", what, str(out)])
        return seen | json.loads(out.read_text())


def measure(repeats: int, *, prove: bool) -> dict[str, Any]:
    """All figures with their samples, and what they depend on."""
    load = os.getloadavg()[0]
    searches = [inside("search") for _ in range(repeats)]
    plans = [sample([sys.executable, "-m", "shardwise", *PLAN]) for _ in range(repeats)]
    inner = [inside("plan") for _ in range(repeats)]
    model, cluster, length, batch = LARGE
    large = f"full search for {model} on {cluster} ({length} tokens, batch {batch})"
    figures = {
        "search_after_import_s": seconds(f"{large}, after import", searches, "after_import", 1.0),
        "search_wall_s": seconds("the same with interpreter and imports", searches, ""),
        "plan_wall_s": seconds(f"`shardwise {' '.join(PLAN)}`, end to end", plans, "", 3.0),
        "plan_after_import_s": seconds("the same after import", inner, "after_import"),
        "rss_bytes": most_bytes("largest resident set of these", searches + plans),
    }
    return {
        "schema": 1,
        "recorded": today(),
        "machine": machine(),
        "load_average": round(load, 2),
        "considered": searches[0]["considered"],
        "recommended": searches[0]["recommended"],
        "figures": figures | (measure_prove() if prove else {}),
    }


def measure_prove() -> dict[str, Any]:
    """One run of ``--prove`` for a 70B model on 128 ranks."""
    seen = sample([sys.executable, "-m", "shardwise", *PROVE])
    if seen["exit"]:
        raise RuntimeError(f"shardwise {' '.join(PROVE)} ended with {seen['exit']}")
    found = {
        "prove_wall_s": seconds(f"`shardwise {' '.join(PROVE)}`", [seen], "", 60.0),
        "prove_rss_bytes": most_bytes("largest resident set of that", [seen]),
    }
    return {name: one | {"recorded": today()} for name, one in found.items()}


def seconds(what: str, samples: list[dict[str, Any]], part: str, target: float | None = None) -> dict[str, Any]:
    """A figure of seconds: medians by the wall and by the processor, and every sample."""
    wall, cpu = (f"{part}_s", f"{part}_cpu_s") if part else ("wall_s", "cpu_s")
    return figure(what, statistics.median(s[wall] for s in samples), target) | {
        "processor_s": rounded(statistics.median(s[cpu] for s in samples)),
        "best": rounded(min(s[wall] for s in samples)),
        "samples": [rounded(s[wall]) for s in samples],
        "processor_samples": [rounded(s[cpu]) for s in samples],
    }


def most_bytes(what: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A figure of bytes: the largest of the samples."""
    sizes = [s["rss_bytes"] for s in samples]
    return figure(what, max(sizes), RSS_TARGET_BYTES) | {"samples": sizes}


def figure(what: str, value: float, target: float | None) -> dict[str, Any]:
    """A value beside its target; ``ratio`` is of the two, 1 is the limit."""
    ratio = None if target is None else rounded(value / target)
    return {"what": what, "value": rounded(value), "target": target, "ratio": ratio}


def rounded(value: float) -> float:
    """Four digits; bytes as they are."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def today() -> str:
    """The date, in universal time."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def text(found: dict[str, Any]) -> str:
    """One line for people."""

    def shown(value: float) -> str:
        return f"{value:.2f} s" if "processor_s" in found else f"{value / GIB:.2f} GiB"

    extra = f"  processor {found['processor_s']:.2f} s  best {found['best']:.2f} s" if "processor_s" in found else ""
    limit = "" if found["target"] is None else f"  target {shown(found['target'])}, ratio {found['ratio']:.2f}"
    return f"{shown(found['value']):>9}{extra}{limit}  {found['what']}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prove", action="store_true", help="also --prove of a 70B model on 128 ranks")
    parser.add_argument("--output", type=Path, help="folder for a file named for the date, or a .json file")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        facts = search_inside() if options.inside[0] == "search" else plan_inside()
        Path(options.inside[1]).write_text(json.dumps(facts))
        return
    found = measure(options.repeats, prove=options.prove)
    for one in found["figures"].values():
        print(text(one))
    if options.output is not None:
        path = options.output
        if path.suffix != ".json":
            path = path / f"planner_speed_cpu_{found['recorded']}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
