"""Environment variables that cost speed or break a run, with their effects and valid uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.doctor.check import Check, error, ok, unknown, warning
from shardwise.doctor.machine_facts import HostFacts

_OFF = ("", "0", "false", "off", "no")


def _on(value: str) -> bool:
    return value.strip().lower() not in _OFF


def _off(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "off", "no")


def _always(value: str) -> bool:
    return bool(value)


@dataclass(frozen=True)
class EnvSetting:
    """Variable, harmful values, their effect, and the fix (else: unset it).

    ``gpus``: minimum number of GPUs.
    """

    name: str
    hurts: Callable[[str], bool]
    what: str
    fix: str = ""
    gpus: int = 1
    rdma: bool = False


# After NVIDIA's "NCCL environment variables" and PyTorch's "CUDA environment variables" and "torch.distributed".
HURTFUL = (
    EnvSetting("NCCL_P2P_DISABLE", _on, "GPUs of a machine then talk through host memory, not directly", gpus=2),
    EnvSetting("NCCL_P2P_LEVEL", lambda v: v.upper() in ("LOC", "0"), "GPUs then never talk directly", gpus=2),
    EnvSetting("NCCL_SHM_DISABLE", _on, "ranks of a machine without direct links then talk over the network", gpus=2),
    EnvSetting("NCCL_IB_DISABLE", _on, "nodes then talk over TCP although there is InfiniBand or RoCE", rdma=True),
    EnvSetting(
        "NCCL_NET_GDR_LEVEL",
        lambda v: v.upper() in ("LOC", "0"),
        "every byte between nodes goes by host memory",
        rdma=True,
    ),
    EnvSetting("NCCL_NVLS_ENABLE", _off, "NVSwitches then do not add up gradients on the way", gpus=2),
    EnvSetting("NCCL_ALGO", _always, "NCCL then cannot choose the algorithm for each size", gpus=2),
    EnvSetting("NCCL_PROTO", _always, "NCCL then cannot choose the protocol for each size", gpus=2),
    EnvSetting(
        "NCCL_DEBUG", lambda v: v.upper() in ("INFO", "TRACE"), "NCCL writes much to every rank's log", "set WARN"
    ),
    EnvSetting("TORCH_NCCL_BLOCKING_WAIT", _on, "collectives then block the host, and overlap less", gpus=2),
    EnvSetting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", _off, "a rank that dies then leaves the others hanging without end", gpus=2
    ),
    EnvSetting("CUDA_LAUNCH_BLOCKING", _on, "every kernel is waited for: for debugging only"),
    EnvSetting("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, "every tensor is allocated by the driver: for debugging only"),
    EnvSetting("NVIDIA_TF32_OVERRIDE", lambda v: v.strip() == "0", "fp32 matmuls then never use tensor cores"),
    EnvSetting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda v: v.strip() == "1",
        "communication queues up behind kernels, so that sharded strategies overlap less",
    ),
)
ANYWHERE = (
    EnvSetting(
        "TORCH_DISTRIBUTED_DEBUG", lambda v: v.upper() == "DETAIL", "every collective is checked by another one first"
    ),
    EnvSetting(
        "OMP_PROC_BIND",
        lambda v: v.strip().lower() not in ("", "false"),
        "each rank binds its threads to the same first cores",
        "unset it, or give each rank its own OMP_PLACES",
    ),
    EnvSetting("GOMP_CPU_AFFINITY", _always, "each rank binds its threads to the same cores"),
    EnvSetting("KMP_AFFINITY", lambda v: "disabled" not in v and "none" not in v, "ranks may bind to the same cores"),
)
SHOWN = ("NCCL", "GLOO", "OMP_", "CUDA_VISIBLE", "PYTORCH", "TORCH_")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_settings(facts: HostFacts) -> list[Check]:
    """Check this process's environment, which ranks inherit."""
    found, settings, gpus = [], facts.settings, len(facts.gpus.gpus)
    for setting in (*HURTFUL, *ANYWHERE):
        value = settings.get(setting.name)
        here = setting in ANYWHERE or (gpus >= setting.gpus and (facts.rdma or not setting.rdma))
        if value is None or not here or not setting.hurts(value):
            continue
        found.append(
            warning("settings", f"{setting.name}={value}: {setting.what}", setting.fix or f"unset {setting.name}")
        )
    found += [check for name in INTERFACES if name in settings for check in interface(name, facts)]
    if gpus:
        found += allocator(settings)
    if found:
        return found
    shown = ", ".join(f"{name}={value}" for name, value in settings.items() if name.startswith(SHOWN))
    return [ok("settings", f"nothing that hurts is set{f': {shown}' if shown else ''}")]


def interface(name: str, facts: HostFacts) -> list[Check]:
    """Check that the network interface named by a variable exists.

    NCCL takes prefixes, ``=name`` for an exact name and ``^name`` for all others, separated by commas; gloo a name.
    """
    value = facts.settings[name]
    if facts.interfaces is None:
        return [unknown("settings", f"{name}={value}: the interfaces of this machine are not known")]
    is_nccl = name.startswith("NCCL")
    if is_nccl and value.startswith("^"):
        return []
    wanted = [word for word in value.lstrip("=").split(",") if word]
    exact = not is_nccl or value.startswith("=")
    present = [word for word in wanted if any(up == word if exact else up.startswith(word) for up in facts.interfaces)]
    if wanted and not present:
        fix = f"set one of {', '.join(facts.interfaces)}, or unset it"
        return [error("settings", f"{name}={value}: no such network interface is up here", fix)]
    return []


def allocator(settings: dict[str, str]) -> list[Check]:
    """Check user settings of PyTorch's GPU memory allocator."""
    name = next((name for name in ALLOCATOR if settings.get(name)), None)
    if name is None or "expandable_segments:true" in settings[name].lower():
        return []
    what = (
        f"{name}={settings[name]}: memory estimates assume expandable segments; "
        "without them, up to a tenth more is reserved"
    )
    return [warning("settings", what, f"add expandable_segments:True to {name}, or unset it")]
