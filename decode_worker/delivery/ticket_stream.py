"""Serves one used ticket at its decode worker: submits its completions, streams them to the client and informs the
router.

It does for a ticket what the router's dispatch does for the router's own streams, but never looks for another worker:
if this one cannot continue, the client continues with the router's help.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from decode_worker.delivery.router_stream import RouterStream
from decode_worker.request import DecodeRequest
from decode_worker.request_intake import RequestIntake
from penstock import wire
from penstock.errors import (
    Cancelled,
    InternalError,
    Overloaded,
    PenstockError,
    SequenceMoved,
    Unavailable,
    WorkerPaused,
    from_status,
    to_status,
)
from penstock.kv.weights_version import weights_version
from penstock.text.completion_text import CompletionText
from penstock.text.completions import (
    CompletionDelta,
    Emitted,
    Output,
    completion_id,
    completion_sampling,
    num_sent_first,
    streamed_timing,
)
from penstock.text.spelling import Spelling
from penstock.text.stop_strings import StopStrings
from penstock.types import FinishReason, WorkerId
from penstock.v1 import common_pb2, worker_pb2


@dataclass(slots=True)
class _Completion:
    state: worker_pb2.TicketCompletion  # the ticket's state of this completion
    text: CompletionText
    request: DecodeRequest | None = None  # set once it is submitted
    first_token_s: float = 0.0  # monotonic


class TicketStream:
    """Owns the ticket's requests and state. Iterate over `outputs` once; `stop` ends it early when the worker stops."""

    def __init__(
        self,
        ticket: worker_pb2.Ticket,
        timeout_s: float,
        salt: bytes,
        intake: RequestIntake,
        spelling: Spelling,
        worker_id: WorkerId,
        report: Callable[[worker_pb2.TicketState], None],
    ) -> None:
        """`report` is called with the ticket's state whenever it has changed."""
        self._ticket = ticket
        self._salt = salt
        self._intake = intake
        self._worker_id = worker_id
        self._report = report
        self._arrived_s = time.monotonic()
        self._deadline_s = self._arrived_s + timeout_s
        self._sampling = wire.sampling_from_wire(ticket.sampling)
        self._stream = RouterStream()
        self._state = worker_pb2.TicketState(id=ticket.id)
        self._usage = common_pb2.Usage(prompt_tokens=len(ticket.token_ids))
        stops = StopStrings(self._sampling.stop)
        self._completions = {state.index: self._resume(state, spelling, stops) for state in ticket.completions}
        self._waiting = [completion for completion in self._completions.values() if not completion.text.ended]

    def _resume(self, state: worker_pb2.TicketCompletion, spelling: Spelling, stops: StopStrings) -> _Completion:
        text = CompletionText(spelling, self._sampling, stops)
        if state.token_ids or state.finished:
            text.resume(Emitted(tuple(state.token_ids), state.finished))
        return _Completion(state, text)

    def stop(self) -> None:
        self._stream.close()

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Yields outputs until every completion has ended. Closing the generator releases everything that the ticket
        holds, before the next step.

        Raises DeadlineExceeded, Unavailable if the client can continue elsewhere, or the worker's refusal.
        """
        self._report(self._state)
        error: PenstockError | None = Cancelled("the client has gone")
        try:
            async for output in self._outputs():
                yield output
            error = None
        except PenstockError as raised:
            error = raised
            raise
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except Exception as failure:
            error = InternalError(f"internal error: {type(failure).__name__}")
            raise
        finally:
            self._intake.close(self._stream)
            self._end(error)

    async def _outputs(self) -> AsyncGenerator[Output, None]:
        self._submit(num_sent_first(len(self._ticket.token_ids), len(self._waiting)))
        async for encoded in self._stream.frames():
            deltas, failure = self._merge(worker_pb2.StepFrame.FromString(encoded))
            if deltas and self._waiting:
                self._submit(len(self._waiting))
            for delta in deltas:
                output = self._output(delta)
                if output.text or output.token_ids or output.finish_reason is not None:
                    yield output
            if failure is not None:
                raise failure
            if self._all_ended:
                return
        raise Unavailable(f"decode worker {self._worker_id} is stopping; continue with Inference.Route")

    @property
    def _all_ended(self) -> bool:
        return all(completion.text.ended for completion in self._completions.values())

    def _submit(self, count: int) -> None:
        submitted, self._waiting = self._waiting[:count], self._waiting[count:]
        for completion in submitted:
            completion.request = self._intake.submit(self._submission(completion.state), self._stream)

    def _submission(self, state: worker_pb2.TicketCompletion) -> worker_pb2.DecodeSubmit:
        ticket = self._ticket
        return worker_pb2.DecodeSubmit(
            stream_id=state.index,
            request_id=completion_id(ticket.request_id, state.index, self._sampling.n),
            token_ids=[*ticket.token_ids, *state.token_ids],
            num_prompt_tokens=len(ticket.token_ids),
            sampling=wire.sampling_to_wire(completion_sampling(self._sampling, state.index)),
            salt=self._salt,
            timeout_ms=max(1, int((self._deadline_s - time.monotonic()) * 1e3)),
            prefill_candidates=state.prefill_candidates,
            prefix_source=state.prefix_source if state.HasField("prefix_source") else None,
            lane=ticket.lane,
            adapter=ticket.adapter if ticket.HasField("adapter") else None,
            tenant=ticket.tenant,
            kv_hints=ticket.kv_hints if ticket.HasField("kv_hints") and not state.index else None,
        )

    def _merge(self, frame: worker_pb2.StepFrame) -> tuple[list[CompletionDelta], PenstockError | None]:
        """Returns one delta for each completion, and the error that ends the whole stream after them, if any."""
        merged: dict[int, CompletionDelta] = {}
        failure: PenstockError | None = None
        for message in frame.deltas:
            completion = self._completions[message.stream_id]
            if completion.text.ended:
                continue  # it ended at a stop string, and is being cancelled
            if message.HasField("prefill"):
                self._state.prefill.append(message.prefill)
                self._report(self._state)
            if message.HasField("migrated"):
                failure = SequenceMoved(
                    f"the sequence runs at {message.migrated.worker_id}; continue with Inference.Route"
                )
            elif message.HasField("error"):
                failure = _for_client(from_status(message.error))
            if message.token_ids or message.finish_reason:
                delta = self._read(completion, message)
                if delta.index in merged:
                    merged[delta.index].extend(delta)
                else:
                    merged[delta.index] = delta
        return list(merged.values()), failure

    def _read(self, completion: _Completion, message: worker_pb2.StepDelta) -> CompletionDelta:
        now_s = time.monotonic()
        if message.token_ids and not completion.first_token_s:
            completion.first_token_s = now_s
            if not self._state.started:
                self._state.started = True
                self._report(self._state)
        reason = wire.finish_reason_from_wire(message.finish_reason)
        timing = self._timing(completion, message.timing) if reason is not None else None
        return CompletionDelta(
            completion.state.index,
            list(message.token_ids),
            message.logprobs,
            reason,
            timing,
            message.prompt_logprobs,
            weights_version(self._ticket.model_revision),
        )

    def _output(self, delta: CompletionDelta) -> Output:
        completion = self._completions[delta.index]
        output = completion.text.feed(delta)
        if completion.text.stopped:
            self._stream.end(delta.index)
            assert completion.request is not None  # it has answered, so it was submitted
            self._intake.cancel(completion.request)
            output.timing = delta.timing or self._timing(completion, common_pb2.Timing())
            output.finish_reason = FinishReason.STOP
        if output.finish_reason is not None:
            self._on_ended(completion, output)
        return output

    def _timing(self, completion: _Completion, timing: common_pb2.Timing) -> common_pb2.Timing:
        """Returns the timing since the request's arrival at the router, excluding the way from there to here."""
        waited_s = self._ticket.waited_ms / 1e3
        return streamed_timing(
            timing,
            waited_s=waited_s,
            accepted_s=self._arrived_s - waited_s,
            first_token_s=completion.first_token_s,
            now_s=time.monotonic(),
            decode_worker=self._worker_id,
            num_prompt_tokens=len(self._ticket.token_ids),
        )

    def _on_ended(self, completion: _Completion, output: Output) -> None:
        """Records the end in the ticket's state; the last completion to end gets the usage."""
        assert output.timing is not None
        if self._ticket.HasField("granted_max_tokens"):
            output.granted_tokens = self._ticket.granted_max_tokens
        index = completion.state.index
        self._state.ended.add(
            index=index,
            finish_reason=wire.finish_reason_to_wire(output.finish_reason),
            num_tokens=completion.text.num_tokens,
            timing=output.timing,
        )
        if index == 0:
            self._usage.cached_tokens = output.timing.cached_tokens
        if self._all_ended:
            self._usage.completion_tokens = self._num_tokens
            output.usage = self._usage
        else:
            self._report(self._state)

    @property
    def _num_tokens(self) -> int:
        return sum(completion.text.num_tokens for completion in self._completions.values())

    def _end(self, error: PenstockError | None) -> None:
        self._state.over = True
        self._state.num_tokens = self._num_tokens
        if error is not None and not self._all_ended:
            self._state.error.CopyFrom(to_status(error))
        self._report(self._state)


def _for_client(error: PenstockError) -> PenstockError:
    """Turns the refusal of a full worker into Unavailable, since the router may know a worker with room."""
    if isinstance(error, WorkerPaused):
        return SequenceMoved(f"{error.message}; continue with Inference.Route")
    if isinstance(error, Overloaded):
        return Unavailable(f"{error.message}; continue with Inference.Route", error.retry_after_s)
    return error
