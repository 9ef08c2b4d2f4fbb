"""Kubernetes: a TrainJob of Kubeflow Trainer, or a JobSet with plain torchrun."""

from __future__ import annotations

import shlex
from pathlib import Path

from shardwise.launch.engines.launch_request import LaunchRequest
from shardwise.launch.engines.render import render

CONFIG_FOLDER = "/etc/shardwise"
KINDS = ("trainjob", "jobset")


def render_kubernetes(request: LaunchRequest, file: str, header: str) -> str:
    """Return the manifests of ``request``: the config file, and the job."""
    vendor = "amd.com/gpu" if request.gpu is not None and request.gpu.arch.startswith("CDNA") else "nvidia.com/gpu"
    facts = {"file": file, "header": header, "gpu_resource": vendor, "config_folder": CONFIG_FOLDER}
    return render(f"{request.options['kind']}.yaml.j2", request, **facts)


def kubernetes_problems(request: LaunchRequest) -> list[str]:
    """List what the pods would lack."""
    options, problems = request.options, []
    if options["kind"] not in KINDS:
        problems.append(f"--kind '{options['kind']}' must be one of {', '.join(KINDS)}")
    if options["image"] is None:
        problems.append("--image is missing: name a container image with Python, PyTorch and Shardwise")
    if options["storage_claim"] is None:
        problems.append(
            "--storage-claim is missing: data and checkpoints must outlive a pod, and all pods read them; name a "
            "PersistentVolumeClaim that is ReadWriteMany"
        )
    if request.is_elastic and options["kind"] == "trainjob":
        problems.append(
            f"launch.min_nodes and max_nodes make {request.nnodes} nodes, and a TrainJob has a fixed number; use "
            "--kind jobset, or remove them"
        )
    return problems


def submit_kubernetes(request: LaunchRequest, file: Path) -> list[str]:
    """Return the command that submits ``file``: ``create``, as a job that exists already is not to be changed."""
    return ["kubectl", "create", "-f", str(file)]


def follow_kubernetes(request: LaunchRequest, answer: str) -> str:
    """Return the line that follows the pods' output; a TrainJob makes a JobSet of its name."""
    namespace = ["-n", request.options["namespace"]] if request.options["namespace"] else []
    pods = f"jobset.sigs.k8s.io/jobset-name={request.name}"
    return shlex.join(["kubectl", "logs", *namespace, "-f", "--prefix", "-l", pods])
