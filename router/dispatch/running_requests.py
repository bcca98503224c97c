"""Keeps the requests that run now, so that `penstock trace` can say where one of them is.

The dispatcher adds each request when it begins to wait for admission and removes it at its end. As many are kept as the
router has in flight. What they have done so far is read from them when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.admission.gate import AdmissionSlot
from router.prepared_request import PreparedRequest
from router.tracing.waterfall import Json, RunningCompletion, running_waterfall


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request from its arrival at admission to its end."""

    request: PreparedRequest
    slot: AdmissionSlot
    progress: Callable[[], Sequence[RunningCompletion]] | None = None  # None until it is admitted


class RunningRequests:
    """Owns the running requests of one router. Use it on the router's event loop only."""

    def __init__(self) -> None:
        self._running: dict[str, RunningRequest] = {}  # by request id; of two with the same id, the later one

    def add(self, running: RunningRequest) -> None:
        self._running[running.request.request_id] = running

    def remove(self, running: RunningRequest) -> None:
        """Forgets the request. Does nothing if a later one has taken its id."""
        request_id = running.request.request_id
        if self._running.get(request_id) is running:
            del self._running[request_id]

    def waterfall(self, name: str, policy: str) -> Json | None:
        """Describes a request, named by its own id or that of its call, up to now; None if it does not run here.

        If several requests belong to the call, describes the one that has run longest.
        """
        found = self._running.get(name)
        if found is None:
            found = next((each for each in self._running.values() if each.request.call_id == name), None)
        if found is None:
            return None
        return running_waterfall(found.request, found.slot.admitted_s, _completions(found), time.monotonic(), policy)


def _completions(running: RunningRequest) -> Sequence[RunningCompletion]:
    if running.progress is None:
        return [RunningCompletion(index) for index in range(running.request.sampling.n)]
    return running.progress()
