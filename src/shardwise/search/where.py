"""Where to run: the best plan on each cluster of a price catalogue, and on bought ones, by money and time.

Spot instances are interrupted; each interruption costs half the interval between checkpoints, on average, and the time
to restart. How often that happens is not in any price list: without a rate the spot price is that of a run that is
never interrupted, beside the rate at which it stops being cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.cost.price import Prices, own_device_hour, price_of
from shardwise.cost.price_catalogue import Instance, PriceCatalogue
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec, gpu_cluster
from shardwise.hardware.gpus import find_gpu
from shardwise.search.candidate import Candidate, SearchResult

NODES = (1, 2, 4, 8)  # instances in a cluster, of those with a full node's devices
FULL_NODE = 8
Kind = Literal["on demand", "spot", "own"]


@dataclass(frozen=True)
class Place:
    """Cluster with its prices: dollars for an hour of all of it, on demand (or owned) and as spot."""

    label: str
    cluster: ClusterSpec
    hour: float | None
    spot_hour: float | None
    instances: int
    owned: bool = False


@dataclass(frozen=True)
class Offered:
    """Run of the best plan at a place, paid one way; unknown is ``None``, ``why_not`` is empty where it would do.

    ``break_even`` is the number of interruptions a day and instance at which spot costs as much as on demand.
    """

    place: Place
    kind: Kind
    best: Candidate | None
    hours: float | None
    dollars: float | None
    why_not: str = ""
    break_even: float | None = None


@dataclass(frozen=True)
class SpotRuns:
    """Assumptions about spot: interruptions a day of one instance (``None``: unknown), minutes of save and restart."""

    interruptions_per_day: float | None
    save_minutes: float
    restart_minutes: float

    @property
    def lost_hours(self) -> float:
        """Hours that an interruption costs, on average."""
        return (self.save_minutes / 2 + self.restart_minutes) / 60

    def slower(self, instances: int) -> float:
        """Return how many times as long a run takes on so many instances; 1 where the rate is unknown."""
        return 1 + (self.interruptions_per_day or 0.0) / 24 * instances * self.lost_hours


def places_of(catalogue: PriceCatalogue) -> list[Place]:
    """Return every cluster that the catalogue's instances make."""
    found = []
    for instance in catalogue.instances:
        for nodes in NODES if instance.devices == FULL_NODE else (1,):
            place = _rented(instance, nodes)
            if place is not None:
                found.append(place)
    return found


def _rented(instance: Instance, nodes: int) -> Place | None:
    """Build a place; ``None`` where the hardware table has no network between such nodes."""
    cluster = _cluster(instance.gpu.name, nodes, instance.devices)
    if cluster is None or (nodes > 1 and cluster.network is None):
        return None
    hour = None if instance.hour is None else instance.hour * nodes
    spot = None if instance.spot_hour is None else instance.spot_hour * nodes
    each = None if hour is None else hour / cluster.world_size
    many = "" if nodes == 1 else f"{nodes} × "
    label = f"{many}{instance.name}, {instance.cloud} {instance.region}"
    return Place(label, cluster.model_copy(update={"price_per_device_hour": each}), hour, spot, nodes)


def _cluster(gpu: str, nodes: int, devices: int) -> ClusterSpec | None:
    try:
        return gpu_cluster(f"{nodes}x{devices}x{gpu}", gpu, (nodes, devices))
    except PlanError:
        return None


def owned_places(prices: Prices) -> list[Place]:
    """Return a node of one's own for each GPU with a price to buy it at."""
    found = []
    for name in prices.buy:
        gpu = find_gpu(name)
        cluster = None if gpu is None else _cluster(gpu.name, 1, gpu.devices_per_node or FULL_NODE)
        if gpu is None or cluster is None:
            continue
        price, hour = price_of(prices.buy, gpu.name), None
        if price is not None and gpu.tdp_w is not None:
            each = own_device_hour(price, gpu.tdp_w, prices, cluster.devices_per_node)
            hour = each * cluster.world_size
        found.append(Place("a bought node", cluster, hour, None, 1, owned=True))
    return found


def offers_at(
    places: Sequence[Place],
    search: Callable[[ClusterSpec], SearchResult],
    runs: SpotRuns,
    *,
    deadline_hours: float | None,
    budget: float | None,
) -> list[Offered]:
    """Plan each place and return its offers, those that would do first, the cheapest before the fastest."""
    results: dict[tuple[str, int, int], Candidate | str] = {}
    found: list[Offered] = []
    for place in places:
        cluster = place.cluster
        key = (cluster.device_name, cluster.nodes, cluster.devices_per_node)
        if key not in results:
            results[key] = _best(search(cluster))
        best = results[key]
        for kind, hour in (("own" if place.owned else "on demand", place.hour), ("spot", place.spot_hour)):
            if hour is None and (kind == "spot" or place.spot_hour is not None):
                continue
            found.append(_offered(place, kind, hour, best, runs, deadline_hours, budget))  # type: ignore[arg-type]
    return sorted(found, key=_order)


def _best(result: SearchResult) -> Candidate | str:
    """Return the recommended plan, or why there is none."""
    if result.recommended is None:
        return "no plan fits" if result.optimizer is None else "no plan fits with AdamW"
    return result.candidates[result.recommended]


def _offered(
    place: Place,
    kind: Kind,
    hour: float | None,
    best: Candidate | str,
    runs: SpotRuns,
    deadline_hours: float | None,
    budget: float | None,
) -> Offered:
    if isinstance(best, str):
        return Offered(place, kind, None, None, None, best)
    hours = best.hours
    if hours is not None and kind == "spot":
        hours *= runs.slower(place.instances)
    dollars = None if hours is None or hour is None else hours * hour
    why_not = ""
    if hours is None:
        why_not = "speed unknown"
    elif dollars is None:
        why_not = "price unknown"
    elif deadline_hours is not None and hours > deadline_hours:
        why_not = "past the deadline"
    elif budget is not None and dollars > budget:
        why_not = "above the budget"
    even = None
    if kind == "spot" and place.hour and hour and runs.lost_hours:
        even = max(0.0, (place.hour / hour - 1) / runs.lost_hours * 24 / place.instances)
    return Offered(place, kind, best, hours, dollars, why_not, even)


def _order(offer: Offered) -> tuple[bool, bool, float, float]:
    unknown = float("inf")
    return (
        bool(offer.why_not),
        offer.best is None,
        unknown if offer.dollars is None else offer.dollars,
        unknown if offer.hours is None else offer.hours,
    )
