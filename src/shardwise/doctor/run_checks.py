"""Run all checks of a machine, in display order."""

from __future__ import annotations

from shardwise.doctor.check import Check
from shardwise.doctor.checks.gpu import check_gpus
from shardwise.doctor.checks.host import check_host
from shardwise.doctor.checks.interconnect import check_links
from shardwise.doctor.checks.settings import check_settings
from shardwise.doctor.checks.versions import check_versions
from shardwise.doctor.machine_facts import HostFacts


def examine(facts: HostFacts) -> list[Check]:
    """Run every check that needs no other rank.

    These are devices, versions, links, the machine's limits, disk, settings.
    """
    return [
        *check_gpus(facts),
        *check_versions(facts),
        *check_links(facts),
        *check_host(facts),
        *check_settings(facts),
    ]
