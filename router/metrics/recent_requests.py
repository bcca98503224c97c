"""Keeps the completions that ended last, with their stages, for percentiles of the last minutes and for waterfalls.

It is bounded: the oldest are dropped. It keeps nothing of a prompt, an output or a tenant.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from penstock.types import FinishReason
from penstock.v1 import common_pb2
from router.prepared_request import PreparedRequest
from router.routing.policy.interface import PairChoice
from router.tracing.stages import EndedCompletion, WorkerLeg
from router.tracing.waterfall import row

CAPACITY = 1000


class RecentRequests:
    """Owns the last `CAPACITY` completions. Used on the router's event loop."""

    def __init__(self) -> None:
        self._kept: deque[EndedCompletion] = deque(maxlen=CAPACITY)
        self.last_number = 0

    def add(
        self,
        request: PreparedRequest,
        index: int,
        reason: FinishReason,
        timing: common_pb2.Timing,
        num_tokens: int,
        admitted_s: float,
        legs: Sequence[WorkerLeg],
        choices: Sequence[PairChoice],
    ) -> EndedCompletion:
        """Keeps and returns a completion that has ended."""
        self.last_number += 1
        trace = request.trace
        ended = EndedCompletion(
            self.last_number,
            request.request_id,
            index,
            request.lane,
            reason,
            len(request.token_ids),
            num_tokens,
            timing,
            request.accepted_s,
            request.prepared_s,
            admitted_s,
            time.time() - (time.monotonic() - request.accepted_s),
            legs,
            choices,
            trace.trace_id if trace is not None else "",
        )
        self._kept.append(ended)
        return ended

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
