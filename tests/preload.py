"""Imported once by the fork server, so that each rank of a test starts with everything loaded."""

# ruff: noqa: E402
import gc

gc.disable()  # the imports below make no garbage

import importlib

import pytest  # noqa: F401 each test module does
import torch._dynamo
import torch.distributed.optim  # noqa: F401 so does zero1

import shardwise.report.progress
import shardwise.run.callbacks
import shardwise.run.rank_main  # noqa: F401
import tests.contract
import tests.families
import tests.models
import tests.worlds  # noqa: F401
from shardwise.parallel.lora import quantize as quantise
from shardwise.report.html import text

quantise.bitsandbytes()  # seconds for each rank
text._environment().get_template("report.html.j2")  # half a second for each run that ends with a report

# transformers loads a family's code when one is built; nothing is built here, as threads must not be there to fork
for _name in ("llama", "qwen3", "gpt2", "mistral", "gemma", "bert"):
    importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")

from tests.warm import warm_up

warm_up()

gc.collect()
gc.enable()
gc.freeze()  # what is here is nobody's garbage: neither the collector nor who counts tensors walks it in each rank
