"""Serves prepared requests: admits them, streams and counts their tokens as text, or issues tickets for them.

Both APIs call it with requests from `router.api.prepare`. The module must not know gRPC services or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from penstock.metrics.families import BoundHistogram
from penstock.text.completion_text import CompletionText
from penstock.text.completions import CompletionDelta, Output
from penstock.text.spelling import Spelling
from penstock.text.stop_strings import StopStrings
from penstock.v1 import common_pb2
from router.admission.gate import AdmissionSlot
from router.dispatch.context import DispatchContext
from router.dispatch.lookaside import Lookaside, Route
from router.dispatch.running_requests import RunningRequest
from router.dispatch.token_stream import TokenStream
from router.prepared_request import PreparedRequest
from router.tracing.stages import EndedCompletion


class Dispatcher:
    """Serves all requests. A request's state lives in its stream or behind its ticket, not here."""

    def __init__(self, context: DispatchContext, lookaside: Lookaside, spelling: Spelling) -> None:
        self._context = context
        self._lookaside = lookaside
        self._spelling = spelling

    async def outputs(self, request: PreparedRequest) -> AsyncGenerator[Output, None]:
        """Runs the request to its end. Closing the iterator cancels the request at its workers.

        Raises Overloaded, DeadlineExceeded, Unavailable, or the error of a worker that refuses the request.
        """
        context = self._context
        context.demand.arrive(len(request.token_ids))
        with context.counting_errors(request.trace):
            running = RunningRequest(request, context.gate.pass_through(request))
            context.running.add(running)
            try:
                async with running.slot as slot:
                    run = _OutputRun(context, slot, self._spelling)
                    with TokenStream(slot.request, context, slot.leave) as stream:
                        running.progress = stream.progress
                        if request.trace is not None:
                            request.trace.open_legs = stream.open_legs
                        await stream.start()
                        while batch := await stream.next_batch():
                            slot.start()
                            for delta in batch:
                                output = run.output(delta, stream)
                                if output.text or output.token_ids or output.finish_reason is not None:
                                    yield output
            finally:
                context.running.remove(running)

    async def route(self, request: PreparedRequest) -> Route:
        """Issues a ticket for a client that streams from the worker itself.

        Raises ConfigError if the request's tokens have to pass this router, or what `outputs` raises.
        """
        self._lookaside.check(request)  # its error is not counted as a failure, since the client calls Generate instead
        self._context.demand.arrive(len(request.token_ids))
        with self._context.counting_errors(request.trace):
            return await self._lookaside.route(request)


class _OutputRun:
    """Turns the tokens of one request's completions into text, and counts them."""

    def __init__(self, context: DispatchContext, slot: AdmissionSlot, spelling: Spelling) -> None:
        self._context = context
        self._slot = slot
        self._request = slot.request
        sampling = self._request.sampling
        stops = StopStrings(sampling.stop)
        self._texts = [CompletionText(spelling, sampling, stops) for _ in range(sampling.n)]
        for index, earlier in self._request.emitted.items():
            self._texts[index].resume(earlier)
        self._usage = common_pb2.Usage(prompt_tokens=len(self._request.token_ids))
        self._last_token_s = [0.0] * sampling.n
        self._ended: dict[int, EndedCompletion] = {}
        self._gap_s: BoundHistogram | None = None  # bound at the first gap between tokens
        self._generated = context.metrics.requests.generation_tokens

    def output(self, delta: CompletionDelta, stream: TokenStream) -> Output:
        """Turns a delta's tokens into text and counts them. A stop string ends the completion at its worker."""
        self._observe_tokens(delta)
        text = self._texts[delta.index]
        num_before = text.num_tokens
        output = text.feed(delta)
        self._generated.value += text.num_tokens - num_before
        if text.stopped:
            ended = stream.end(delta.index)
            output.timing = delta.timing or ended.timing
        output.granted_tokens = self._slot.granted_tokens
        if output.finish_reason is not None:
            self._observe_end(output, stream)
        if self._request.explain and output.usage is not None:
            output.decision = stream.decision(self._context.config.policy, self._ended)
        return output

    def _observe_tokens(self, delta: CompletionDelta) -> None:
        if not delta.token_ids:
            return
        num_tokens = len(delta.token_ids)
        self._slot.emit(num_tokens)
        now_s = time.monotonic()
        last_s = self._last_token_s[delta.index]
        self._last_token_s[delta.index] = now_s
        if not last_s:
            self._context.counts.first_token(self._request, now_s - self._request.accepted_s)
            return
        gap_s = self._gap_s
        if gap_s is None:
            request = self._request
            gap_s = self._context.metrics.requests.gaps(request.lane, len(request.token_ids), request.tenant)
            self._gap_s = gap_s
        if num_tokens == 1:
            gap_s.defer(now_s - last_s)
        else:
            gap_s.observe((now_s - last_s) / num_tokens, num_tokens)

    def _observe_end(self, output: Output, stream: TokenStream) -> None:
        """Counts an ended completion. The output of the last one to end carries the usage."""
        timing, usage = output.timing, self._usage
        assert output.finish_reason is not None
        assert timing is not None
        self._ended[output.index] = self._context.counts.completion(
            self._request,
            output.finish_reason,
            timing,
            self._texts[output.index].num_tokens,
            index=output.index,
            admitted_s=self._slot.admitted_s,
            legs=stream.legs(output.index),
            choices=stream.choices(output.index),
        )
        if output.index == 0:
            usage.cached_tokens = timing.cached_tokens
        if not all(text.ended for text in self._texts):
            return
        usage.completion_tokens = sum(text.num_tokens for text in self._texts)
        output.usage = usage
        self._context.counts.request(self._request, usage, timing)
