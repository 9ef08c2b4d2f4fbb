"""The doctor where there is a GPU: NVML answers, a device under load is seen, the command looks at it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from shardwise.measure.gpu.gpu_load import load_device
from shardwise.measure.gpu.nvml import GpuSampler, NvmlSource
from tests.cli import configs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")


def test_nvml_answers():
    machine = NvmlSource().read()
    assert machine.problem is None and machine.driver and machine.cuda
    gpu = machine.gpus[0]
    assert gpu.memory_bytes and gpu.sm_clock_hz and gpu.max_sm_clock_hz and gpu.reasons is not None
    assert gpu.pcie_generation and gpu.pcie_lanes and gpu.capability == torch.cuda.get_device_capability(0)


def test_a_device_under_load():
    sampler = GpuSampler(0.05).start()
    load = load_device(torch.device("cuda", 0), seconds=1.5)
    track = sampler.stop()
    assert load.state is not None and load.from_host_bytes_per_s is not None and load.from_host_bytes_per_s > 1e8
    assert load.state.uuid is not None and "idle" not in (load.state.reasons or ())
    assert track.problem is None and any(device.busy > 0 and device.mean_sm_clock_hz for device in track.devices)


def test_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "doctor", "--json"],
        cwd=configs.ROOT,
        env=configs.environment(),
        text=True,
        capture_output=True,
        timeout=150,
    )
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    levels = {check["name"]: check["level"] for check in document["checks"]}
    assert levels["ranks"] == "ok" and document["ranks"]["backend"] == "NCCL", done.stderr
    assert document["machine"]["gpus"]["gpus"][0]["memory_bytes"]
