"""The requests that ended last, with the times of their stages: for percentiles of the last minutes and for waterfalls.

Bounded: the oldest are dropped. Nothing of a prompt, an output or a tenant is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from penstock.types import FinishReason
from penstock.v1 import common_pb2
from router.prepared_request import PreparedRequest

CAPACITY = 1000


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One completion that has ended. Times are in milliseconds, `ended_s` in seconds since 1970."""

    number: int  # rises by one with every completion
    request_id: str
    ended_s: float
    lane: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    first_token_ms: float
    decode_ms: float
    prefill_worker: str
    decode_worker: str
    pages_moved: int
    preemptions: int
    migrations: int
    redispatches: int


class RecentRequests:
    """Owns the last `CAPACITY` completions. Used on the router's event loop."""

    def __init__(self) -> None:
        self._kept: deque[RecentRequest] = deque(maxlen=CAPACITY)
        self.last_number = 0

    def add(
        self,
        request: PreparedRequest,
        reason: FinishReason,
        timing: common_pb2.Timing,
        num_tokens: int,
        ended_s: float,
    ) -> None:
        """Keeps a completion that has ended."""
        self.last_number += 1
        self._kept.append(
            RecentRequest(
                self.last_number,
                request.request_id,
                round(ended_s, 3),
                request.lane.value,
                reason.value,
                len(request.token_ids),
                timing.cached_tokens,
                num_tokens,
                round(timing.queue_ms, 3),
                round(timing.prefill_ms, 3),
                round(timing.transfer_ms, 3),
                round(timing.first_token_ms, 3),
                round(timing.decode_ms, 3),
                timing.prefill_worker,
                timing.decode_worker,
                timing.pages_moved,
                timing.num_preemptions,
                timing.num_migrations,
                timing.num_redispatches,
            )
        )

    def after(self, number: int, limit: int) -> list[dict[str, object]]:
        """Returns at most `limit` of the newest completions after this number, oldest first."""
        newer = [each for each in self._kept if each.number > number]
        return [asdict(each) for each in newer[-limit:]]
