"""Device memory outside the allocator: CUDA context and communicator buffers, roughly.

Neither is documented by NVIDIA; both change with driver, CUDA and NCCL versions.
"""

from __future__ import annotations

from shardwise.cost.memory.local_shapes import ShardLayout
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import constants_of
from shardwise.units import MIB

NEWEST_CONTEXT_BYTES = 600 * MIB  # of Hopper and later, and of unknown GPUs (else `Generation.context_bytes`)
# A communicator's buffers grow with its channels, and those with the link's speed (github.com/NVIDIA/nccl issue 986):
# 544 MB for two and 688 MB for four A100s over NVLink of 300 GB/s (issue 964). H100s take no more.
GROUP_BYTES = 600 * MIB
GROUP_BYTES_FULL_AT = 300e9  # bytes per second of the link, one direction
SLOWEST_GROUP_BYTES = 100 * MIB  # two channels, over PCIe or sockets


def context_bytes(layout: ShardLayout, cluster: ClusterSpec) -> int:
    """Bytes of context and of a communicator per mesh axis on one device; 0 on a CPU."""
    if not layout.is_cuda or cluster.device == "cpu":
        return 0
    found = None if cluster.gpu is None else constants_of(cluster.gpu)
    context = NEWEST_CONTEXT_BYTES if found is None or found.context_bytes is None else found.context_bytes
    speed = cluster.link.bytes_per_s if cluster.link is not None and cluster.link.bytes_per_s else GROUP_BYTES_FULL_AT
    group = max(SLOWEST_GROUP_BYTES, int(GROUP_BYTES * min(1.0, speed / GROUP_BYTES_FULL_AT)))
    replicas = layout.replicas // layout.shard_ranks if layout.shards else 1
    degrees = (layout.shard_ranks if layout.shards else layout.replicas, replicas, layout.tp, layout.cp)
    groups = sum(degree > 1 for degree in degrees)
    pipeline = 2 * SLOWEST_GROUP_BYTES if layout.pp > 1 else 0
    return context + groups * group + pipeline
