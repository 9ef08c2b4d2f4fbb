"""Each engine's file at 1, 2 and 16 nodes is the one of ``tests/golden/launch``.

``python -m tests.golden.test_launch_files --write`` writes them anew; read the difference before you keep it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.hardware.gpus import find_gpu
from shardwise.launch.engines.known_engines import ENGINES
from shardwise.launch.engines.launch_request import LaunchRequest

FOLDER = Path(__file__).parent / "launch"
OPTIONS: dict[str, dict[str, Any]] = {
    "torchrun": {"hosts": None, "endpoint": "gpu-0:29400"},
    "slurm": {"partition": "gpu", "time": "24:00:00", "doctor": True, "setup": None},
    "kubernetes": {
        "kind": "trainjob",
        "image": "registry.example/shardwise:0.1",
        "namespace": None,
        "storage_claim": "training",
        "storage_path": "/workspace",
    },
    "skypilot": {
        "kind": "managed",
        "image": None,
        "bucket": "s3://training",
        "volume": None,
        "storage_path": "/storage",
        "accelerator": None,
        "infra": None,
        "spot": True,
        "setup": ["pip install 'shardwise[hf]'"],
        "carried": {"config.toml": "/home/ada/config.toml"},
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "jobset": ("kubernetes", {"kind": "jobset", "namespace": "research"}, {}),
    "jobset-elastic": ("kubernetes", {"kind": "jobset"}, {"min_nodes": 1}),
    "skypilot-volume": ("skypilot", {"bucket": None, "volume": "training", "infra": "k8s"}, {}),
    "slurm-elastic": ("slurm", {"doctor": False, "setup": ["module load cuda"]}, {"min_nodes": 1, "interface": "ib0"}),
    "torchrun-elastic": ("torchrun", {}, {"min_nodes": 1, "max_nodes": 4, "restarts": 5}),
}
NODES = (1, 2, 16)
CASES = [(engine, engine, {}, {"nodes": nodes}) for engine in ENGINES for nodes in NODES]
CASES += [(name, engine, options, {"nodes": 2, **more}) for name, (engine, options, more) in VARIANTS.items()]


def request(engine: str, nodes: int = 2, *, options: dict[str, Any] | None = None, **more: Any) -> LaunchRequest:
    """A request as the command line makes it, on machines of 8 H100."""
    storage = OPTIONS[engine].get("storage_path")
    folder = storage or "/home/ada"
    config = {"kubernetes": "/etc/shardwise", "skypilot": "/tmp/shardwise-lm"}.get(engine, "/home/ada") + "/config.toml"
    facts: dict[str, Any] = {
        "name": "lm",
        "config_file": config,
        "train_words": ("train.steps=1000", "parallel.strategy=fsdp"),
        "output": f"{folder}/runs/lm",
        "folder": folder,
        "python": "python" if storage else "/home/ada/.venv/bin/python",
        "nodes": nodes,
        "nproc": 8,
        "min_nodes": nodes,
        "max_nodes": nodes,
        "device": "cuda",
        "gpu": find_gpu("H100-SXM"),
        "cores": 64,
        "restarts": 10,
        "agent_restarts": 10 if {"min_nodes", "max_nodes"} & set(more) else 0,
        "grace_s": 120,
        "documents": {"config.toml": '[model]\nconfig = "models/lm"\n\n[data]\npath = "corpus"\n'} if storage else {},
        "options": OPTIONS[engine] | (options or {}),
    }
    return LaunchRequest(**facts | more)


def files() -> dict[str, str]:
    """The file of each case, by its name."""
    found = {}
    for name, engine, options, more in CASES:
        made = request(engine, options=options, **more)
        file = f"{name}-{made.nodes}{ENGINES[engine].suffix}"
        ranks = made.nodes * made.nproc
        found[file] = ENGINES[engine].render(made, file, f"Made by shardwise launch for {ranks} ranks.")
    return found


@pytest.mark.parametrize("name", files())
def test_a_file_is_as_it_was(name: str) -> None:
    assert files()[name] == (FOLDER / name).read_text(), "python -m tests.golden.test_launch_files --write"


def test_no_file_is_left_over() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(files())


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for _name, _text in files().items():
        (FOLDER / _name).write_text(_text)
