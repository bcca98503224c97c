"""Estimates how far apart two workers are and what transfers between them cost. Pure.

A link's prior depends on its distance; the cost of transfers is then learned, first over all links of that distance and
later for each link by itself. Only the exposed part of a transfer is priced: what overlaps the prefill costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from penstock.scheduling.linear_cost import LinearCost, positive
from penstock.types import Labels, WorkerId

_REFRESH = 256  # transfers after which the lower bound on all links is recomputed; in between it only falls
_MAX_LINKS = 65536  # links with a model of their own
_MIN_OWN = 3  # transfers before a link's own model is used instead of that of its distance
_UNLABELLED = Labels()


class Distance(IntEnum):
    HOST = 0  # the same host
    RACK = 1  # the same rack
    ZONE = 2  # the same zone
    FAR = 3  # different zones
    UNKNOWN = 4


class LinkCost(NamedTuple):
    latency_s: float
    byte_s: float

    def transfer_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes * self.byte_s


# Orders of magnitude for shared memory, RDMA within a rack, Ethernet within a datacentre, and links between zones.
PRIORS = {
    Distance.HOST: LinkCost(0.002, 1 / 8e9),
    Distance.RACK: LinkCost(0.003, 1 / 4e9),
    Distance.ZONE: LinkCost(0.004, 1 / 1e9),
    Distance.FAR: LinkCost(0.010, 1 / 2e8),
    Distance.UNKNOWN: LinkCost(0.004, 1 / 1e9),
}


def distance(first: Labels, second: Labels) -> Distance:
    """Returns the distance given by the narrowest label on which both workers agree."""
    if first.host and first.host == second.host:
        return Distance.HOST
    if first.zone and second.zone and first.zone != second.zone:
        return Distance.FAR
    if first.rack and first.rack == second.rack:
        return Distance.RACK
    if first.zone and first.zone == second.zone:
        return Distance.ZONE
    return Distance.UNKNOWN


class LinkBook:
    """The cost of every link from a prefill to a decode worker."""

    def __init__(self, priors: Mapping[Distance, LinkCost] = PRIORS) -> None:
        self._priors = priors
        self._labels: dict[WorkerId, Labels] = {}
        self._by_distance = {distance: LinearCost(prior) for distance, prior in priors.items()}
        self._own: dict[tuple[WorkerId, WorkerId], LinearCost] = {}
        self._own_costs: dict[tuple[WorkerId, WorkerId], LinkCost] = {}  # of the own models that are used
        self._costs = dict(priors)  # of the models by distance
        self._distances: dict[tuple[WorkerId, WorkerId], Distance] = {}  # of the links looked up since the last change
        self._possible = {Distance.UNKNOWN}  # distances that a link may have
        self.fastest = self._fastest()  # lower bound on every link, in latency and in seconds per byte
        self._num_observed = 0

    def set_labels(self, worker_id: WorkerId, labels: Labels) -> None:
        self._labels[worker_id] = labels
        self._distances.clear()
        self._possible = _possible(self._labels.values())
        self.fastest = self._fastest()

    def forget(self, worker_id: WorkerId) -> None:
        self._labels.pop(worker_id, None)
        self._own = {link: model for link, model in self._own.items() if worker_id not in link}
        self._own_costs = {link: cost for link, cost in self._own_costs.items() if worker_id not in link}
        self._distances.clear()

    def cost(self, prefill: WorkerId, decode: WorkerId) -> LinkCost:
        link = (prefill, decode)
        found = self._own_costs.get(link)
        return self._costs[self._distance(link)] if found is None else found

    def observe(self, prefill: WorkerId, decode: WorkerId, num_bytes: float, seconds: float) -> None:
        """Learns how long a transfer took beyond its prefill. `num_bytes` includes the bytes in flight ahead of it."""
        link = (prefill, decode)
        link_distance = self._distance(link)
        pooled = self._by_distance[link_distance]
        pooled.observe((1, num_bytes), seconds)
        own = self._own.get(link)
        if own is None:
            if len(self._own) >= _MAX_LINKS:
                self._own.clear()
                self._own_costs.clear()
            own = self._own[link] = LinearCost(positive(pooled.coefficients, self._priors[link_distance]))
        own.observe((1, num_bytes), seconds)
        changed = [self.fastest]
        cost = self._costs[link_distance] = _cost(pooled)
        changed.append(cost)
        if own.num_observed >= _MIN_OWN:
            cost = self._own_costs[link] = _cost(own)
            changed.append(cost)
        self._num_observed += 1
        self.fastest = _fastest(changed) if self._num_observed % _REFRESH else self._fastest()

    def _fastest(self) -> LinkCost:
        return _fastest([*(self._costs[each] for each in self._possible), *self._own_costs.values()])

    def _distance(self, link: tuple[WorkerId, WorkerId]) -> Distance:
        found = self._distances.get(link)
        if found is None:
            first, second = (self._labels.get(worker_id, _UNLABELLED) for worker_id in link)
            found = self._distances[link] = distance(first, second)
        return found


def _possible(labels: Collection[Labels]) -> set[Distance]:
    """Returns the distances that two of these workers, or one without labels, may have."""
    hosts, racks, zones = (
        Counter(getattr(each, name) for each in labels if getattr(each, name)) for name in ("host", "rack", "zone")
    )
    found = {Distance.UNKNOWN}
    for counted, narrowest in ((hosts, Distance.HOST), (racks, Distance.RACK), (zones, Distance.ZONE)):
        if max(counted.values(), default=0) > 1:
            found.add(narrowest)
    if len(zones) > 1:
        found.add(Distance.FAR)
    return found


def _cost(model: LinearCost) -> LinkCost:
    return LinkCost(*model.coefficients)


def _fastest(costs: Iterable[LinkCost]) -> LinkCost:
    known = list(costs)
    return LinkCost(min(cost.latency_s for cost in known), min(cost.byte_s for cost in known))
