"""How many prompts wait for their prefill: what a second of computing costs those who come behind it. Pure.

The cheapest worker for one request alone is often not the cheapest for all: where it computes what another has cached,
it delays whoever is sent there next. While nobody waits this costs nothing; the fuller the queues are, the more a
cached prefix is worth. What it gains is in docs/lab-notes.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from router import prices
from router.views import Demand, WorkerView

_SMOOTHING = 0.05  # weight of the newest request
_MOST = 4.0  # waiting on a worker, beyond which prices rise no more: then admission has to act


class PrefillCrowd:
    """Running mean, over the requests that were placed, of the share of workers that had something to compute."""

    def __init__(self) -> None:
        self._busy_share = 0.0

    @property
    def num_waiting(self) -> float:
        """In a queue that is busy so much of the time, the one that is computed now included."""
        return min(_MOST, self._busy_share / (1.0 - self._busy_share)) if self._busy_share < 1.0 else _MOST

    def observe(self, views: Sequence[WorkerView]) -> None:
        """A request is placed."""
        share = sum([view.queue_s > 0.0 for view in views]) / len(views)
        self._busy_share += _SMOOTHING * (share - self._busy_share)

    def harms_s(self, demand: Demand, views: Sequence[WorkerView], computes_s: Sequence[float]) -> list[float]:
        """For each view, the delay of others if the prompt is computed there.

        All are priced by one worker's costs, that of the fastest: else a small error in what was learnt of a worker
        would count several times, and drive work away from it that no cache asks for.
        """
        waiting = self.num_waiting
        if not waiting:
            return [0.0] * len(views)
        fastest = views[computes_s.index(min(computes_s))]
        return [waiting * compute_s for compute_s in prices.all_prefill_like_s(demand, views, fastest)]
