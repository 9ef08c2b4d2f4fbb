"""Plan table for people: the choice, its reason, its memory, and the rejected plans."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.facts import ModelSpec
from shardwise.search.choose import Choice
from shardwise.train.config import DataTable
from shardwise.train.data.corpus import Corpus
from shardwise.units import bytes_text, count_text

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


def print_plan(
    choice: Choice, spec: ModelSpec, cluster: ClusterSpec, corpus: Corpus, console: Console, data: DataTable
) -> None:
    """Print the full plan."""
    plan = choice.plan
    packed = sum(p.num_elements for p in spec.parameters if p.dtype == "uint8" and plan.parsed.adapter == "qlora")
    whole = spec.num_parameters + packed  # two in a byte
    frozen = whole - spec.num_trainable
    console.print(
        f"model: {count_text(whole)} parameters"
        + (f", {count_text(frozen)} of them frozen" if frozen else "")
        + (f" ({count_text(2 * packed)} in 4 bits)" if packed else "")
        + f", {len(spec.blocks)} repeated blocks"
        + (f", tied: {'; '.join(' = '.join(names) for names in spec.tied)}" if spec.tied else "")
    )
    heldout = count_text(len(corpus.heldout.tokens)) if corpus.heldout else "no"
    console.print(f"data: {count_text(len(corpus.train.tokens))} training tokens, {heldout} held-out tokens")
    if data.pack:
        borders = "has no loss on their first tokens" if data.mask_borders else "has loss on their first tokens, too"
        console.print(
            f"      packed: documents of one sample attend to each other, and it {borders}; data.pack=false keeps each "
            "document apart (and pads)",
            markup=False,
        )
    memory = bytes_text(cluster.device_memory_bytes)
    where = f"{cluster.world_size} × {cluster.device_name}, {memory} each"
    console.print(
        f"plan: [bold]{plan.strategy}[/] on {where} ({plan.dims}), {plan.precision}, recompute {plan.recompute}"
    )
    console.print(f"      {plan.reason}")
    for name, why in choice.rejected:
        console.print(f"      not {name}: {why}")
    console.print(f"batch: {plan.batch_equation()}")
    table = Table(title="predicted memory of a rank", title_justify="left", title_style="bold")
    for name in CATEGORIES:
        table.add_column(name, justify="right")
    table.add_row(*(bytes_text(getattr(choice.estimate, name)) for name in CATEGORIES))
    console.print(table)
