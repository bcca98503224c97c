"""Estimates how far apart two workers are and what transfers between them cost. Pure.

A link's prior depends on its distance; the cost of transfers is then learned, first over all links of that distance and
later for each link by itself. Only the exposed part of a transfer is priced: what overlaps the prefill costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from penstock.scheduling.linear_cost import LinearCost, positive
from penstock.types import Labels, WorkerId

_REFRESH = 256  # transfers after which the lower bound on all links is recomputed; in between it only falls
_MAX_LINKS = 65536  # links with a model of their own
_MIN_OWN = 3  # transfers before a link's own model is used instead of that of its distance


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

    def __init__(self) -> None:
        self._labels: dict[WorkerId, Labels] = {}
        self._by_distance = {distance: LinearCost(prior) for distance, prior in PRIORS.items()}
        self._own: dict[tuple[WorkerId, WorkerId], LinearCost] = {}
        self._costs: dict[tuple[WorkerId, WorkerId], LinkCost] = {}  # of the links looked up since the last change
        self.fastest = _fastest(PRIORS.values())  # lower bound on every link, in latency and in seconds per byte
        self._num_observed = 0

    def set_labels(self, worker_id: WorkerId, labels: Labels) -> None:
        self._labels[worker_id] = labels
        self._costs.clear()

    def forget(self, worker_id: WorkerId) -> None:
        self._labels.pop(worker_id, None)
        self._own = {link: model for link, model in self._own.items() if worker_id not in link}
        self._costs.clear()

    def cost(self, prefill: WorkerId, decode: WorkerId) -> LinkCost:
        link = (prefill, decode)
        found = self._costs.get(link)
        if found is None:
            found = self._costs[link] = self._find(link)
        return found

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
            own = self._own[link] = LinearCost(positive(pooled.coefficients, PRIORS[link_distance]))
        own.observe((1, num_bytes), seconds)
        self._costs.clear()
        self._num_observed += 1
        if self._num_observed % _REFRESH:
            self.fastest = _fastest([self.fastest, _cost(pooled), _cost(own)])
        else:
            self.fastest = _fastest(map(_cost, (*self._by_distance.values(), *self._own.values())))

    def _find(self, link: tuple[WorkerId, WorkerId]) -> LinkCost:
        own = self._own.get(link)
        return _cost(own if own and own.num_observed >= _MIN_OWN else self._by_distance[self._distance(link)])

    def _distance(self, link: tuple[WorkerId, WorkerId]) -> Distance:
        unknown = Labels()
        return distance(self._labels.get(link[0], unknown), self._labels.get(link[1], unknown))


def _cost(model: LinearCost) -> LinkCost:
    return LinkCost(*model.coefficients)


def _fastest(costs: Iterable[LinkCost]) -> LinkCost:
    known = list(costs)
    return LinkCost(min(cost.latency_s for cost in known), min(cost.byte_s for cost in known))
