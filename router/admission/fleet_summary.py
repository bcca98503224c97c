"""Summarizes the workers' descriptions and reports in the `FleetState` that admission uses. Pure.

If one worker does not report a figure, the sum over all workers is unknown: a partial sum would pass for the whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from router.admission.capacity import FleetState
from router.routing.placement_core import RoutableWorker

_WINDOW_S = 1.0


def summarize_fleet(
    decode: Sequence[RoutableWorker],
    prefill: Sequence[RoutableWorker],
    peer_sequences: int = 0,
    peer_bulk_sequences: int = 0,
) -> FleetState:
    computing = prefill or decode
    has_pages = all(worker.load.total_pages for worker in decode)
    steps = [worker.load.step_s for worker in decode if worker.load.step_s]
    return FleetState(
        num_decode=len(decode),
        num_prefill=len(prefill),
        slots=int(slots) if (slots := _sum(worker.limits.max_running for worker in decode)) else None,
        num_waiting=sum(worker.load.num_waiting for worker in decode),
        kv_tokens=sum(worker.load.total_pages * worker.page_size for worker in decode) if has_pages else None,
        free_kv_tokens=sum(worker.load.free_pages * worker.page_size for worker in decode) if has_pages else None,
        max_held_tokens=int(_sum(worker.limits.max_held_tokens for worker in decode) or 0) // max(1, len(decode)),
        queued_prefill_tokens=sum(worker.load.queued_prefill_tokens for worker in computing),
        prefill_tokens_per_s=_sum(worker.load.prefill_tokens_per_s for worker in computing),
        step_s=sum(steps) / len(steps) if steps else None,
        peer_sequences=peer_sequences,
        num_bulk=sum(worker.load.num_bulk for worker in decode),
        bulk_kv_tokens=sum(worker.load.bulk_pages * worker.page_size for worker in decode),
        queued_bulk_tokens=sum(worker.load.queued_bulk_tokens for worker in computing),
        peer_bulk_sequences=peer_bulk_sequences,
    )


def num_reported(decode: Sequence[RoutableWorker]) -> int:
    """Returns the number of sequences that the decode workers report, from all routers."""
    return sum(worker.load.num_running + worker.load.num_waiting for worker in decode)


def num_bulk_reported(decode: Sequence[RoutableWorker]) -> int:
    """Returns the number of bulk sequences that the decode workers report, from all routers."""
    return sum(worker.load.num_bulk for worker in decode)


class PeerSequenceEstimate:
    """Estimates the outstanding sequences of other routers: those that workers report beyond this router's own.

    Reports lag behind this router's own count, so a sequence of its own that just ended looks like another router's for
    a moment. The estimate is therefore the minimum over the last second.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (time, excess), both ascending: the first is the minimum

    def observe(self, num_reported: int, own_sequences: int, now_s: float) -> int:
        """Adds a sample and returns the estimate."""
        excess = max(0, num_reported - own_sequences)
        while self._samples and self._samples[-1][1] >= excess:
            self._samples.pop()
        self._samples.append((now_s, excess))
        while self._samples[0][0] < now_s - _WINDOW_S:
            self._samples.popleft()
        return self._samples[0][1]


def _sum(values: Iterable[float]) -> float | None:
    """Returns the sum, or None if any value is 0, which means unknown."""
    known = list(values)
    return sum(known) if all(known) else None
