"""Parse the command line's cluster: ``2x8xH100-SXM@nvlink/ib400``, a file, or this machine."""

from __future__ import annotations

import math
import re
from pathlib import Path

from shardwise.errors import PlanError
from shardwise.hardware.cluster import GRAMMAR, MOST_DEVICES, ClusterSpec, detect, gpu_cluster
from shardwise.hardware.cluster_file import read_cluster

_SPEC = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?([^@/]+?)\s*(?:@([^/]*))?(?:/(.*))?")


def parse_cluster(text: str) -> ClusterSpec:
    """Parse ``2x8xH100-SXM``, ``4xRTX4090@pcie4``, ``cpu``, ``2xcpu``, ``auto`` or a file.

    ``auto`` is this machine. Two numbers are nodes and devices of each; one number is devices, split over nodes of the
    size that the hardware table gives if it exceeds one node (``64xH100`` is ``8x8xH100``). ``@`` precedes the link of
    a node's devices, ``/`` the network between nodes. Without them NVLink (or xGMI) is used where the table has it,
    else PCIe, and between nodes the network of the table's typical node, unknown where there is none. A path that ends
    in .toml or .json is read by `shardwise.hardware.cluster_file`.

    Raises:
        PlanError: every invalid or unknown part, at once.
    """
    text = text.strip()
    if text.lower().endswith((".toml", ".json")):
        return read_cluster(Path(text))
    if text.lower() in ("auto", "local"):
        return detect()
    found = _SPEC.fullmatch(text)
    if found is None:
        raise PlanError(f"cluster '{text}' is not understood; write {GRAMMAR}, or the path of a .toml or .json file")
    first, second, name, link_text, network_text = found.groups()
    numbers = tuple(int(n) if len(n) < 8 else MOST_DEVICES + 1 for n in (first, second) if n is not None)
    if 0 in numbers:
        raise PlanError(f"cluster '{text}': the numbers of nodes and devices must be 1 or more")
    if math.prod(numbers) > MOST_DEVICES:
        raise PlanError(f"cluster '{text:.80}': {MOST_DEVICES:,} devices are the most that are planned for")
    if name.lower() == "cpu":
        if link_text is not None or network_text is not None:
            raise PlanError(f"cluster '{text}': links are not planned between CPU ranks; write 2xcpu")
        here = detect("cpu", numbers[-1] if numbers else None)
        return here.model_copy(update={"nodes": numbers[0] if len(numbers) == 2 else 1})
    return gpu_cluster(text, name, numbers or (1,), link_text=link_text, network_text=network_text)
