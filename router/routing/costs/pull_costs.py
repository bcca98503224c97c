"""Learns what pulls between workers cost, and how often workers carry out the expected pull. Pure.

Nothing overlaps a pull, whereas a transfer overlaps its prefill, so their link costs are learned separately. A worker
that knows better than the router may compute what it was expected to pull. If most pulls end that way, only a few
requests are still priced with a pull, to notice when that changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.types import WorkerId
from penstock.v1 import common_pb2
from router.routing.costs.link_costs import LinkBook
from router.routing.policy.interface import PlannedPull, PullOffer

MIN_TOKENS = 512  # shorter prefixes are not worth a pull
_SMOOTHING = 0.1
_MIN_KEPT = 0.5  # share of expected pulls that happened; below it, requests are no longer priced with pulls
_PROBE_EVERY = 16  # below `_MIN_KEPT`, one in this many requests is still priced with a pull
_UNFINISHED = 2.0  # a failed pull counts as this many times its prediction or its duration, whichever is longer


class PullBook:
    """Holds what is learned about pulls, and owns the costs of their links."""

    def __init__(self) -> None:
        self.links = LinkBook()
        self._kept = 1.0  # running share of the expected pulls that were completed
        self._num_offers = 0

    def offer(self, on_device: Mapping[WorkerId, int]) -> PullOffer | None:
        """Returns the worker to pull a prompt's prefix from, or None if pulls are not worth it.

        `on_device` says how many leading tokens each worker holds on its device.
        """
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
        """Learns from a prompt that `worker` has computed: `plan` is the expected pull, `pull` the reported one."""
        if pull is not None and pull.wanted_tokens:
            seconds, source = pull.pull_ms / 1e3, WorkerId(pull.source)
            num_bytes = pull.wanted_tokens * token_bytes
            if pull.pulled_tokens < pull.wanted_tokens:
                seconds = _UNFINISHED * max(seconds, self.links.cost(source, worker).transfer_s(num_bytes))
            self.links.observe(source, worker, int(num_bytes), seconds)
        if plan is not None:
            is_kept = pull is not None and pull.pulled_tokens == pull.wanted_tokens
            self._kept += _SMOOTHING * (is_kept - self._kept)
