"""All accuracy tables and plots again: results/*.json and *.csv, the plots, and README.md.

python benchmarks/accuracy/run.py             # two minutes; what needs real ranks is from the last results
python benchmarks/accuracy/run.py --real      # also trains on real CPU ranks and runs --prove: many minutes
python benchmarks/accuracy/run.py --check     # predictions must be those recorded; exit status 1 if not
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage
import fit_collectives
import fit_kernels
import memory
import plots
import sources
import speed
import tables
import targets
from rows import load_rows, records_left_out

from shardwise.cost.flops import palm_flops
from shardwise.hardware.gpus import find_gpu

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHORT = (",", ":")  # separators of a row
SLOW = ("cpu_peak", "persistent", "estimate_cpu")  # they start real ranks; modules of this folder with a main
Document = dict[str, Any]


def digits(value: float | None) -> float | None:
    """Six digits: files stay small and do not differ by the last bit."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def memory_document() -> Document:
    """Every published row with memory, told and untold."""
    found, out = [], records_left_out()
    loaded = load_rows()
    for row in loaded:
        if not (row.memory_bytes or row.oom or row.memory_kind == "fits"):
            continue
        told, untold = memory.score(row), memory.score(row, told=False)
        name = memory.COMPARED.get(row.memory_kind)
        found.append(
            {
                "source": row.source,
                "framework": row.framework,
                "label": row.label,
                "kind": "oom" if row.oom else row.memory_kind,
                "outcome": "oom" if row.oom else "ran",
                "measured_bytes": row.memory_bytes,
                "predicted_bytes": getattr(told.estimate, name) if name else None,
                "error": digits(told.error),
                "untold_predicted_bytes": getattr(untold.estimate, name) if name else None,
                "untold_error": digits(untold.error),
                "measured_reserved_bytes": row.reserved_bytes,
                "reserved_error": digits(told.reserved_error),
                "untold_reserved_error": digits(untold.reserved_error),
                "limit_bytes": row.cluster.device_memory_bytes,
                "device_bytes": told.estimate.device,
                "fits": told.fits,
                "untold_device_bytes": untold.estimate.device,
                "untold_fits": untold.fits,
            }
        )
    return {"schema": 1, "records": len(loaded) + len(out), "left_out": out, "rows": targets.worst_first(found)}


def speed_document() -> Document:
    """Every published row with a time, and the groups in which a plan is chosen."""
    timed, problems = speed.predict(load_rows())
    work = [palm_flops(one.row.profile, (one.row.plan.global_batch or 1) / one.row.gpus) for one in timed]
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one, flops in zip(timed, work, strict=True):
        rates[one.row.gpu, one.row.plan.precision].append(flops / one.measured_s)
    pooled = {key: statistics.median(values) for key, values in rates.items()}
    found: list[Document] = []
    groups: dict[tuple[object, ...], list[Document]] = defaultdict(list)
    for one, flops in zip(timed, work, strict=True):
        row, measured = one.row, one.measured_s
        untold = speed.seconds_of(row, plain=True)
        line = {
            "source": row.source,
            "framework": row.framework,
            "gpu": row.gpu,
            "label": row.label,
            "measured_s": digits(measured),
            "predicted_s": digits(one.predicted.step_s),
            "error": digits(one.error),
            "untold_error": digits(untold.step_s / measured - 1),
            "null_error": digits(one.null_error),
            "pooled_null_error": digits(flops / pooled[row.gpu, row.plan.precision] / measured - 1),
        }
        found.append(line)
        if row.source == speed.CHOICE:
            groups[row.group].append(line | {"rule": speed.rule_of_thumb(one), "untold_s": untold.step_s})
    covered = coverage.left_out(coverage.ratios(timed))
    choices = [targets.choose(members) for members in groups.values() if len(members) > 1]
    rounded = [{k: digits(v) if isinstance(v, float) else v for k, v in one.items()} for one in choices]
    return {
        "schema": 1,
        "problems": problems,
        "choice": speed.CHOICE,
        "coverage": {"groups": len(covered), "mean": digits(statistics.fmean(share for *_, share in covered.values()))},
        "groups": sorted(rounded, key=lambda one: -one["model"]),
        "rows": targets.worst_first(found),
    }


def operator_rows() -> list[Document]:
    """Every published operator with its prediction; attention with the offset of the sweep's own call."""
    found = []
    rows = fit_kernels.read_rows()
    for label, name in fit_kernels.GPUS.items():
        gpu = find_gpu(name)
        assert gpu is not None, name
        for op in ("matmul", "sdp_fwd", "sdp_bwd"):
            own = [row for row in rows if row["gpu"] == label and row["op"] == op]
            offset = 0.0 if op == "matmul" else fit_kernels.offset_of(own, gpu)
            for row in own:
                said, has = fit_kernels.predicted_s(row, gpu) + offset, fit_kernels.measured_s(row, gpu)
                words = f"{op} {row['m']} x {row['k']} x {row['n']} into {row['result']}"
                found.append(_timed(label, words, has, said))
    return targets.worst_first(found)


def collective_rows() -> list[Document]:
    """Every published collective with its prediction."""
    found = []
    for row in fit_collectives.read_rows():
        words = f"{row['kind']} {row['bytes']} B on {row['nodes']} x {row['per_node']}"
        found.append(_timed(row["gpu"], words, float(row["time_us"]) * 1e-6, fit_collectives.predicted_s(row)))
    return targets.worst_first(found)


def _timed(gpu: str, label: str, measured_s: float, predicted_s: float) -> Document:
    error = digits(predicted_s / measured_s - 1)
    return {"gpu": gpu, "label": label} | {
        "measured_s": digits(measured_s),
        "predicted_s": digits(predicted_s),
        "error": error,
    }


def planner_document(*, prove: bool, repeats: int) -> Document:
    """The planner's speed, measured now; without ``prove`` what that needs is from the last results."""
    path = targets.RESULTS / "planner_speed.json"
    before = json.loads(path.read_text())["figures"] if path.exists() else {}
    command = [sys.executable, str(ROOT / "benchmarks" / "planner_speed.py"), "--repeats", str(repeats)]
    subprocess.run([*command, "--output", str(path), *(["--prove"] if prove else [])], check=True)
    found: Document = json.loads(path.read_text())
    found["figures"] |= {k: v for k, v in before.items() if k not in found["figures"] and k.startswith("prove_")}
    return found


def recorded_document(before: Document) -> Document:
    """Name → date. A file of the slow ones keeps its date as long as its content is the same."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    found: Document = {name: today for name in targets.NEEDED if name not in SLOW}
    measured = targets.RESULTS / "planner_speed.json"
    if measured.exists():  # with no repeats it keeps what it had
        found["planner_speed"] = json.loads(measured.read_text())["recorded"]
    for name in SLOW:
        path = targets.RESULTS / f"{name}.json"
        if path.exists():
            mark = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            kept = before.get(name, "").split(" ")
            same = len(kept) == 2 and kept[1] == mark
            found[name] = before[name] if same else f"{_date_of(path)} {mark}"
    return found


def _date_of(path: Path) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))


def write_json(path: Path, document: Document) -> None:
    """A line for each row of a list of tables, so that differences can be read."""
    parts = []
    for key, value in document.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = (
            "[\n" + ",\n".join(f"  {json.dumps(one, separators=SHORT)}" for one in value) + "\n ]"
            if rows
            else json.dumps(value)
        )
        parts.append(f" {json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def write_csv(path: Path, rows: Sequence[Document], keys: Sequence[str] | None = None) -> None:
    """The rows in their order; without ``keys`` all columns of the first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, keys or list(rows[0]), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def changes(before: Document, now: Document) -> Iterator[str]:
    """Rows whose prediction is not what is recorded, to a thousandth."""
    recorded = {_identity(row, n): row for n, row in _numbered(before["rows"])}
    current = {_identity(row, n): row for n, row in _numbered(now["rows"])}
    for key in recorded.keys() ^ current.keys():
        yield f"{key[0]}: only in {'the record' if key in recorded else 'what is predicted now'}"
    for key in sorted(recorded.keys() & current.keys()):
        for name in ("error", "untold_error", "fits", "untold_fits"):
            old, new = recorded[key].get(name), current[key].get(name)
            same = old == new or (
                isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=0, abs_tol=1e-3)
            )
            if not same:
                yield f"{key[0]}: {name} recorded {old}, now {new}"


def _numbered(rows: Iterable[Document]) -> Iterator[tuple[int, Document]]:
    """Rows with a number among those of the same label and measurement, which differ only in what no column says."""
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: (row["label"], row["error"] or 0.0)):
        key = (row["label"], row.get("measured_s"), row.get("measured_bytes"))
        yield seen[key], row
        seen[key] += 1


def _identity(row: Document, number: int) -> tuple[Any, ...]:
    return row["label"], str(row.get("measured_s")), str(row.get("measured_bytes")), number


def check() -> None:
    """Leave with status 1 if a published row is predicted otherwise than recorded."""
    recorded = targets.read_results()
    found = [*changes(recorded["published_memory"], memory_document())]
    found += changes(recorded["published_speed"], speed_document())
    if found:
        raise SystemExit("\n".join([f"{len(found)} not as recorded; make accuracy:", *found[:40]]))
    print("as recorded")


def real_runs() -> None:
    """What starts real ranks; each writes its own results."""
    for name in SLOW:
        if (HERE / f"{name}.py").exists():
            subprocess.run([sys.executable, "-m", f"benchmarks.accuracy.{name}"], check=True, cwd=ROOT)


def main() -> None:
    """Run all, write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="also what needs real ranks or more than seconds")
    parser.add_argument("--prove", action="store_true", help="of --real only the run of --prove")
    parser.add_argument("--check", action="store_true", help="compare predictions with the record, write nothing")
    parser.add_argument("--render", action="store_true", help="only README.md and the plots, from the last results")
    parser.add_argument("--repeats", type=int, default=5, help="samples of the planner's speed; 0 keeps the last")
    options = parser.parse_args()
    if options.check:
        check()
        return
    results = targets.RESULTS
    results.mkdir(exist_ok=True)
    if not options.render:
        if options.real:
            real_runs()
        if options.repeats:
            write_json(
                results / "planner_speed.json",
                planner_document(prove=options.real or options.prove, repeats=options.repeats),
            )
        for script in ("fit_kernels.py", "fit_collectives.py"):
            subprocess.run([sys.executable, str(HERE / script)], check=True, stdout=subprocess.DEVNULL)
        write_csv(results / "kernels.csv", operator_rows())
        write_csv(results / "collectives.csv", collective_rows())
        published = {"published_memory": memory_document(), "published_speed": speed_document()}
        write_json(results / "left_out.json", sources.left_out_document())
        write_json(results / "held_back.json", sources.held_back_document())
        for name, document in published.items():
            write_json(results / f"{name}.json", document)
            write_csv(results / f"{name}.csv", document["rows"])
        write_csv(results / "choice.csv", published["published_speed"]["groups"])
        path = results / "recorded.json"
        write_json(path, recorded_document(json.loads(path.read_text()) if path.exists() else {}))
    documents = targets.read_results()
    (HERE / "README.md").write_text(tables.render(documents))
    plots.draw(documents, results)
    for one in targets.all_targets(documents):
        print(f"{targets.MARKS[one.ok]:8s} {one.what}: {one.found} (target {one.aim})")


if __name__ == "__main__":
    main()
