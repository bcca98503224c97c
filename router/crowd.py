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
    """Running means over the requests that were placed: of the time in queues, and of a prompt's own computing."""

    def __init__(self) -> None:
        self._queue_s = 0.0
        self._compute_s = 0.0

    @property
    def num_waiting(self) -> float:
        """Behind one that is computed now, on an average worker."""
        return min(_MOST, self._queue_s / self._compute_s) if self._compute_s > 0.0 else 0.0

    def observe(self, views: Sequence[WorkerView], least_compute_s: float) -> None:
        """A request is placed that takes so long to compute where it takes least."""
        queue_s = sum(view.queue_s for view in views) / len(views)
        self._queue_s += _SMOOTHING * (queue_s - self._queue_s)
        self._compute_s += (_SMOOTHING if self._compute_s else 1.0) * (least_compute_s - self._compute_s)

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
