"""What a decode worker has to say to its routers: gathered while it works, sent as one batch to each. On the step loop.

Most of a step's sequences have a token to tell and nothing more: those of one router travel together, as one run. Every
end passes through here, hence the counts of ends.
"""

from __future__ import annotations

from dataclasses import replace

from decode_worker.request import DecodeRequest, Delta, RequestTiming, Send, TokenDelta, TokenRun
from engine.sequence import SampledToken
from penstock.errors import Cancelled, DeadlineExceeded, InvalidInput, Overloaded
from penstock.types import FinishReason, RequestTotals

_NO_FAULT_OF_OURS = (Cancelled, DeadlineExceeded, InvalidInput, Overloaded)


class Outbox:
    """Owns what is not sent yet, and the totals of requests that have ended."""

    def __init__(self) -> None:
        self.totals = RequestTotals()
        self._deltas: dict[Send, list[Delta]] = {}

    def put(self, request: DecodeRequest, delta: TokenDelta) -> None:
        if delta.error is not None and not isinstance(delta.error, _NO_FAULT_OF_OURS):
            self.totals = replace(self.totals, failed=self.totals.failed + 1)
        self._deltas.setdefault(request.send, []).append(delta)

    def put_end(self, request: DecodeRequest, token: SampledToken, reason: FinishReason, timing: RequestTiming) -> None:
        """The request's last token."""
        totals = self.totals
        self.totals = replace(
            totals,
            ended=totals.ended + 1,
            first_token_s=totals.first_token_s + timing.first_token_s,
            decode_s=totals.decode_s + timing.decode_s,
            decode_tokens=totals.decode_tokens + max(0, request.sequence.num_output_tokens - 1),
        )
        self.put(request, TokenDelta(request.stream_id, token, reason, timing=timing))

    def put_run(self, send: Send, run: TokenRun) -> None:
        """A token for each of many requests of one router."""
        self._deltas.setdefault(send, []).append(run)

    def flush(self) -> None:
        """One batch of deltas for each router."""
        outbox, self._deltas = self._deltas, {}
        for send, deltas in outbox.items():
            send(deltas)
