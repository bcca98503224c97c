"""Learns what pulls between workers cost, and how often the workers carry out the expected pull. Pure.

A pull is exposed in full, whereas a transfer hides behind its prefill, so their link costs are learned separately. A
worker may know better than the router and compute what it was expected to pull. If most pulls end that way, only a few
requests are still priced with one, to notice when that changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.types import WorkerId
from penstock.v1 import common_pb2
from router.routing.costs.link_costs import LinkBook
from router.routing.policy.interface import PlannedPull, PullOffer

MIN_TOKENS = 512  # fewer are not worth a pull
_SMOOTHING = 0.1
_MIN_KEPT = 0.5  # share of pulls that happened; below it, pulls are not expected any more
_PROBE_EVERY = 16  # of the requests that could be priced with a pull
_UNFINISHED = 2.0  # times its prediction or its duration, whichever is more: what a failed pull would have taken


class PullBook:
    """The knowledge about pulls. Owns the costs of their links."""

    def __init__(self) -> None:
        self.links = LinkBook()
        self._kept = 1.0  # running share of the expected pulls that brought their pages
        self._num_offers = 0

    def offer(self, on_device: Mapping[WorkerId, int]) -> PullOffer | None:
        """Returns the worker to pull a prompt's prefix from, given how many leading tokens each holds on its device."""
        most = max(on_device.values(), default=0)
        if most < MIN_TOKENS:
            return None
        self._num_offers += 1
        if self._kept < _MIN_KEPT and self._num_offers % _PROBE_EVERY:
            return None
        holders = [worker_id for worker_id, tokens in on_device.items() if tokens == most]
        return PullOffer(holders[self._num_offers % len(holders)], most, self.links.cost)

    def on_end(
        self, plan: PlannedPull | None, worker: WorkerId, pull: common_pb2.Pull | None, token_bytes: float
    ) -> None:
        """Learns from a prompt that `worker` has computed. `plan` is the pull that was expected, `pull` the one that
        the worker reports.
        """
        if pull is not None and pull.wanted_tokens:
            seconds, source = pull.pull_ms / 1e3, WorkerId(pull.source)
            num_bytes = pull.wanted_tokens * token_bytes
            if pull.pulled_tokens < pull.wanted_tokens:
                seconds = _UNFINISHED * max(seconds, self.links.cost(source, worker).transfer_s(num_bytes))
            self.links.observe(source, worker, int(num_bytes), seconds)
        if plan is not None:
            is_kept = pull is not None and pull.pulled_tokens == pull.wanted_tokens
            self._kept += _SMOOTHING * (is_kept - self._kept)
