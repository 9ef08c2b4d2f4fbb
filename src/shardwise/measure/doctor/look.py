"""All checks of a machine, in the order in which they are shown."""

from __future__ import annotations

from shardwise.measure.doctor.check import Check
from shardwise.measure.doctor.facts import HostFacts
from shardwise.measure.doctor.gpu import check_gpus
from shardwise.measure.doctor.host import check_host
from shardwise.measure.doctor.links import check_links
from shardwise.measure.doctor.settings import check_settings
from shardwise.measure.doctor.versions import check_versions


def examine(facts: HostFacts) -> list[Check]:
    """Every check that needs no other rank: devices, versions, links, the machine's limits, disk, settings."""
    return [
        *check_gpus(facts),
        *check_versions(facts),
        *check_links(facts),
        *check_host(facts),
        *check_settings(facts),
    ]
