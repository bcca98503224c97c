"""Keeps the completions that ended last, with their stages, for percentiles of the last minutes and for waterfalls.

It is bounded: the oldest are dropped. It keeps nothing of a prompt, an output or a tenant.
"""

from __future__ import annotations

from collections import deque

from router.tracing.stages import EndedCompletion
from router.tracing.waterfall import row

CAPACITY = 1000


class RecentRequests:
    """Owns the last `CAPACITY` completions. Used on the router's event loop."""

    def __init__(self) -> None:
        self._kept: deque[EndedCompletion] = deque(maxlen=CAPACITY)
        self.last_number = 0

    def keep(self, ended: EndedCompletion) -> None:
        """Keeps a completion, whose number is one more than `last_number`."""
        self.last_number = ended.number
        self._kept.append(ended)

    def after(self, number: int, limit: int) -> list[dict[str, object]]:
        """Returns at most `limit` of the newest completions after this number, oldest first."""
        newer = [each for each in self._kept if each.number > number]
        return [row(each) for each in newer[-limit:]]

    def find(self, request_id: str) -> list[EndedCompletion]:
        """Returns the kept completions of a request by their index; empty if none is kept.

        If a request was sent twice under one id, the last one is returned.
        """
        found = {each.index: each for each in self._kept if each.request_id == request_id}
        return [found[index] for index in sorted(found)]
