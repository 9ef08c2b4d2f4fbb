"""The accuracy report in words and tables, from results/*.json alone: nothing is predicted or measured here."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import sources
from targets import (
    ALIKE,
    GIB,
    MARKS,
    PEAKS,
    Document,
    Errors,
    alike,
    all_targets,
    each_once,
    each_plan,
    is_megatron,
    part,
    quantile,
    quantity,
    verdicts,
    without_largest,
    worst_first,
)

WORST = 12  # rows of a table of the worst


def gib(value: float | None) -> str:
    """Bytes in GiB."""
    return "–" if value is None else f"{value / GIB:.2f}"


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; all but the first column to the right."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(map(str, line))} |" for line in lines), ""]


def errors_line(name: str, found: Errors | None, *, signed: bool = True) -> list[str]:
    """One line of a table of errors; not ``signed`` where only the size of the worst was recorded."""
    if found is None:
        return [name, "0", "–", "–", "–", "–"]
    return [
        name,
        str(found.rows),
        part(found.median),
        part(found.p90),
        part(found.worst, signed),
        part(found.bias, True),
    ]


def memory_section(document: Document) -> list[str]:
    """Tables of published memory."""
    rows = document["rows"]
    groups: dict[tuple[str, str], list[Document]] = defaultdict(list)
    for row in rows:
        if row.get("error") is not None:
            groups[row["source"], row["kind"]].append(row)
        if row.get("reserved_error") is not None:
            both = {"error": row["reserved_error"], "untold_error": row["untold_reserved_error"]}
            groups[row["source"], "reserved, beside allocated"].append(both)
    lines = []
    for (source, kind), members in sorted(groups.items()):
        told, untold = (Errors.of(one[key] for one in members) for key in ("error", "untold_error"))
        lines.append([*errors_line(f"{source}, {kind}", told), part(untold.median if untold else None)])
    named: dict[str, list[Document]] = {
        "**all of allocated, active, reserved**": [row for row in rows if row["kind"] in ALIKE],
        "the same without Megatron": [row for row in rows if row["kind"] in ALIKE and not is_megatron(row)],
    }
    for name, members in named.items():
        untold = Errors.of(alike(members, "untold_error"))
        lines.append([*errors_line(name, Errors.of(alike(members))), part(untold.median if untold else None)])
    counted = [row for row in rows if row["kind"] in ALIKE]
    once = [part(each_once(counted, key)) for key in ("error", "untold_error")]
    lines.append(["the same, median of the sources' medians", "–", once[0], "–", "–", "–", once[1]])
    out = ["## Published memory", "", "![predicted against measured](results/published_memory.png)", ""]
    out += table(("source and kind", "rows", "median", "p90", "worst", "bias", "untold median"), lines)
    out += [f"The {WORST} worst of {len(rows)} rows ([all](results/published_memory.csv)):", ""]
    out += table(
        ("row", "kind", "measured GiB", "predicted GiB", "error", "untold"),
        (
            [
                row["label"],
                row["kind"],
                gib(row["measured_bytes"]),
                gib(row["predicted_bytes"]),
                part(row["error"], True),
                part(row["untold_error"], True),
            ]
            for row in worst_first(rows)[:WORST]
        ),
    )
    for told, key, size in (("told", "fits", "device_bytes"), ("untold", "untold_fits", "untold_device_bytes")):
        missed, refused, *_ = verdicts(rows, key)
        for title, members in (("ran out of memory, called “fits”", missed), ("ran, called “does not fit”", refused)):
            more = f", the {WORST} farthest from it" if len(members) > WORST else ""
            out += [f"{told.capitalize()}, {title}: {len(members) or 'none'}{more}.", ""]
            members.sort(key=lambda row: -abs(math.log((row[size] or 1) / (row["limit_bytes"] or 1))))
            shown = [[row["label"], gib(row[size]), gib(row["limit_bytes"])] for row in members[:WORST]]
            out += table(("row", "predicted device GiB", "device has GiB"), shown) if shown else []
    return out


def speed_section(document: Document) -> list[str]:
    """Tables of published step times."""
    rows = document["rows"]
    groups: dict[str, list[Document]] = defaultdict(list)
    for row in rows:
        groups[f"{row['source']}, {row['gpu']}"].append(row)
    named = [*groups.items(), ("**all**", rows), ("without the source that has most", without_largest(rows))]
    lines = []
    for name, members in named:
        null, pooled = (Errors.of(row[key] for row in members) for key in ("null_error", "pooled_null_error"))
        untold = Errors.of(row["untold_error"] for row in members)
        medians = [part(one.median if one else None) for one in (untold, null, pooled)]
        lines.append([*errors_line(name, Errors.of(row["error"] for row in members)), *medians])
    once = [part(each_once(rows, key)) for key in ("error", "untold_error", "null_error", "pooled_null_error")]
    lines.append(["median of the sources' medians", "–", once[0], "–", "–", "–", *once[1:]])
    out = ["## Published step times", "", "![predicted against measured](results/published_speed.png)", ""]
    out += ["![errors](results/errors.png)", ""]
    out += table(
        ("source and GPU", "rows", "median", "p90", "worst", "bias", "untold median", "null", "null, pooled"), lines
    )
    out += [
        "“null” is one constant MFU for each source, GPU and precision, its median: it has seen the answers. “pooled”",
        "has one for each GPU and precision, whatever the source. The targets are held against the former, the harder.",
        "",
        f"The {WORST} worst of {len(rows)} rows ([all](results/published_speed.csv)):",
        "",
    ]
    return out + table(
        ("row", "measured s", "predicted s", "error", "null"),
        (
            [
                row["label"],
                f"{row['measured_s']:.4g}",
                f"{row['predicted_s']:.4g}",
                part(row["error"], True),
                part(row["null_error"], True),
            ]
            for row in worst_first(rows)[:WORST]
        ),
    )


def source_section(documents: Mapping[str, Document]) -> list[str]:
    """Each source before, now and left out."""
    speed, memory = documents["published_speed"]["rows"], documents["published_memory"]["rows"]
    apart = {one["source"]: one for one in documents["left_out"]["rows"]}
    earlier = sources.before()
    groups: dict[tuple[str, str], list[Document]] = defaultdict(list)
    for row in speed:
        groups["step time", row["source"]].append(row)
    for row in memory:
        if row["kind"] in ALIKE and row.get("error") is not None:
            groups["memory", row["source"]].append(row)
    lines = []
    for (what, source), members in sorted(groups.items(), reverse=True):
        was = earlier.get((what, source))
        now, untold = (statistics.median(abs(row[key]) for row in members) for key in ("error", "untold_error"))
        left, null = None, None
        if what == "step time":
            left, null = apart[source]["left_out"], statistics.median(abs(row["null_error"]) for row in members)
        before = "–" if was is None else f"{part(was['told'])} of {was['rows']}"
        lines.append([f"{what}, {source}", before, part(now), len(members), part(untold), part(left), part(null)])
    out = ["## Each source, before, now and left out", ""]
    out += [
        "Median errors. “before” is told, of 23 November 2026, before programs were traits and mixtures of experts",
        "had times; a source may have had fewer rows. “left out”: the factors inside a step were fitted on the other",
        "sources of its GPU generation, or are those of no source where the others have too few rows",
        "(`speed.py --holdout`). Memory has no constant that was fitted on a source's rows.",
        "",
        "llm_foundry_h100, qwen_2023, internevo and fms_fsdp were read on 29 November 2026; their “before” is what was",
        "predicted when they were first asked. They showed five mistakes, of which each has a mechanism: the lack of",
        "power of the 500 W H100 was counted twice, so that the 700 W card came out 15 to 20 % too fast in 16 bits;",
        "FlashAttention 1 and 2 were one kernel; casts of torch.compile were as cheap as those of fused kernels;",
        "autocast was charged for copies of a frozen base that is stored in 16 bits; and DeepSpeed's ZeRO-3 gathered",
        "module by module at no cost to the host. megatron_sc21 has the micro batches and virtual stages of the",
        "paper's own scripts since then, where 1 was assumed. Constants outside the four factors (sustained rates,",
        "`FLASH_1`, `FP8_CASTS`, `GATHERED_MODULE_S`) were chosen with all sources in sight, so that “left out” is",
        "optimistic.",
        "",
    ]
    return out + table(("what and source", "before", "now, told", "rows", "untold", "left out", "null"), lines)


def held_back_section(document: Document) -> list[str]:
    """The source that is kept apart."""
    rows = document["rows"]
    groups: dict[str, list[Document]] = defaultdict(list)
    for row in rows:
        groups[row["gpu"]].append(row)
        groups[row["kind"]].append(row)
        groups["**all**"].append(row)
    lines = []
    for name, members in sorted(groups.items(), key=lambda item: (item[0] == "**all**", item[0].islower(), item[0])):
        null = Errors.of(row["null_error"] for row in members)
        inside = statistics.fmean(row["inside"] for row in members)
        said = errors_line(name, Errors.of(row["error"] for row in members))
        lines.append([*said, part(null.median if null else None), f"{inside:.0%}"])
    for name, members in (("each plan once", rows), ("each plan once, without GB300", without_gb300(rows))):
        null = Errors.of(each_plan(members, "null_error"))
        lines.append([*errors_line(name, Errors.of(each_plan(members))), part(null.median if null else None), "–"])
    out = ["## A source kept apart", ""]
    out += [
        "NVIDIA's tuned recipes of November 2025 to August 2026 (`data/README.md`), asked as `--program",
        "megatron-bridge` and, where the recipe hides what experts exchange, `megatron-bridge-overlap`. No constant",
        "of kernels, collectives or the host was fitted on it. What was changed after it had been read: rows are",
        "asked with the activations that fused kernels save (a mistake of this benchmark, not of the command); rows",
        "that arrive at their experts are sorted once more, and back; sending a token once to each rank and node,",
        "hiding exchanges and fusing kernels by hand are traits of a program; GB300's rate is 1.19 of GB200's, from",
        "two of the rows; and the interval of Hopper is wider where experts are spread. Before that, 66 of the 178",
        "rows were called “does not fit” and the median error of all rows was 12.2 %. Rows whose recipe recomputes",
        "or offloads modules, or is not the plan that the table prints, are asked for time without that, and not",
        "whether they fit. GPT-OSS of release 26.06.01 is a regression that its page admits. Full-iteration CUDA",
        "graphs and fp8 attention, which the recipes have from 26.06 on, are no traits.",
        "",
    ]
    return out + table(("what", "rows", "median", "p90", "worst", "bias", "null", "in the interval"), lines)


def without_gb300(rows: Iterable[Document]) -> list[Document]:
    """Rows of other GPUs than the one whose rate is from this source."""
    return [row for row in rows if row["gpu"] != "GB300"]


def choice_section(document: Document) -> list[str]:
    """Regret of the choice, for each way to choose."""
    groups = document["groups"]
    ways = {
        "by predicted time, told": "model",
        "by predicted time, untold": "untold",
        "rule of thumb: least TP × PP, then least TP, then the largest micro batch": "rule",
        "any plan that ran, the mean (all that the null model can do)": "random",
    }
    lines = []
    for name, key in ways.items():
        values = [group[key] for group in groups]
        best = sum(value < 1e-9 for value in values)
        figures = (statistics.fmean(values), statistics.median(values), quantile(values, 0.9), max(values))
        lines.append([name, *map(part, figures), f"{best} of {len(groups)}"])
    out = ["## Choice", "", "![regret](results/regret.png)", ""]
    out += [
        f"Time of the chosen plan over that of the best, minus 1, in the {len(groups)} groups of {document['choice']}",
        "rows that do the same work on the same GPUs with two or more plans. Only plans that ran are in the groups.",
        "",
    ]
    out += table(("chosen", "mean", "median", "p90", "worst", "best plan"), lines)
    out += ["The five groups with the most regret ([all](results/choice.csv)):", ""]
    worst = sorted(groups, key=lambda group: -group["model"])[:5]
    return out + table(
        ("chosen", "best", "plans", "regret", "rule of thumb"),
        ([g["chosen"], g["best"], g["plans"], part(g["model"]), part(g["rule"])] for g in worst),
    )


def cpu_section(documents: Mapping[str, Document]) -> list[str]:
    """Tables of what was counted on real gloo ranks."""
    persistent = documents["persistent"]
    out = ["## Real CPU ranks", ""]
    out += [
        "**Persistent bytes** (parameters, gradients, optimizer), closed formulas against tensors counted on 2 to 4",
        f"gloo ranks: {persistent['equal']} of {persistent['configurations']} configurations equal to the byte.",
        "",
    ]
    counts: dict[str, list[bool]] = defaultdict(list)
    for row in persistent["rows"]:
        counts[row["model"]].append(row["predicted"] == row["measured"])
    out += table(("model", "configurations", "equal"), ([n, len(e), sum(e)] for n, e in counts.items()))
    out += ["**Peaks**, the allocator's most in a step against what was predicted:", ""]
    out += ["![CPU peaks](results/cpu_peak.png)", ""]
    for name, title in PEAKS.items():
        if name not in documents:
            continue
        rows = documents[name]["rows"]
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            groups[f"{row['strategy']}, {row['world']} rank{'s' if row['world'] > 1 else ''}"].append(row["error"])
        lines = [errors_line(key, Errors.of(errors)) for key, errors in sorted(groups.items())]
        lines.append(errors_line("**all**", Errors.of(row["error"] for row in rows)))
        lines += [errors_line(f"peak of {phase}", Errors.of(errors)) for phase, errors in phase_errors(rows).items()]
        out += [f"{title.capitalize()} (`{name}.json`):", ""]
        out += table(("configuration", "rows", "median", "p90", "worst", "bias"), lines)
        shown = ("strategy", "world", "model", "recompute", "precision", "optimizer", "micro_batch", "grad_accum")
        worst = worst_first(rows)[:5]
        out += table(
            (*shown, "error"), ([*(row.get(k, "–") for k in shown), part(row["error"], True)] for row in worst)
        )
    return out


def phase_errors(rows: Iterable[Document]) -> dict[str, list[float]]:
    """Errors of the peak of each phase alone, of every rank and step that was recorded."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for phase, error in row.get("errors", {}).items():
            found[phase].append(error)
        for sample in row.get("samples", ()):
            for step, has in sample["measured"].items():
                found[step.split()[-1]].append(sample["predicted"][step] / has - 1)
    return found


def kernel_section(documents: Mapping[str, Document]) -> list[str]:
    """Tables of operators and collectives; no targets were set for them."""
    out = ["## Kernels and collectives", ""]
    out += ["![kernels](results/kernels.png)", "", "![collectives](results/collectives.png)", ""]
    lines = [
        [f"{gpu}, {name}", *_pair(found)]
        for gpu, groups in documents["kernels"].items()
        for name, found in groups.items()
        if "model" in found
    ]
    head = ("rows", "median", "p90", "worst", "bias", "null median", "null p90")
    out += ["Null model: one constant efficiency, the median of the same rows.", ""]
    out += table(("operators", *head), lines)
    held = {g: d["held_out"] for g, d in documents["kernels"].items() if "held_out" in d}
    if held:
        words = "; ".join(
            f"{gpu}: median {part(one['median'])}, p90 {part(one['p90'])}, worst {part(one['worst'])}"
            for gpu, one in held.items()
        )
        out += [f"With constants fitted on other shapes (five folds). {words}.", ""]
    out += ["Null model: 50 µs and 80 % of the slowest link.", ""]
    out += table(("NCCL sweep", *head), ([n, *_pair(f)] for n, f in documents["collectives"]["measured"].items()))
    model = documents["collectives"]["nccl_model"]
    out += ["Against NCCL's own tuning model of H100 nodes, which is no measurement:", ""]
    return out + table(
        ("collective", "rows", "median", "p90", "worst", "bias"),
        (errors_line(name, Errors(**found), signed=False) for name, found in model.items()),
    )


def _pair(found: Document) -> list[str]:
    model, null = Errors(**found["model"]), Errors(**found["null"])
    return [*errors_line("", model, signed=False)[1:], part(null.median), part(null.p90)]


def planner_section(document: Document) -> list[str]:
    """The planner's own speed."""
    lines = []
    for one in document["figures"].values():
        best, processor = (quantity(one, one[key]) if key in one else "–" for key in ("best", "processor_s"))
        aim = "–" if one["target"] is None else quantity(one, one["target"])
        when = one.get("recorded", document["recorded"])
        lines.append([one["what"], quantity(one, one["value"]), processor, best, len(one["samples"]), aim, when])
    out = ["## Speed of the planner", ""]
    out += [
        "Each sample is a fresh process (`benchmarks/planner_speed.py`); the median of seconds, the largest of bytes.",
        "“CPU” is the median of processor time: the machine is shared, its load average was "
        f"{document['load_average']:.1f} on {document['machine']['cores']} cores.",
        f"The search looked at {document['considered']} plans and recommends {document['recommended']}.",
        "",
    ]
    return out + table(("what", "wall", "CPU", "best wall", "samples", "target", "date"), lines)


CAVEATS = """
## How to read this

- **In-sample.** Constants of kernels were fitted on the operator sweeps above, those of collectives chosen on the NCCL
  sweeps above, and the factors of a kernel inside a step (`IN_STEP`), host times and the penalty of odd rows on
  published step times of the tables here, vTrain's among them. So errors of step times and the regret are those of a
  fit, not of unseen data; only the operators have a held-out figure. The sources of memory rows were read while the
  memory model was written. GPU generations with one source (Volta, Ada, CDNA 3) are little more than that source.
- **Told and untold.** “Told” is `shardwise plan --program NAME`, with the program that the source measured
  (`rows.py`, `PROGRAMS`; the traits of each are in `src/shardwise/plan/programs.toml` with their sources). “Untold” is
  the command without it: what this package's own program needs and takes for the same plan, which is another program.
  In both, stacks whose kernels are fused by hand count as compiled, and virtual stages are those of the source
  (`--virtual-stages`).
- **Why the choice is not better.** Of the groups with more than 5 % of regret nearly all are small models (1024 and
  2048 wide) for which a plan with tensor parallelism was measured faster than the same work without. The measured
  seconds of those rows are no smooth function of the work: a micro batch of gpt-L12-h1024 over two ranks took 47.6 ms
  with 2 samples and 45.9 ms with 4, of gpt-L12-h2048 over four ranks 39.6, 38.4, 68.9 and 103.5 ms with 1, 2, 4 and 8.
  Predictions are within 5 to 17 % of each, on either side, and the plans lie closer to each other than that.
- **The OOM that is called “fits”.** litgpt's adapters without recompute keep more than is counted: by its rows of 1 and
  2 samples 1.64 GiB a sample of llama2-7b, with which 4 samples need 42.7 GiB. About half is known: one projection for
  queries, keys and values, whose result is one storage (4 bytes a token and column, less the 3 of a second adapter's
  input), and the update that `zero_pad` copies and autograd keeps (4 bytes; `lit_gpt/lora.py` of commit 8641822). The
  rest was not found. It is a program's own layer, and no trait.
- **Interval.** Each source in turn is asked with the interval of the others (`coverage.py`). The factors inside a step
  had seen it, so that this is optimistic.
- **Like with like.** `allocated` and `active` are compared with predicted live bytes, `reserved` with what the
  allocator holds, `device` with that and the context; `device` rows (what the driver shows) are not in the median of
  the target. A row “fits” where predicted device bytes are at most the device's memory; the search keeps 3 % free.
- **Counted as published.** Sources repeat configurations (SimuMax's rows with 4, 8 and 32 micro batches hold the same
  memory) and one source has most of the step times; the lines “without the source that has most” leave it out.
- **CPU peaks** of the rehearsal are the program itself under fake tensors, as `--prove` runs it; those of the estimate
  are what `plan` and `train` print. A sign is called systematic where a two-sided sign test over the errors above
  0.1 % gives it less than 5 %.
- **Worst first** is by the ratio of predicted and measured, over and under alike; `p90` and `worst` are of the relative
  error, `bias` is its median with the sign.
"""


def caveats(documents: Mapping[str, Document]) -> list[str]:
    """What a reader must know, with the rows that are left out."""
    memory, speed = documents["published_memory"], documents["published_speed"]
    out = CAVEATS.strip().splitlines()
    left = memory["left_out"]
    names = ", ".join(f"{one['source']} {one['model']}" for one in left)
    reasons = "; ".join(sorted({one["reason"] for one in left}))
    words = (
        f"- **Left out.** Of {memory['records']} rows of `data/published.csv` {len(left)} are not predicted"
        + (f" ({names}: {reasons})." if left else ".")
        + " Before that, rows that do not state batch, length, recompute or GPU, and analytic or doubtful ones never"
        " came into that file (`data/README.md`). "
        + (
            f"No step time could be predicted of {len(speed['problems'])}: {'; '.join(speed['problems'])}."
            if speed["problems"]
            else "Every row with a time has a predicted one."
        )
    )
    out += textwrap.wrap(words, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [*out, ""]


def machine_section(documents: Mapping[str, Document]) -> list[str]:
    """Hardware and dates."""
    machine = documents["planner_speed"]["machine"]
    recorded = documents.get("recorded", {})
    out = ["## Hardware and dates", ""]
    out += [
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}, torch "
        f"{machine['torch']}; no GPU. GPU figures are the published",
        "ones, on the hardware that their sources name. Ranks on CPU talk over gloo.",
        "",
    ]
    return out + table(("results", "date"), ([f"`{name}.json`", date.split(" ")[0]] for name, date in recorded.items()))


def render(documents: Mapping[str, Document]) -> str:
    """The whole README."""
    marks = MARKS | {False: "**miss**"}
    all_of = all_targets(documents)
    judged = [one for one in all_of if one.ok is not None]
    passed = sum(bool(one.ok) for one in judged)
    out = [
        "<!-- written by run.py from results/*.json; edit tables.py, not this file -->",
        "# How right the planner is",
        "",
        "`make accuracy` (`python benchmarks/accuracy/run.py`) predicts every published row again, measures the",
        "planner's speed, and writes this page, `results/` and the plots. `--real` also trains on real CPU ranks and",
        "proves a 70B model; without it the last results of those are used. `--check` compares predictions with the",
        "record. Every figure here is read from `results/*.json`.",
        "",
        "## Targets",
        "",
        f"{passed} of {len(judged)} met.",
        "",
        *table(("what", "target", "found", ""), ([t.what, t.aim, t.found, marks[t.ok]] for t in all_of)),
        *memory_section(documents["published_memory"]),
        *speed_section(documents["published_speed"]),
        *source_section(documents),
        *held_back_section(documents["held_back"]),
        *choice_section(documents["published_speed"]),
        *cpu_section(documents),
        *kernel_section(documents),
        *planner_section(documents["planner_speed"]),
        *caveats(documents),
        *machine_section(documents),
    ]
    return "\n".join(out).rstrip() + "\n"
