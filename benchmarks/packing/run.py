"""Documents a second: isolated packing against padding each document, on the example's chats, turn by turn.

    python benchmarks/packing/run.py [--turns 12]

One process trains examples/llama-2m on examples/chats.jsonl; a turn is one step of each kind, in an order drawn anew.
Padding is to `seq_len` (``pack = "none"``) and, beside it, to the longest document of the batch, as collators do.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.parallel.pipeline_parallel.stage_runtime import call
from shardwise.train.causal import causal_configuration
from shardwise.train.config_data import DataTable
from shardwise.train.data.corpus import prepare_corpus
from shardwise.train.data.samples import DocumentSamples, IsolatedSamples
from shardwise.train.loss import token_loss_sum

ROOT = Path(__file__).parents[2]
SEQ_LEN, ROWS = 512, 4


def main() -> None:
    """Measure, and write raw samples beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    turns = parser.parse_args().turns
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        table = DataTable(path=str(ROOT / "examples" / "chats.jsonl"), chat_template="chatml", seq_len=SEQ_LEN)
        tokens = prepare_corpus(table, Path(cache), print).train
        packed, padded = IsolatedSamples(tokens, SEQ_LEN, 256), DocumentSamples(tokens, SEQ_LEN, 256)
        model = AutoModelForCausalLM.from_config(causal_configuration(ROOT / "examples" / "llama-2m"))
        draw = random.Random(0)
        raw: dict[str, list[dict[str, float]]] = {"isolated": [], "padded": [], "padded to the longest": []}
        for turn in range(turns + 1):
            for kind in draw.sample(list(raw), 3):
                documents, batch = drawn(kind, packed, padded, draw)
                began = time.perf_counter()
                inputs, labels = batch
                token_loss_sum(call(model, inputs), labels).backward()
                model.zero_grad()
                if turn:  # the first one warms up
                    raw[kind].append({"documents": documents, "seconds": time.perf_counter() - began})
    rates = {kind: statistics.median(one["documents"] / one["seconds"] for one in found) for kind, found in raw.items()}
    ratios = {kind: rates["isolated"] / rate for kind, rate in rates.items() if kind != "isolated"}
    document = {
        "schema": 1,
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}",
        "fill": {"isolated": packed.fill, "padded": padded.fill},
        "documents_per_s": rates,
        "isolated_is_faster_by": ratios,
        "turns": raw,
    }
    target = Path(__file__).parent / f"chats_cpu_{date.today().isoformat()}.json"
    target.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: document[key] for key in ("fill", "documents_per_s", "isolated_is_faster_by")}, indent=1))


def drawn(kind: str, packed: IsolatedSamples, padded: DocumentSamples, draw: random.Random) -> tuple[int, Any]:
    """A batch of ``ROWS`` rows, and the documents in it."""
    if kind == "isolated":
        rows = np.array(draw.sample(range(len(packed)), ROWS))
        return int(packed.documents(rows)), packed.batch(rows)
    inputs, labels = padded.batch(np.array(draw.sample(range(len(padded)), ROWS)))
    if kind == "padded to the longest":
        longest = int((inputs != 256).sum(1).max())
        inputs, labels = inputs[:, :longest], labels[:, :longest]
    return ROWS, (inputs, labels)


if __name__ == "__main__":
    main()
