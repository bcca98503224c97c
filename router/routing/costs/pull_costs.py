"""Learns what pulls cost, and how often workers carry out the expected pull. Pure.

A transfer waits for its prefill and a pull waits for nothing, so their link costs are learned separately, and so are
those of a shared store. A worker that knows better than the router may compute what it was expected to pull. If most
pulls from workers, or from the store, end that way, only a few requests are still priced with one, to notice when that
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types import SHARED_STORE, WorkerId
from penstock.v1 import common_pb2
from router.routing.costs.link_costs import PRIORS, Distance, LinkBook, LinkCost
from router.routing.policy.interface import PlannedPull, PullOffer

MIN_TOKENS = 512  # shorter prefixes are not worth a pull
_SMOOTHING = 0.1
_MIN_KEPT = 0.5  # share of expected pulls that happened; below it, requests are no longer priced with pulls
_KEPT_SHARE = 0.5  # share of its tokens that must have been pulled
_PROBE_EVERY = 16  # below `_MIN_KEPT`, one in this many requests is still priced with a pull
_UNFINISHED = (
    2.0  # a pull that has brought nothing counts as this many times its prediction or its duration, whichever is longer
)


@dataclass(slots=True)
class _Record:
    """Learns about pulls from one kind of source: their costs, and how many happen as expected."""

    links: LinkBook = field(default_factory=LinkBook)
    kept: float = 1.0  # running share of the expected pulls that were completed
    num_offers: int = 0

    def allows_offer(self) -> bool:
        """Counts an offer. Returns whether to make it."""
        self.num_offers += 1
        return self.kept >= _MIN_KEPT or self.num_offers % _PROBE_EVERY == 0


class PullBook:
    """Holds what is learned about pulls, and owns the costs of their links."""

    def __init__(self, link_priors: Mapping[Distance, LinkCost] = PRIORS) -> None:
        self._from_workers = _Record(LinkBook(link_priors))
        self._from_store = _Record()

    @property
    def links(self) -> LinkBook:
        """The costs of pulls between workers."""
        return self._from_workers.links

    def forget(self, worker_id: WorkerId) -> None:
        for record in (self._from_workers, self._from_store):
            record.links.forget(worker_id)

    def offer(self, on_device: Mapping[WorkerId, int], stored: int = 0) -> PullOffer | None:
        """Returns the source to pull a prompt's prefix from, or None if pulls are not worth it.

        `on_device` says how many leading tokens each worker holds on its device, and `stored` how many the shared store
        holds. A worker is the faster source, so the store is named only if it holds more by what is worth a pull.
        """
        most = max(on_device.values(), default=0)
        if stored >= most + MIN_TOKENS and self._from_store.allows_offer():
            return PullOffer(SHARED_STORE, stored, self._from_store.links.cost)
        if most < MIN_TOKENS or not self._from_workers.allows_offer():
            return None
        holders = [worker_id for worker_id, tokens in on_device.items() if tokens == most]
        return PullOffer(holders[self._from_workers.num_offers % len(holders)], most, self.links.cost)

    def on_end(
        self, plan: PlannedPull | None, worker: WorkerId, pull: common_pb2.Pull | None, token_bytes: float
    ) -> None:
        """Learns from a prompt that `worker` has computed: `plan` is the expected pull, `pull` the reported one."""
        if pull is not None and pull.wanted_tokens:
            seconds, source = pull.pull_ms / 1e3, WorkerId(pull.source)
            # A worker computes one end of a prompt while it pulls the other, so a part is what a slow link brings.
            links, num_bytes = self._record_of(source).links, (pull.pulled_tokens or pull.wanted_tokens) * token_bytes
            if not pull.pulled_tokens:
                seconds = _UNFINISHED * max(seconds, links.cost(source, worker).transfer_s(num_bytes))
            links.observe(source, worker, int(num_bytes), seconds)
        if plan is not None:
            is_kept = pull is not None and pull.pulled_tokens >= _KEPT_SHARE * pull.wanted_tokens
            record = self._record_of(plan.source)
            record.kept += _SMOOTHING * (is_kept - record.kept)

    def _record_of(self, source: WorkerId) -> _Record:
        return self._from_store if source == SHARED_STORE else self._from_workers
