"""Links of this machine's GPUs, read from the matrix that ``nvidia-smi topo -m`` prints."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.hardware.gpus import GpuSpec, Link, nvlink_link_bytes_per_s

# Distance of two devices, nearest first: one PCIe switch, several, the host bridge, a NUMA node, two sockets
# (the legend that nvidia-smi prints below the matrix).
PCIE_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
MEANING = {
    "PIX": "one PCIe switch between them",
    "PXB": "several PCIe switches between them, no host bridge",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "through the host bridges of one NUMA node",
    "SYS": "across CPU sockets (NUMA nodes)",
}
"""Path of each of `PCIE_PATHS`, according to the legend of nvidia-smi."""
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Nic:
    """Network card.

    ``paths[i]`` is the path between it and GPU i; ``device`` is its name in the system, if reported.
    """

    name: str
    paths: tuple[str, ...]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """Paths between GPUs: ``paths[i][j]`` is ``NV12`` (12 links), one of `PCIE_PATHS`, or ``X``.

    ``cores[i]`` are the CPU cores near GPU i as the matrix has them (``0-47``), ``numa[i]`` its NUMA node; ``None`` for
    a missing value, empty where the matrix has no such column.
    """

    paths: tuple[tuple[str, ...], ...]
    nics: tuple[Nic, ...] = ()
    cores: tuple[str | None, ...] = ()
    numa: tuple[str | None, ...] = ()

    def subset(self, indices: Sequence[int]) -> Topology | None:
        """Matrix of these GPUs only; ``None`` if one is not in it."""
        if any(i not in range(len(self.paths)) for i in indices):
            return None
        return Topology(
            paths=tuple(tuple(self.paths[i][j] for j in indices) for i in indices),
            nics=tuple(Nic(nic.name, tuple(nic.paths[i] for i in indices), nic.device) for nic in self.nics),
            cores=tuple(self.cores[i] for i in indices) if self.cores else (),
            numa=tuple(self.numa[i] for i in indices) if self.numa else (),
        )

    def nvlinks(self, i: int, j: int) -> int:
        """Number of NVLinks between two GPUs, through a switch or not; 0 where their path is PCIe."""
        return int(self.paths[i][j][2:]) if self.paths[i][j].startswith("NV") else 0

    @property
    def farthest(self) -> str | None:
        """Longest PCIe path between two GPUs; ``None`` if NVLink joins all, or for one GPU."""
        found = [path for row in self.paths for path in row if path in PCIE_PATHS]
        return max(found, key=PCIE_PATHS.index) if found else None

    @property
    def nvlink_ring(self) -> bool:
        """Return whether a ring over NVLink alone is expected.

        Each GPU must have two such neighbours (one, of two GPUs) and all must be connected. This does not prove that a
        ring exists, but it is true for existing boards.
        """
        size = len(self.paths)
        near = [{j for j in range(size) if self.nvlinks(i, j)} for i in range(size)]
        reached, todo = {0}, [0]
        while todo:
            new = near[todo.pop()] - reached
            reached |= new
            todo += new
        return size > 1 and len(reached) == size and min(map(len, near)) >= min(2, size - 1)


def explain_path(path: str) -> str:
    """Explain ``NV12`` or ``PHB`` in words.

    Raises:
        KeyError: the path is unknown.
    """
    if path.startswith("NV"):
        return f"{path[2:]} NVLink{'s' * (path != 'NV1')}"
    return MEANING[path]


def explain_topology(topology: Topology) -> list[str]:
    """Describe the matrix: pairs of GPUs by path, nearest first, then each GPU's nearest card."""
    size = len(topology.paths)
    pairs: dict[str, list[tuple[int, int]]] = {}
    for i in range(size):
        for j in range(i + 1, size):
            pairs.setdefault(topology.paths[i][j], []).append((i, j))
    lines = []
    for path in sorted(pairs, key=_distance):
        some = pairs[path]
        all_of_them = len(pairs) == 1 and size > 2
        who = f"all {size} GPUs" if all_of_them else ", ".join(f"{i}-{j}" for i, j in some)
        lines.append(f"{path}: {explain_path(path)} ({who})")
    near: dict[tuple[str, str], list[int]] = {}
    for i in range(size):
        nic = nearest_nic(topology, i)
        if nic is not None:
            near.setdefault((nic.device or nic.name, nic.paths[i]), []).append(i)
    for (name, path), gpus in near.items():
        lines.append(f"GPU {', '.join(map(str, gpus))}: nearest network card {name}, {path} ({explain_path(path)})")
    return lines


def nearest_nic(topology: Topology, gpu: int) -> Nic | None:
    """Network card with the shortest path to a GPU, the first of equals; ``None`` without one."""
    return min(topology.nics, key=lambda nic: _distance(nic.paths[gpu]), default=None)


def parse_cores(text: str | None) -> set[int] | None:
    """Parse the numbers in ``0-23,48-71``; ``None`` for any other text."""
    if text is None or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return None
    spans = [part.partition("-") for part in text.split(",")]
    return {core for low, _, high in spans for core in range(int(low), int(high or low) + 1)}


def _distance(path: str) -> tuple[int, int]:
    """Sort key, nearest first: more NVLinks before fewer, all before PCIe."""
    if path.startswith("NV"):
        return 0, -int(path[2:])
    return 1, PCIE_PATHS.index(path)


def parse_topology(text: str) -> Topology | None:
    """Parse the output of ``nvidia-smi topo -m``; ``None`` if it has an unknown format or cell."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), None)
    if header is None:
        return None
    columns = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    rows = {line[0]: tuple(line[1 : 1 + len(columns)]) for line in lines if line and line[0] in columns and "X" in line}
    paths = tuple(rows.get(name, ()) for name in columns)
    known = re.compile(rf"NV\d+|{'|'.join(PCIE_PATHS)}")
    for i, row in enumerate(paths):
        cells_known = all(path == "X" if i == j else known.fullmatch(path) for j, path in enumerate(row))
        if len(row) != len(columns) or not cells_known:
            return None
    others = [word for word in header[len(columns) :] if re.fullmatch(r"NIC\d+|mlx\w+|bnxt\w+|efa\w*", word)]
    beside = len(columns) + len(others) + 1
    by_name = {line[0]: line for line in lines if line}
    affinities = [by_name[name][beside : beside + 2] for name in columns] if "Affinity" in header else []
    return Topology(
        paths=paths,
        nics=_nics(lines, others, len(columns), known),
        cores=tuple(_cell(cells, 0) for cells in affinities),
        numa=tuple(_cell(cells, 1) for cells in affinities),
    )


def _nics(lines: Sequence[Sequence[str]], names: Sequence[str], gpus: int, known: re.Pattern[str]) -> tuple[Nic, ...]:
    """Parse the rows of network cards.

    ``NIC0: mlx5_0`` of the legend names the device; older matrices name it in the row.
    """
    legend = {line[0][:-1]: line[1] for line in lines if len(line) == 2 and line[0].endswith(":")}
    found = []
    for line in lines:
        if line and line[0] in names and len(line) > gpus and all(known.fullmatch(path) for path in line[1 : 1 + gpus]):
            device = legend.get(line[0]) or (None if line[0].startswith("NIC") else line[0])
            found.append(Nic(line[0], tuple(line[1 : 1 + gpus]), device))
    return tuple(found)


def _cell(cells: Sequence[str], index: int) -> str | None:
    return cells[index] if len(cells) > index and cells[index] != "N/A" else None


def read_topology() -> Topology | None:
    """Query ``nvidia-smi``; ``None`` if it is missing, fails, times out, or cannot be parsed."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_topology(done.stdout) if done.returncode == 0 else None


def link_of(topology: Topology, gpu: GpuSpec | None) -> Link | None:
    """Link of these GPUs when all communicate at once (a ring): its slowest part.

    NVLink's bytes/s are those of the device's links by generation, never more than the table's; unknown for a GPU that
    the table does not have. Across PCIe, the slot's rate is used whatever the path; ``source`` names the longest path,
    as the host bridges and socket links that ``PHB``, ``NODE`` and ``SYS`` cross have no sourced rate.
    """
    size = len(topology.paths)
    if size < 2:
        return None
    if not topology.nvlink_ring:
        rate = gpu.pcie.bytes_per_s if gpu and gpu.pcie else None
        return Link(kind="pcie", bytes_per_s=rate, source=f"nvidia-smi topo -m: {topology.farthest} at the farthest")
    counts = [[topology.nvlinks(i, j) for j in range(size) if i != j] for i in range(size)]
    switched = len({n for row in counts for n in row}) == 1  # or two cards with a bridge: the same sum
    links = min(row[0] if switched else sum(row) for row in counts)
    per_link = nvlink_link_bytes_per_s(gpu.arch) if gpu else None
    ceiling = next((link.bytes_per_s for link in (gpu.nvlink, gpu.bridge) if link), None) if gpu else None
    if ceiling is not None and per_link is not None and switched and links * (size - 1) * per_link <= ceiling:
        links *= size - 1  # every pair joined directly, without a switch: more links than a GPU has otherwise
    rates = [rate for rate in (ceiling, links * per_link if per_link else None) if rate is not None]
    return Link(
        kind="nvlink", bytes_per_s=min(rates) if rates else None, source=f"nvidia-smi topo -m: {links} links a GPU"
    )
