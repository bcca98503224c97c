"""One used ticket at its decode worker: its completions, what its client gets of them, and how its router hears of it.

Does what the router's dispatch does for a stream of its own, but never looks for another worker: where this one cannot
go on, the client does, with the router's help.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from decode_worker.intake import Intake
from decode_worker.request import DecodeRequest
from decode_worker.stream import RouterStream
from penstock import legs, wire
from penstock.completion_text import CompletionText
from penstock.errors import (
    Cancelled,
    InternalError,
    Overloaded,
    PenstockError,
    SequenceMoved,
    Unavailable,
    from_status,
    to_status,
)
from penstock.outputs import Emitted, Output, TokenDelta
from penstock.spelling import Spelling
from penstock.types import FinishReason, WorkerId
from penstock.v1 import common_pb2, worker_pb2


@dataclass(slots=True)
class _Completion:
    told: worker_pb2.TicketCompletion
    text: CompletionText
    request: DecodeRequest | None = None  # once it was submitted
    first_token_s: float = 0.0  # monotonic


class TicketStream:
    """`outputs` once. `stop` ends it from outside, where the worker goes away."""

    def __init__(
        self,
        ticket: worker_pb2.Ticket,
        timeout_s: float,
        salt: bytes,
        intake: Intake,
        spelling: Spelling,
        worker_id: WorkerId,
        tell: Callable[[worker_pb2.TicketState], None],
    ) -> None:
        """`tell` hears of the ticket's state whenever that has changed."""
        self._ticket = ticket
        self._salt = salt
        self._intake = intake
        self._worker_id = worker_id
        self._tell = tell
        self._arrived_s = time.monotonic()
        self._deadline_s = self._arrived_s + timeout_s
        self._sampling = wire.sampling_from_wire(ticket.sampling)
        self._stream = RouterStream()
        self._state = worker_pb2.TicketState(id=ticket.id)
        self._usage = common_pb2.Usage(prompt_tokens=len(ticket.token_ids))
        self._completions = {one.index: self._resume(one, spelling) for one in ticket.completions}
        self._waiting = [one for one in self._completions.values() if not one.text.ended]

    def _resume(self, told: worker_pb2.TicketCompletion, spelling: Spelling) -> _Completion:
        text = CompletionText(spelling, self._sampling)
        if told.token_ids or told.finished:
            text.resume(told.index, Emitted(tuple(told.token_ids), told.finished))
        return _Completion(told, text)

    def stop(self) -> None:
        self._stream.close()

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Until every completion has ended. Closing it releases all that the ticket holds before the next step.

        Raises DeadlineExceeded, Unavailable where the client can go on elsewhere, or a refusal of the worker's.
        """
        self._tell(self._state)
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
        except Exception as fault:
            error = InternalError(f"internal error: {type(fault).__name__}")
            raise
        finally:
            self._intake.close(self._stream)
            self._end(error)

    async def _outputs(self) -> AsyncGenerator[Output, None]:
        self._submit(legs.num_ahead(len(self._ticket.token_ids), len(self._waiting)))
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
        raise Unavailable(f"decode worker {self._worker_id} is stopping; go on with Inference.Route")

    @property
    def _all_ended(self) -> bool:
        return all(one.text.ended for one in self._completions.values())

    def _submit(self, count: int) -> None:
        going, self._waiting = self._waiting[:count], self._waiting[count:]
        for one in going:
            one.request = self._intake.submit(self._submission(one.told), self._stream)

    def _submission(self, told: worker_pb2.TicketCompletion) -> worker_pb2.DecodeSubmit:
        ticket = self._ticket
        return worker_pb2.DecodeSubmit(
            stream_id=told.index,
            request_id=legs.id_of(ticket.request_id, told.index, self._sampling.n),
            token_ids=[*ticket.token_ids, *told.token_ids],
            num_prompt_tokens=len(ticket.token_ids),
            sampling=wire.sampling_to_wire(legs.sampling_of(self._sampling, told.index)),
            salt=self._salt,
            timeout_ms=max(1, int((self._deadline_s - time.monotonic()) * 1e3)),
            prefill_candidates=told.prefill_candidates,
            lane=ticket.lane,
        )

    def _merge(self, frame: worker_pb2.StepFrame) -> tuple[list[TokenDelta], PenstockError | None]:
        """One delta a completion, and what ends the whole stream after them."""
        merged: dict[int, TokenDelta] = {}
        failure: PenstockError | None = None
        for message in frame.deltas:
            one = self._completions[message.stream_id]
            if one.text.ended:
                continue  # at a stop string, and its worker has not heard of that yet
            if message.HasField("prefill"):
                self._state.prefill.append(message.prefill)
                self._tell(self._state)
            if message.HasField("moved"):
                failure = SequenceMoved(f"the sequence runs at {message.moved.worker_id}; go on with Inference.Route")
            elif message.HasField("error"):
                failure = _for_client(from_status(message.error))
            if message.token_ids or message.finish_reason:
                _add(merged, self._read(one, message))
        return list(merged.values()), failure

    def _read(self, one: _Completion, message: worker_pb2.StepDelta) -> TokenDelta:
        now_s = time.monotonic()
        if message.token_ids and not one.first_token_s:
            one.first_token_s = now_s
            if not self._state.started:
                self._state.started = True
                self._tell(self._state)
        reason = wire.finish_reason_from_wire(message.finish_reason)
        timing = self._timing(one, message.timing) if reason is not None else None
        return TokenDelta(one.told.index, list(message.token_ids), message.logprobs, reason, timing)

    def _output(self, delta: TokenDelta) -> Output:
        one = self._completions[delta.index]
        output = one.text.feed(delta)
        if one.text.stopped:
            self._stream.end(delta.index)
            assert one.request is not None  # it has answered
            self._intake.cancel(one.request)
            output.timing = delta.timing or self._timing(one, common_pb2.Timing())
            output.finish_reason = FinishReason.STOP
        if output.finish_reason is not None:
            self._on_ended(one, output)
        return output

    def _timing(self, one: _Completion, told: common_pb2.Timing) -> common_pb2.Timing:
        """Counted from the request's arrival at the router, without its way from there to here."""
        waited_s = self._ticket.waited_ms / 1e3
        return legs.whole_timing(
            told,
            waited_s=waited_s,
            accepted_s=self._arrived_s - waited_s,
            first_token_s=one.first_token_s,
            now_s=time.monotonic(),
            decode_worker=self._worker_id,
            num_prompt_tokens=len(self._ticket.token_ids),
        )

    def _on_ended(self, one: _Completion, output: Output) -> None:
        """The last of all completions gets the usage."""
        assert output.timing is not None
        index = one.told.index
        self._state.ended.add(
            index=index,
            finish_reason=wire.finish_reason_to_wire(output.finish_reason),
            num_tokens=one.text.num_tokens,
            timing=output.timing,
        )
        if index == 0:
            self._usage.cached_tokens = output.timing.cached_tokens
        if self._all_ended:
            self._usage.completion_tokens = self._num_tokens
            output.usage = self._usage
        else:
            self._tell(self._state)

    @property
    def _num_tokens(self) -> int:
        return sum(one.text.num_tokens for one in self._completions.values())

    def _end(self, error: PenstockError | None) -> None:
        self._state.over = True
        self._state.num_tokens = self._num_tokens
        if error is not None and not self._all_ended:
            self._state.error.CopyFrom(to_status(error))
        self._tell(self._state)


def _add(merged: dict[int, TokenDelta], delta: TokenDelta) -> None:
    earlier = merged.get(delta.index)
    if earlier is None:
        merged[delta.index] = delta
        return
    earlier.token_ids += delta.token_ids
    earlier.logprobs = [*earlier.logprobs, *delta.logprobs]
    earlier.finish_reason, earlier.timing = delta.finish_reason, delta.timing


def _for_client(error: PenstockError) -> PenstockError:
    """A worker that has no room is no overload: another one may have it, which the router knows."""
    if isinstance(error, Overloaded):
        return Unavailable(f"{error.message}; go on with Inference.Route", error.retry_after_s)
    return error
