"""Holds a picked request's admission slot and its ledger credits at workers until the gateway has its answer."""

from __future__ import annotations

import re
import time

from penstock.errors import Cancelled, InternalError, InvalidInput, Unavailable
from penstock.v1 import common_pb2
from router.admission.gate import AdmissionSlot
from router.admission.interface import NOTHING_USED, RequestUsage
from router.dispatch.context import DispatchContext
from router.dispatch.placement import Placement

_TAIL_BYTES = 4096  # bytes kept of an answer's end, which holds its usage
_EVENT = b"data: "  # begins an event of a stream, of which there is about one for each token
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})|"output_tokens"\s*:\s*(\d{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})|"cache_read_input_tokens"\s*:\s*(\d{1,9})')


class HeldPick:
    """A request at the engine that was picked for it. Reads only as much of the answer as counting needs."""

    def __init__(self, slot: AdmissionSlot, placement: Placement, endpoint: str, context: DispatchContext) -> None:
        self._slot = slot
        self._request = slot.request
        self._placement = placement
        self._endpoint = endpoint
        self._context = context
        self._tail = b""
        self._num_events = 0
        self._status = 0
        self._started = False
        self._left = False

    def on_answer(self, status: int, served: str) -> None:
        """Receives the status of the answer. `served` is the endpoint that answered; "" means the picked one."""
        self._status = status
        if served and served != self._endpoint:
            self._settle()  # another engine has the request, as its own load reports will show
            self._context.fleet.health.on_failure(self._placement.decode.epoch, time.monotonic())
            self._context.metrics.picked("fallback")
        elif status >= Unavailable.http_status:
            self._context.fleet.health.on_failure(self._placement.decode.epoch, time.monotonic())

    def on_part(self, part: bytes) -> None:
        """Receives a part of the answer's body."""
        if self._left or not part:
            return
        if not self._started and self._succeeds:
            self._started = True
            now_s = time.monotonic()
            self._settle()
            self._slot.start()
            self._context.fleet.health.on_progress(self._placement.decode.epoch, now_s)
            self._context.counts.first_token(self._request, now_s - self._request.accepted_s)
        self._num_events += part.count(_EVENT)
        self._tail = (self._tail + part)[-_TAIL_BYTES:]

    def end(self) -> None:
        """Counts a complete answer and releases everything."""
        if self._left:
            return
        if not (self._started and self._succeeds):
            fault = InvalidInput if self._status < InternalError.http_status else Unavailable
            self._context.metrics.failed(fault.reason)
            self._leave(NOTHING_USED)
            return
        tokens, cached = _last(_COMPLETION_TOKENS, self._tail), _last(_CACHED_TOKENS, self._tail)
        usage = common_pb2.Usage(
            prompt_tokens=len(self._request.token_ids),
            completion_tokens=self._num_events if tokens is None else tokens,
            cached_tokens=min(cached or 0, len(self._request.token_ids)),
        )
        self._context.metrics.requests.generation_tokens.inc(usage.completion_tokens)
        self._leave(self._context.counts.request(self._request, usage, None))

    def release(self) -> None:
        """Releases everything for an answer that broke off or that the gateway does not show to this router."""
        if not self._left:
            self._context.metrics.failed(Cancelled.reason)
            self._leave(RequestUsage(self._num_events, whole=False))

    @property
    def deadline_s(self) -> float:
        """Returns the monotonic time by which the request is released in any case."""
        return self._request.deadline_s

    @property
    def _succeeds(self) -> bool:
        return 200 <= self._status < 300

    def _settle(self) -> None:
        self._context.fleet.ledger.settle(self._placement.commitment.credits)

    def _leave(self, used: RequestUsage) -> None:
        self._left = True
        self._settle()
        self._slot.leave(used)


def _last(pattern: re.Pattern[bytes], tail: bytes) -> int | None:
    """Returns the number in the last match, since usage is at the end of an answer; None if there is no match."""
    found = [next(group for group in match if group) for match in pattern.findall(tail)]
    return int(found[-1]) if found else None
