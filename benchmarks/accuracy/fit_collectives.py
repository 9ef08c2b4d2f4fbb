"""How far `shardwise.cost.time.collective_time` is from published NCCL sweeps, and whether its
constants are still the best.

    python benchmarks/accuracy/fit_collectives.py            # errors of the constants in use; results/collectives.*
    python benchmarks/accuracy/fit_collectives.py --check    # errors must be those recorded; exit status 1 if not
    python benchmarks/accuracy/fit_collectives.py --refit    # also fits those of a node again

Errors are predicted over measured seconds minus one. The null model is the rule of thumb: 50 µs and
80 % of the slowest link as bus bandwidth, whatever the ranks. ``nccl_h100_tuning.json`` is NCCL's own model
of H100 nodes on InfiniBand, not a measurement; the table compares with its fastest algorithm at 64 MiB and 1 GiB.
The constants were chosen on these same rows, rounded by hand; nothing is held out.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fit_kernels import Errors, check

from shardwise.cost.time import collective_time as collectives
from shardwise.cost.time.collective_time import CollectiveKind, Group, collective_s, wire_share
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import Link, find_gpu, generations

HERE = Path(__file__).parent
GPUS = {
    "A100": "A100-SXM-80GB",
    "V100": "V100-SXM-32GB",
    "H100": "H100-SXM-80GB",
    "H200": "H200-SXM-141GB",
    "B200": "B200-SXM-180GB",
}
CARD_BYTES_PER_S = 50e9  # 400 Gbit/s for each device, in the B200 sweep and in NCCL's model
MIB = 1024**2
Row = dict[str, str]


def cluster_of(gpu_name: str, nodes: int) -> ClusterSpec:
    """Nodes of eight devices with NVLink and a 400 Gbit/s card each."""
    gpu = find_gpu(GPUS[gpu_name])
    assert gpu is not None, gpu_name
    return ClusterSpec(
        device="cuda",
        device_name=gpu.name,
        nodes=nodes,
        devices_per_node=8,
        gpu=gpu,
        link=gpu.nvlink,
        network=Link(kind="network", bytes_per_s=CARD_BYTES_PER_S, source="efa400" if gpu_name == "B200" else ""),
    )


def read_rows() -> list[Row]:
    """The trimmed sweeps, without rows where an algorithm was switched off by hand."""
    with (HERE / "data" / "collectives.csv").open() as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        return [row for row in rows if "off" not in row["algorithm"]]


def kind_of(row: Row) -> CollectiveKind:
    """The row's collective."""
    return (
        "all_reduce" if row["kind"] == "all_reduce" else "all_gather" if "gather" in row["kind"] else "reduce_scatter"
    )


def predicted_s(row: Row) -> float:
    """What the module in use says."""
    nodes, per_node = int(row["nodes"]), int(row["per_node"])
    return collective_s(
        kind_of(row), int(row["bytes"]), Group(nodes * per_node, per_node), cluster_of(row["gpu"], nodes)
    )


def null_s(row: Row) -> float:
    """80 % of the slowest link, and 50 µs."""
    nodes, per_node = int(row["nodes"]), int(row["per_node"])
    cluster = cluster_of(row["gpu"], nodes)
    link = cluster.link.bytes_per_s if cluster.link else None
    slowest = min(link or math.inf, CARD_BYTES_PER_S * 8 if nodes > 1 else math.inf)
    return 50e-6 + int(row["bytes"]) * wire_share(kind_of(row), nodes * per_node) / (0.8 * slowest)


def errors_of(rows: Sequence[Row]) -> list[float]:
    """Relative error of each row."""
    return [predicted_s(row) / (float(row["time_us"]) * 1e-6) - 1 for row in rows]


def size_of(row: Row) -> str:
    """Which of three ranges of message size."""
    size = int(row["bytes"])
    return "from 64 MiB" if size >= 64 * MIB else "1 to 64 MiB" if size >= MIB else "below 1 MiB"


def report() -> dict[str, object]:
    """Print the tables of measured rows and return them."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read_rows():
        groups[row["gpu"], row["nodes"], size_of(row)].append(row)
    result: dict[str, object] = {}
    for (gpu, nodes, size), rows in sorted(groups.items()):
        model = Errors.of(errors_of(rows))
        null = Errors.of([null_s(row) / (float(row["time_us"]) * 1e-6) - 1 for row in rows])
        title = f"{gpu}, {nodes} node{'s' if nodes != '1' else ''}, {size}"
        result[title] = {"model": dataclasses.asdict(model), "null": dataclasses.asdict(null)}
        print(f"{title:32s} model {model}\n{'':32s} null  {null}")
    return result


def nccl_model() -> dict[str, object]:
    """Compare with the tuning table of NCCL: the fastest of its algorithms and protocols against ours."""
    table: dict[str, Any] = json.loads((HERE / "data" / "nccl_h100_tuning.json").read_text())
    kinds: dict[CollectiveKind, tuple[str, ...]] = {
        "all_gather": ("h100_agrs_ring",),
        "all_reduce": ("h100_ar_ring", "h100_ar_tree", "h100_ar_nvls_tree"),
    }
    result: dict[str, object] = {}
    for kind, algorithms in kinds.items():
        for message in (64 * MIB, 1024 * MIB):
            errors = []
            for key in table[algorithms[0]]:
                nodes, per_node = (int(n) for n in key.split(","))
                pairs: list[list[float]] = []
                for algorithm in algorithms:
                    entry = table[algorithm].get(key, [])
                    pairs += entry if entry and isinstance(entry[0], list) else [entry] if entry else []
                fastest = min(latency * 1e-6 + message / (rate * 1e9) for latency, rate in pairs)
                group = Group(nodes * per_node, per_node)
                errors.append(collective_s(kind, message, group, cluster_of("H100", nodes)) / fastest - 1)
            title = f"NCCL's model, {kind}, {message // MIB} MiB"
            result[title] = dataclasses.asdict(Errors.of(errors))
            print(f"{title:38s} {Errors.of(errors)}")
    return result


def refit(steps: int = 600) -> dict[str, object]:
    """Random search (fixed seed) over a node's constants for the least mean absolute log error; puts them back."""
    rows = [row for row in read_rows() if row["nodes"] == "1"]
    rng = random.Random(0)
    before = {name: getattr(collectives, name) for name in ("FEW_RANKS", "FAST_PART", "FAST_START", "FULL_START")}
    rings = {name: found for name, found in generations().items() if found.ring is not None}

    def loss() -> float:
        collectives._fits.cache_clear()
        return statistics.fmean(abs(math.log1p(error)) for error in errors_of(rows))

    def changed(value: Any, width: float) -> Any:
        if isinstance(value, tuple):
            return tuple(part * math.exp(rng.gauss(0, width)) for part in value)
        return value * math.exp(rng.gauss(0, width))

    least = first = loss()
    for step in range(steps):
        width = 0.15 if step < steps // 2 else 0.05
        name = rng.choice([*before, *rings])
        old = generations()[name].ring if name in rings else getattr(collectives, name)
        for value in (changed(old, width), old):
            if name in rings:
                generations()[name] = dataclasses.replace(rings[name], ring=value)
            else:
                setattr(collectives, name, value)
            if value is not old and (score := loss()) < least:
                least = score
                break
    best = {name: getattr(collectives, name) for name in before}
    best |= {f"RING {name}": generations()[name].ring for name in rings}
    for name, value in before.items():
        setattr(collectives, name, value)
    generations().update(rings)
    collectives._fits.cache_clear()
    print(f"fitted again: mean absolute log error {first:.3f} -> {least:.3f} with {best}")
    return {"in_use": first, "refit": least, "constants": best}


def plot(path: Path) -> bool:
    """Bus bandwidth over message size, measured and predicted; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sweeps: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read_rows():
        sweeps[row["gpu"], row["nodes"], row["per_node"]].append(row)
    figure, axis = plt.subplots(figsize=(9, 6))
    shown = {key: rows for key, rows in sweeps.items() if len(rows) > 8 and key[2] in ("2", "8")}
    for (gpu, nodes, per_node), rows in sorted(shown.items()):
        rows = sorted((row for row in rows if row["kind"] == "all_reduce"), key=lambda row: int(row["bytes"]))
        sizes = [int(row["bytes"]) / MIB for row in rows]
        wires = [int(r["bytes"]) * wire_share("all_reduce", int(nodes) * int(per_node)) / 1e9 for r in rows]
        (line,) = axis.loglog(
            sizes, [w / predicted_s(r) for w, r in zip(wires, rows, strict=True)], label=f"{nodes} × {per_node} {gpu}"
        )
        seen = [w / (float(r["time_us"]) * 1e-6) for w, r in zip(wires, rows, strict=True)]
        axis.loglog(sizes, seen, "o", markersize=4, color=line.get_color())
    axis.set(xlabel="all_reduce message, MiB", ylabel="bus bandwidth, GB/s (dots measured, lines predicted)")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def main() -> None:
    """Print the tables, write them and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refit", action="store_true", help="fit the constants of a node again")
    parser.add_argument("--check", action="store_true", help="compare with the recorded errors, write nothing")
    arguments = parser.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    table = {"measured": report(), "nccl_model": nccl_model()}
    path = results / "collectives.json"
    if arguments.check:
        check(path, table, ("refit",))
        return
    if arguments.refit:
        table["refit"] = refit()
    elif path.exists() and "refit" in (before := json.loads(path.read_text())):
        table["refit"] = before["refit"]
    path.write_text(json.dumps(table, indent=1) + "\n")
    plot(results / "collectives.png")


if __name__ == "__main__":
    main()
