"""Keeps the latest ended completions with their stages, for percentiles over the last minutes and for waterfalls.

The list is bounded: the oldest completions are dropped. It holds no prompt, output or tenant.
"""

from __future__ import annotations

from collections import deque

from router.tracing.stages import EndedCompletion
from router.tracing.waterfall import row

CAPACITY = 1000


class RecentRequests:
    """Owns the last `CAPACITY` completions. Use it on the router's event loop only."""

    def __init__(self) -> None:
        self._kept: deque[EndedCompletion] = deque(maxlen=CAPACITY)
        self.last_number = 0

    def keep(self, ended: EndedCompletion) -> None:
        """Keeps a completion. Its number must be `last_number` + 1."""
        self.last_number = ended.number
        self._kept.append(ended)

    def after(self, number: int, limit: int) -> list[dict[str, object]]:
        """Returns the rows of completions with a higher number: at most the newest `limit`, oldest first."""
        newer = [each for each in self._kept if each.number > number]
        return [row(each) for each in newer[-limit:]]

    def find(self, request_id: str) -> list[EndedCompletion]:
        """Returns the kept completions of a request, in order of their index.

        If two requests used the same id, returns the later completion for each index.
        """
        found = {each.index: each for each in self._kept if each.request_id == request_id}
        return [found[index] for index in sorted(found)]
