"""SkyPilot: a task for machines of a cloud."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.hardware.gpus import GpuSpec
from shardwise.launch.engines.launch_request import LaunchRequest
from shardwise.launch.engines.render import render

KINDS = ("managed", "cluster")
_ACCELERATORS = {
    "A100-SXM-80GB": "A100-80GB",
    "A100-PCIe-80GB": "A100-80GB",
    "A100-SXM-40GB": "A100",
    "A100-PCIe-40GB": "A100",
    "H100-SXM-80GB": "H100",
    "H100-PCIe-80GB": "H100",
    "H200-SXM-141GB": "H200",
    "B200-SXM-180GB": "B200",
    "B300-SXM-288GB": "B300",
    "V100-SXM-16GB": "V100",
    "V100-SXM-32GB": "V100-32GB",
    "V100-PCIe-16GB": "V100",
    "V100-PCIe-32GB": "V100-32GB",
    "P100-PCIe-16GB": "P100",
    "RTX-3090": "RTX3090",
    "RTX-4090": "RTX4090",
    "RTX-5090": "RTX5090",
    "RTX-A6000": "RTXA6000",
    "RTX-6000-Ada": "RTX6000-Ada",
}
"""SkyPilot's names of GPUs where they are not those of the hardware table; ``sky show-gpus`` lists them."""


def accelerator(gpu: GpuSpec, given: str | None) -> str:
    """Return SkyPilot's name of a GPU; ``given`` is the user's."""
    return given or _ACCELERATORS.get(gpu.name, gpu.name)


def render_skypilot(request: LaunchRequest, file: str, header: str) -> str:
    """Return the task of ``request``."""
    facts: dict[str, object] = {"file": file, "header": header, "carried": carried(request)}
    if request.gpu is not None:
        facts["accelerator"] = f"{accelerator(request.gpu, request.options['accelerator'])}:{request.nproc}"
    elif request.device == "cuda":
        facts["accelerator"] = f"{request.options['accelerator']}:{request.nproc}"
    facts["setup"] = "".join(f"{line}\n" for line in request.options["setup"] or ())
    facts["run"] = render("skypilot_run.sh.j2", request)
    return render("skypilot.yaml.j2", request, **facts)


def carried(request: LaunchRequest) -> Mapping[str, str]:
    """Return the files that SkyPilot copies to each machine, by their paths there."""
    return {f"{config_folder(request.name)}/{name}": path for name, path in request.options["carried"].items()}


def config_folder(name: str) -> str:
    """Return the folder of the config file on a machine."""
    return f"/tmp/shardwise-{name}"


def skypilot_problems(request: LaunchRequest) -> list[str]:
    """List what the machines would lack."""
    options, problems = request.options, []
    if options["kind"] not in KINDS:
        problems.append(f"--kind '{options['kind']}' must be one of {', '.join(KINDS)}")
    if options["bucket"] is not None and options["volume"] is not None:
        problems.append("--volume and --bucket are both given; leave one of them out")
    elif options["bucket"] is None and options["volume"] is None:
        problems.append(
            "--volume or --bucket is missing: data and checkpoints must outlive a machine, and all machines read them; "
            "name a volume (sky volumes ls), or a bucket such as s3://my-bucket"
        )
    if request.device == "cuda" and request.gpu is None and options["accelerator"] is None:
        problems.append(
            "--gpu is missing, or --accelerator with SkyPilot's name of the GPU: nothing names what to rent"
        )
    if request.is_elastic:
        problems.append(
            f"launch.min_nodes and max_nodes make {request.nnodes} nodes, and SkyPilot replaces a lost machine before "
            "it goes on; remove them"
        )
    return problems


def submit_skypilot(request: LaunchRequest, file: Path) -> list[str]:
    """Return the command that submits ``file``; SkyPilot shows the price, and asks."""
    verb = ["jobs", "launch"] if request.options["kind"] == "managed" else ["launch", "-c", request.name]
    return ["sky", *verb, str(file)]


def follow_skypilot(request: LaunchRequest, answer: str) -> str:
    """Return the line that follows the task's output."""
    return f"sky jobs logs -n {request.name}" if request.options["kind"] == "managed" else f"sky logs {request.name}"
