"""How far `shardwise.cost.time.kernels` is from published operator sweeps, and whether its
constants are still the best.

    python benchmarks/accuracy/fit_kernels.py            # errors of the constants in use; writes results/kernels.*
    python benchmarks/accuracy/fit_kernels.py --check    # errors must be those recorded; exit status 1 if not
    python benchmarks/accuracy/fit_kernels.py --refit    # also fits them again, and with held-out shapes (a minute)

Errors are predicted over measured seconds minus one. The null model is one constant efficiency, the median of the same
rows. Held out means: five folds over the set {m, k, n}, so that the forward and both backward products of one linear
layer are never on both sides. The sweeps time attention through Transformer Engine, which adds its call (some 60 µs
forward) to each; that offset is fitted here and kept out of the constants.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.cost.time import kernels
from shardwise.hardware.gpus import Generation, GpuSpec, find_gpu, generation_of, generations

HERE = Path(__file__).parent
GPUS = {"A100 PCIe 80GB": "A100-PCIe-80GB", "B200 SXM": "B200-SXM-180GB"}
# name of the field, start, lower and upper bound of the search
FITTED: dict[str, tuple[tuple[str, float, float, float], ...]] = {
    "ampere": (
        ("burst", 0.97, 0.5, 1.2),
        ("ramp", 175, 32, 1000),
        ("wave", 0.6, 0, 1),
        ("halving", 0.3, 0, 1),
        ("operand", 0.4, 0.2, 1),
    ),
    "blackwell": (
        ("burst", 1.0, 0.5, 1.2),
        ("sustained_flops", 1.1e15, 5e14, 2e15),
        ("ramp", 500, 32, 1000),
        ("wave", 0.8, 0, 1),
        ("halving", 0.2, 0, 1),
        ("operand", 0.5, 0.2, 1),
    ),
}
Row = dict[str, str]


@dataclass(frozen=True)
class Errors:
    """Summary of relative errors."""

    rows: int
    median: float
    p90: float
    worst: float
    bias: float  # the median with its sign

    @staticmethod
    def of(errors: Sequence[float]) -> Errors:
        """Summarise; at least one error."""
        size = sorted(abs(e) for e in errors)
        return Errors(
            len(size), statistics.median(size), size[int(0.9 * (len(size) - 1))], size[-1], statistics.median(errors)
        )

    def __str__(self) -> str:
        return (
            f"{self.rows:4d} rows  median {self.median:6.1%}  p90 {self.p90:6.1%}  worst {self.worst:6.1%}  "
            f"bias {self.bias:+6.1%}"
        )


def read_rows() -> list[Row]:
    """The trimmed copy of the operator tables."""
    with (HERE / "data" / "operators.csv").open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def product(row: Row) -> tuple[int, int, int]:
    """m, k, n of a product."""
    return int(row["m"]), int(row["k"]), int(row["n"])


def measured_s(row: Row, gpu: GpuSpec) -> float:
    """Measured seconds, from the published efficiency and peak; an attention's counts the whole square."""
    if row["op"] == "matmul":
        m, k, n = product(row)
        flops = 2.0 * m * k * n
    else:
        heads, dims = int(row["k"].split("/")[0]), [int(d) for d in row["n"].split("/")]
        flops = 2.0 * heads * int(row["m"]) ** 2 * sum(dims) * (2.5 if row["op"] == "sdp_bwd" else 1.0)
    return flops / (float(row["efficiency"]) * gpu.peak_flops["bf16"])


def predicted_s(row: Row, gpu: GpuSpec) -> float:
    """What the module in use says."""
    if row["op"] == "matmul":
        m, k, n = product(row)
        return kernels.matmul_s(gpu, m, k, n, accumulate=row["result"] == "fp32")
    heads, kv_heads = (int(h) for h in row["k"].split("/"))
    return kernels.attention_s(
        gpu,
        batch=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=sum(int(d) for d in row["n"].split("/")) // 2,
        rows=int(row["m"]),
        causal=True,
        backward=row["op"] == "sdp_bwd",
    )


def errors_of(rows: Sequence[Row], gpu: GpuSpec, offset_s: float = 0.0) -> list[float]:
    """Relative error of each row; ``offset_s`` is added to each prediction."""
    return [(predicted_s(row, gpu) + offset_s) / measured_s(row, gpu) - 1 for row in rows]


def null_errors(rows: Sequence[Row], gpu: GpuSpec) -> list[float]:
    """Errors of one constant efficiency."""
    constant = statistics.median(float(row["efficiency"]) for row in rows)
    return [float(row["efficiency"]) / constant - 1 for row in rows]


def use(name: str, constants: Generation) -> None:
    """Make the module predict with these constants."""
    generations()[name] = constants
    kernels._machine_of.cache_clear()
    kernels._matmul_s.cache_clear()


def fit(name: str, rows: Sequence[Row], gpu: GpuSpec, steps: int = 800) -> Generation:
    """Random search (fixed seed) for the least mean absolute log error; leaves the module with the result in use."""
    rng = random.Random(0)
    fields = FITTED[name]
    start: dict[str, Any] = {field: value for field, value, _, _ in fields}
    best = dataclasses.replace(generations()[name], **start)

    def loss(constants: Generation) -> float:
        use(name, constants)
        return statistics.fmean(abs(math.log1p(error)) for error in errors_of(rows, gpu))

    least, width = loss(best), 0.3
    for step in range(steps):
        changed: dict[str, Any] = {}
        for field, _, low, high in rng.sample(fields, rng.choice((1, 1, 2))):
            value = getattr(best, field) * math.exp(rng.gauss(0, width)) + (rng.gauss(0, 0.02) if high <= 1 else 0)
            changed[field] = min(high, max(low, value))
        trial = dataclasses.replace(best, **changed)
        score = loss(trial)
        if score < least:
            best, least = trial, score
        if step % 200 == 199:
            width *= 0.6
    use(name, best)
    return best


def held_out(name: str, rows: Sequence[Row], gpu: GpuSpec, folds: int = 5) -> list[float]:
    """Errors of each row under constants that were fitted without its shape."""
    shapes = sorted({tuple(sorted(product(row))) for row in rows})
    random.Random(1).shuffle(shapes)
    errors: list[float] = []
    for fold in range(folds):
        out = set(shapes[fold::folds])
        fit(name, [row for row in rows if tuple(sorted(product(row))) not in out], gpu, steps=400)
        errors += errors_of([row for row in rows if tuple(sorted(product(row))) in out], gpu)
    return errors


def offset_of(rows: Sequence[Row], gpu: GpuSpec) -> float:
    """The constant seconds that the sweep's own call adds to each row."""
    return min(
        (n * 2e-6 for n in range(51)), key=lambda offset: sum(abs(math.log1p(e)) for e in errors_of(rows, gpu, offset))
    )


def report(refit: bool) -> dict[str, object]:
    """Print the tables and return them."""
    result: dict[str, object] = {}
    rows = read_rows()
    for label, gpu_name in GPUS.items():
        gpu = find_gpu(gpu_name)
        assert gpu is not None, gpu_name
        name = generation_of(gpu)
        assert name is not None
        own = [row for row in rows if row["gpu"] == label]
        products = [row for row in own if row["op"] == "matmul"]
        long = {id(row) for row in products if measured_s(row, gpu) > 1e-3}
        groups: dict[str, Callable[[Row], bool]] = {
            "products": lambda row: True,
            "products, a side below 1024": lambda row: min(product(row)) < 1024,
            "products over 1 ms": lambda row, long=long: id(row) in long,  # type: ignore[misc]
            "products into fp32": lambda row: row["result"] == "fp32",
        }
        table: dict[str, object] = {}
        for title, keep in groups.items():
            chosen = [row for row in products if keep(row)]
            model, null = Errors.of(errors_of(chosen, gpu)), Errors.of(null_errors(chosen, gpu))
            table[title] = {"model": dataclasses.asdict(model), "null": dataclasses.asdict(null)}
            print(f"{label:15s} {title:28s} model {model}\n{'':45s}null  {null}")
        for op in ("sdp_fwd", "sdp_bwd"):
            chosen = [row for row in own if row["op"] == op]
            offset = offset_of(chosen, gpu)
            model, null = Errors.of(errors_of(chosen, gpu, offset)), Errors.of(null_errors(chosen, gpu))
            table[op] = {"model": dataclasses.asdict(model), "null": dataclasses.asdict(null), "offset_s": offset}
            print(f"{label:15s} {op:28s} model {model}\n{'':45s}null  {null}   offset {offset * 1e6:.0f} µs")
        if refit:
            table.update(refitted(name, products, gpu))
        result[label] = table
    return result


def refitted(name: str, products: Sequence[Row], gpu: GpuSpec) -> dict[str, object]:
    """Fit again on all rows and with shapes held out; the module's own constants are put back."""
    own = generations()[name]
    out = Errors.of(held_out(name, products, gpu))
    best = fit(name, products, gpu)
    again = Errors.of(errors_of(products, gpu))
    use(name, own)
    constants = {field: float(f"{getattr(best, field):.3g}") for field, *_ in FITTED[name]}
    print(f"{'':15s} {'fitted again':28s}       {again}\n{'':15s} {'shapes held out':28s}       {out}")
    print(f"{'':16s}{constants}")
    return {"refit": dataclasses.asdict(again), "held_out": dataclasses.asdict(out), "constants": constants}


def plot(path: Path) -> bool:
    """Measured against predicted efficiency of the products; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(GPUS), figsize=(11, 5))
    for axis, (label, gpu_name) in zip(axes, GPUS.items(), strict=True):
        gpu = find_gpu(gpu_name)
        assert gpu is not None
        rows = [row for row in read_rows() if row["gpu"] == label and row["op"] == "matmul"]
        seen = [float(row["efficiency"]) for row in rows]
        said = [e * measured_s(row, gpu) / predicted_s(row, gpu) for e, row in zip(seen, rows, strict=True)]
        axis.scatter(seen, said, s=9, alpha=0.6)
        axis.plot([0, 0.9], [0, 0.9], linewidth=1, color="grey")
        axis.set(title=label, xlabel="measured, part of peak", ylabel="predicted", xlim=(0, 0.9), ylim=(0, 0.9))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Where ``now`` lacks a number of ``before`` or differs from it by more than a thousandth (0.001 of an error)."""
    if isinstance(before, dict):
        inner = now if isinstance(now, dict) else {}
        return [line for key in before for line in differences(before[key], inner.get(key), f"{path}/{key}")]
    near = isinstance(now, int | float) and abs(float(before) - float(now)) <= 1e-3
    return [] if near else [f"{path}: recorded {before}, now {now}"]


def check(path: Path, table: Any, left_out: Sequence[str]) -> None:
    """Leave with status 1 if ``table`` is not what ``path`` has recorded, but for keys that only a fit computes."""

    def kept(value: Any) -> Any:
        return {k: kept(v) for k, v in value.items() if k not in left_out} if isinstance(value, dict) else value

    found = differences(kept(json.loads(path.read_text())), table)
    if found:
        raise SystemExit("\n".join(["not as recorded:", *found]))
    print("as recorded")


def main() -> None:
    """Print the tables, write them and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refit", action="store_true", help="fit again, with and without held-out shapes")
    parser.add_argument("--check", action="store_true", help="compare with the recorded errors, write nothing")
    arguments = parser.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    path = results / "kernels.json"
    table = report(arguments.refit)
    if arguments.check:
        check(path, table, ("refit", "held_out", "constants"))
        return
    if not arguments.refit and path.exists():  # keep what only --refit computes
        before = json.loads(path.read_text())
        for label, kept in before.items():
            for key in ("refit", "held_out", "constants"):
                if key in kept and isinstance(table.get(label), dict):
                    table[label][key] = kept[key]  # type: ignore[index]
    path.write_text(json.dumps(table, indent=1) + "\n")
    plot(results / "kernels.png")


if __name__ == "__main__":
    main()
