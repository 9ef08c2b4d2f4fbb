"""A wrong config is refused at once: before torch is imported, and before any process is started."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.commands import ROOT

VERBS = [
    "train",
    "train --dry-run",
    "verify",
    "bench step",
    "bench step --against ddp",
    "bench step --fp8",
    "bench scaling",
    "bench checkpoint",
    "data preview",
    "launch --via slurm --nodes 2 --nproc 2 --gpu H100-SXM --dry-run",
]
CODE = """
import contextlib, io, json, sys
from shardwise.cli.main import main
from shardwise.launch import fork_server
for verb in json.loads(sys.argv.pop()):
    sys.argv[1:] = [*verb.split(), "examples/stdlib.toml", "parallel.no_such_key=2"]
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said):
        main()
    print(json.dumps([verb, "no such key" in said.getvalue(), "torch" in sys.modules, bool(fork_server.running())]))
"""


def test_a_wrong_key_is_found_before_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(VERBS)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [[verb, True, False, False] for verb in VERBS]
