"""Processor time of short commands, of which most is imports: this tree, and another one in turn with it.

    python benchmarks/startup/verbs.py --rounds 9 --before OTHER/src

Each sample is a new process, whose bytecode was written by a run before. ``cpu_s`` is its user and system time, from
the start of the interpreter to its end; ``import_cpu_s`` is the part within imports, and ``modules`` their number at
the end, both from one process of its own. Writes ``verbs_cpu_DATE.json`` here with every raw sample.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VERBS = {
    "interpreter alone": "",
    "help": "--help",
    "plan, 8B": "plan llama-3.1-8b --cluster 8xH100",
    "plan, 70B": "plan llama-3.1-70b --cluster 8xA100-80GB --seq-len 4096 --global-batch 64",
    "lint of a script": "lint examples/plain_loop.py",
    "train, unknown key": "train examples/stdlib.toml parallel.no_such_key=2",
    "bench step, unknown key": "bench step examples/stdlib.toml parallel.no_such_key=2",
    "verify, unknown key": "verify examples/stdlib.toml parallel.no_such_key=2",
    "launch, unknown key": "launch examples/stdlib.toml --nodes 2 --nproc 4 --via slurm parallel.no_such_key=2",
}
RUN = "from shardwise.__main__ import main; main()"
INSIDE = """
import builtins, importlib, sys, time
plain, by_name, spent, depth = builtins.__import__, importlib.import_module, 0.0, 0
def counted(real):
    def run(*words, **more):
        global spent, depth
        depth += 1
        began = time.process_time()
        try:
            return real(*words, **more)
        finally:
            depth -= 1
            if not depth:
                spent += time.process_time() - began
    return run
builtins.__import__, importlib.import_module = counted(plain), counted(by_name)
try:
    from shardwise.__main__ import main
    main()
finally:
    with open({file!r}, "w") as file:
        file.write(f"{{spent}} {{len(sys.modules)}}")
"""


def run(source: Path, words: str, code: str) -> float:
    """Run a command with the package of ``source``; return its CPU seconds."""
    environment = os.environ | {"PYTHONPATH": str(source), "SHARDWISE_HISTORY": "off", "COLUMNS": "132"}
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "startup_bytecode")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", code if words else "pass", *shlex.split(words)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 2):  # a wrong key is 2, findings or no plan 1
        raise SystemExit(f"{words} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def inside(source: Path, words: str) -> dict[str, Any]:
    """Imports of one run."""
    if not words:
        return {"import_cpu_s": 0.0, "modules": 0}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "facts"
        run(source, words, INSIDE.format(file=str(file)))
        spent, modules = file.read_text().split()
        return {"import_cpu_s": float(spent), "modules": int(modules)}


def measure(sources: dict[str, Path], rounds: int, only: list[str]) -> dict[str, Any]:
    """All verbs of all trees, in turn."""
    found: dict[str, Any] = {}
    for name in only:
        words = VERBS[name]
        for source in sources.values():
            run(source, words, RUN)  # writes the bytecode
        samples: dict[str, list[float]] = {tree: [] for tree in sources}
        for turn in range(rounds):
            for tree in list(sources)[:: 1 if turn % 2 else -1]:
                samples[tree].append(run(sources[tree], words, RUN))
        looks = {tree: inside(source, words) for tree, source in sources.items()}
        found[name] = {
            tree: {
                "cpu_s": round(statistics.median(samples[tree]), 3),
                "import_cpu_s": round(looks[tree]["import_cpu_s"], 3),
                "modules": looks[tree]["modules"],
                "samples_s": [round(sample, 4) for sample in samples[tree]],
            }
            for tree in sources
        }
        pairs = zip(*(samples[tree] for tree in sources), strict=True)
        if len(sources) == 2:
            found[name]["median_ratio"] = round(statistics.median(after / before for before, after in pairs), 3)
        shown = [found[name][tree][key] for tree in sources for key in ("cpu_s", "import_cpu_s", "modules")]
        print(name, *shown, found[name].get("median_ratio", ""), flush=True)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path, help="folder src of another tree")
    parser.add_argument("--only", nargs="+", choices=VERBS, help="measure these; the others of the file stay")
    given = parser.parse_args()
    sources = ({"before": given.before.resolve()} if given.before else {}) | {"after": ROOT / "src"}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    file = Path(__file__).with_name(f"verbs_cpu_{date}.json")
    kept = json.loads(file.read_text())["found"] if given.only and file.exists() else {}
    document = {
        "schema": 1,
        "date": date,
        "machine": f"{os.cpu_count()} × {platform.machine()}",
        "python": platform.python_version(),
        "commands": VERBS,
        "found": kept | measure(sources, given.rounds, given.only or list(VERBS)),
    }
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(file)


if __name__ == "__main__":
    main()
