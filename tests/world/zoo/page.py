"""Write docs/what-works.md from the expected verdicts of the zoo: ``python -m tests.world.zoo.page --write``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXPECTED, FAMILIES = HERE / "expected.json", HERE / "families.json"
PAGE = HERE.parents[2] / "docs" / "what-works.md"
COLUMNS = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp on 4")
Table = dict[str, dict[str, str]]

HEAD = """\
# What works

{count} small models were trained in a custom loop (`shardwise.start`, `session.prepare`, `session.steps`), each under
every strategy below: `ddp`, `zero1`, `zero2` and `fsdp` on two ranks, `hsdp` or `fsdp` on four, with one or two micro
batches for each step and rank. They cover what people write: plain stacks, attention, convolutions, mixtures of
experts, data-dependent branches and early exits, shared and frozen weights, several losses, unusual outputs, and
unusual code inside a forward.

Each run trains for four steps of SGD with momentum and weight decay, in float64 and on CPUs, over samples that differ
between ranks. Then every weight is compared with that of one plain PyTorch process over the same samples; the largest
difference allowed is 1e-9 of the largest element of that weight (1e-4 where the model computes in fp32). The receipt of
the second step must pass, too.

- **✓**: the weights equal those of one process.
- **refused**: Shardwise stops before the first update, on all ranks, with the message in the note; no weight was
  changed.
- **warned**: the run continues and its result differs from one process, as the message in the note says when the model
  is prepared.
- **stopped**: the model depends on its samples in a way that sharding does not support, which no rank can know in
  advance. Shardwise stops in that step, on all ranks, with the message in the note; the step has changed no weight.
- **asked**: the model's forward uses the world size. The weights equal those of one process that gets the same world
  size.

A spectral norm iterates once in each forward, whatever the samples. For such models the single process has as many
forwards in a step as each rank has, with the micro batches of all ranks in each.

The table is generated from the test that trains these models; if a verdict changes, that test fails.
"""


def render(expected: Table, families: dict[str, dict[str, dict[str, str]]] | None = None) -> str:
    """Render the page as Markdown."""
    notes: dict[str, int] = {}
    columns = [name for name in COLUMNS if any(name in row for row in expected.values())]
    text = HEAD.format(count=len(expected)) + "\n## Models in a custom loop\n\n"
    text += _table("Model", columns, {name: dict(row) for name, row in expected.items()}, notes)
    if families:
        axes = list(dict.fromkeys(axis for row in families.values() for axis in row))
        cells = {
            family: {axis: f"{cell['verdict']}: {cell.get('sentence', '')}".rstrip(": ") for axis, cell in row.items()}
            for family, row in families.items()
        }
        text += "\n## Hugging Face families\n\n" + _table("Family", axes, cells, notes)
    text += "\n## Notes\n\n" + "".join(f"{number}. {note}\n" for note, number in notes.items())
    return text


def _table(title: str, columns: list[str], rows: Table, notes: dict[str, int]) -> str:
    lines = [f"| {title} | {' | '.join(f'`{name}`' for name in columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(_cell(row.get(key), notes) for key in columns)} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def _cell(verdict: str | None, notes: dict[str, int]) -> str:
    if verdict is None:
        return ""
    kind, _, sentence = verdict.partition(": ")
    if kind == "right":
        return "✓"
    if not sentence:
        return kind
    return f"{kind} [{notes.setdefault(_note(sentence), len(notes) + 1)}](#notes)"


def _note(sentence: str) -> str:
    """Escape a message as one line of Markdown."""
    return re.sub(r"([*_<>|])", r"\\\1", " ".join(sentence.split()))


def page() -> str:
    """Render the page from the stored verdicts."""
    families = json.loads(FAMILIES.read_text()) if FAMILIES.exists() else None
    return render(json.loads(EXPECTED.read_text()), families)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
