"""Carries completions to one engine, each in its own HTTP call, as `DecodeLink` does for one of our own workers.

If there are prefill engines, one of them computes the prompt first. The engine of this link then fetches the KV by
`kv_transfer_params`, which the engines' KV connectors understand and this router passes on unread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from penstock.errors import PenstockError, Unavailable, to_status
from penstock.types import WorkerId
from penstock.v1 import common_pb2, worker_pb2
from router.fleet.engines.completion_request import completion_body, prefill_body, refused_hints
from router.fleet.engines.completion_stream import (
    BrokenStream,
    EngineUsage,
    cached_tokens,
    max_event_bytes,
    printable,
    read_event,
    transfer_params,
)
from router.fleet.engines.engine_http import LOST, EngineHttp
from router.fleet.token_link import Deliver

log = logging.getLogger(__name__)

_COMPLETIONS = "/v1/completions"
_LONG_LINE_BYTES = 1 << 18  # longer lines, such as the first event of a long prompt, are parsed in a thread
_USAGE_S = 2.0  # time that the usage may take after the last token
_PREFILL_SHARE = 0.5  # share of a request's remaining time that a prefill engine may take


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """The connection to an engine that computes prompts for other engines."""

    http: EngineHttp
    silent: asyncio.Event  # set while the engine does not answer


@dataclass(slots=True)
class _Call:
    """A completion at the engine."""

    submit: worker_pb2.DecodeSubmit
    deliver: Deliver
    sent_s: float
    heard_s: float  # when the engine last sent something; before that, when the completion was sent to it
    first_token_s: float = 0.0
    is_remote: bool = False  # whether a prefill engine computed the prompt
    timing: common_pb2.Timing = field(default_factory=common_pb2.Timing)
    task: asyncio.Task[None] | None = None


class EngineLink:
    """Carries requests to one engine. The engine's follower owns it."""

    def __init__(
        self,
        worker_id: WorkerId,
        http: EngineHttp,
        cache_salt: Callable[[bytes], str],
        find_prefill: Callable[[str], PrefillEnd | None],
        remote_from_tokens: int,
        on_lost: Callable[[], None],
    ) -> None:
        """`cache_salt` turns a request's salt into the `cache_salt` sent to the engine; `find_prefill` finds a prefill
        engine by its name. Prompts shorter than `remote_from_tokens` are not sent to a prefill engine. `on_lost` is
        called when a connection breaks, before its request is notified.
        """
        self._worker_id = worker_id
        self._http = http
        self._cache_salt = cache_salt
        self._find_prefill = find_prefill
        self._remote_from_tokens = remote_from_tokens
        self._on_lost = on_lost
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.model = ""  # the engine's name for the model
        self.is_open = False
        self.reports_cached_tokens = False  # whether an answer has said how much of a prompt was cached

    @property
    def num_streams(self) -> int:
        return len(self._calls)

    @property
    def queued_tokens(self) -> int:
        """Returns the prompt tokens of the requests that have no first token yet."""
        return sum(len(call.submit.token_ids) for call in self._calls.values() if not call.first_token_s)

    def submit(self, command: worker_pb2.DecodeCommand, deliver: Deliver) -> int:
        """Sends a `submit` and returns its stream id. Raises Unavailable if the link is closed."""
        if not self.is_open:
            raise Unavailable(f"engine {self._worker_id} is not connected")
        self._last_id += 1
        now_s = time.monotonic()
        call = self._calls[self._last_id] = _Call(command.submit, deliver, now_s, now_s)
        self._idle.clear()
        call.task = asyncio.create_task(self._run(self._last_id, call), name=f"completion at {self._worker_id}")
        return self._last_id

    def cancel(self, stream_id: int) -> None:
        """Ends a stream here and, by closing its connection, at the engine. A no-op if the stream has ended."""
        call = self._remove(stream_id)
        if call is not None and call.task is not None:
            call.task.cancel()

    def lose_silent(self, since_s: float) -> None:
        """Gives up the streams that have received nothing since `since_s`, as the engine no longer answers."""
        for stream_id, call in list(self._calls.items()):
            if call.heard_s <= since_s:
                self.cancel(stream_id)
                call.deliver(Unavailable(f"engine {self._worker_id} has stopped answering"))

    async def wait_idle(self) -> None:
        """Returns once the link has no streams. The requests' own deadlines bound the wait."""
        await self._idle.wait()

    async def close(self) -> None:
        """Ends every stream without notifying its request."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for stream_id in list(self._calls):
            self.cancel(stream_id)
        if tasks:
            await asyncio.wait(tasks)

    def _remove(self, stream_id: int) -> _Call | None:
        call = self._calls.pop(stream_id, None)
        if not self._calls:
            self._idle.set()
        return call

    async def _run(self, stream_id: int, call: _Call) -> None:
        last: worker_pb2.StepDelta | PenstockError
        try:
            last = await self._complete(call)
        except LOST as error:
            if not isinstance(error, BrokenStream):
                self._on_lost()  # else the request would be sent here again until the follower notices the loss
            last = Unavailable(f"engine {self._worker_id} was lost: {printable(str(error)) or 'timeout'}")
        except PenstockError as error:
            last = worker_pb2.StepDelta(error=to_status(error))
        except Exception as error:
            log.exception("a completion at engine %s failed", self._worker_id)
            last = Unavailable(
                f"this router cannot process the answer of engine {self._worker_id}: {printable(repr(error))}"
            )
        if self._remove(stream_id) is not None:
            call.deliver(last)

    async def _complete(self, call: _Call) -> worker_pb2.StepDelta:
        """Streams a completion and returns its last delta. Raises the engine's refusal or one of LOST."""
        body = completion_body(call.submit, self.model, self._cache_salt(call.submit.salt))
        await self._prefill_remotely(call, body)
        max_tokens, submit = call.submit.sampling.max_tokens, call.submit
        max_bytes = max_event_bytes(len(submit.token_ids), max_tokens, submit.sampling.logprobs)
        async with self._http.stream(_COMPLETIONS, body, max_bytes) as lines:
            last = await self._last_delta(call, lines)
            await self._read_usage(call, lines)
        last.timing.CopyFrom(call.timing)
        last.timing.hints.extend(refused_hints(submit.kv_hints, self._worker_id))
        return last

    async def _last_delta(self, call: _Call, lines: AsyncIterator[bytes]) -> worker_pb2.StepDelta:
        """Delivers tokens until the completion ends, and returns its last delta.

        It ends at `max_tokens` even if the engine does not say so.
        """
        submit = call.submit
        num_left = submit.num_prompt_tokens + submit.sampling.max_tokens - len(submit.token_ids)
        async for line in lines:
            found = await _read(call, line)
            if not isinstance(found, worker_pb2.StepDelta):
                continue
            num_left -= len(found.token_ids)
            if num_left < 0:
                raise BrokenStream("it sent more tokens than max_tokens allows")
            self._record_tokens(call, found)
            if not found.finish_reason and not num_left:
                found.finish_reason = common_pb2.FINISH_REASON_LENGTH
            if found.finish_reason:
                return found
            if found.token_ids:
                call.deliver(found)
        raise BrokenStream("its stream ended before the completion did")

    async def _read_usage(self, call: _Call, lines: AsyncIterator[bytes]) -> None:
        """Reads the usage and the end of the stream, so that the connection can be reused. The completion is complete
        even if they never arrive.
        """
        try:
            async with asyncio.timeout(_USAGE_S):
                async for line in lines:
                    found = await _read(call, line)
                    if isinstance(found, EngineUsage):
                        self._record_cached(call, found)
        except LOST as error:
            log.debug("engine %s did not end its answer properly: %s", self._worker_id, error)

    def _record_tokens(self, call: _Call, delta: worker_pb2.StepDelta) -> None:
        now_s, timing = time.monotonic(), call.timing
        if delta.token_ids and not call.first_token_s:
            call.first_token_s = now_s
            timing.prefill_ms = (now_s - call.sent_s) * 1e3
            timing.decode_first_token_ms = timing.prefill_ms
        timing.decode_worker = self._worker_id
        timing.decode_ms = (now_s - (call.first_token_s or now_s)) * 1e3

    def _record_cached(self, call: _Call, usage: EngineUsage) -> None:
        """Records how much of the prompt was cached.

        Leaves `prefill_worker` empty if the engine does not say: predicted cache hits are checked against the named
        worker's figure.
        """
        timing = call.timing
        if usage.cached_tokens is None:
            timing.prefill_worker = ""
            return
        self.reports_cached_tokens = True
        timing.decode_cached_tokens = min(usage.cached_tokens, len(call.submit.token_ids))
        # The decode engine of a pair counts the pages that it fetched as cached.
        timing.cached_tokens = timing.prefill_cached_tokens if call.is_remote else timing.decode_cached_tokens
        if not call.is_remote:
            timing.prefill_worker = self._worker_id

    # Prefill engines.

    async def _prefill_remotely(self, call: _Call, body: dict[str, object]) -> None:
        """Has a prefill engine compute the prompt, if one is available, and adds the location of its KV to `body`."""
        if len(call.submit.token_ids) < self._remote_from_tokens:
            return
        for candidate in call.submit.prefill_candidates:
            engine = self._find_prefill(candidate.worker_id)
            if engine is None:
                continue
            try:
                async with asyncio.timeout(_PREFILL_SHARE * call.submit.timeout_ms / 1e3):
                    answer = await _unless_silent(engine, prefill_body(body))
                params, cached = transfer_params(answer), cached_tokens(answer)
            except (*LOST, Unavailable) as error:
                reason = printable(str(error)) or "timeout"
                log.info("prefill engine %s did not compute a prompt: %s", candidate.worker_id, reason)
                call.deliver(_outcome(candidate, worker_pb2.PREFILL_FAULT_WORKER))
                continue
            call.deliver(_outcome(candidate, worker_pb2.PREFILL_FAULT_NONE))
            body["kv_transfer_params"] = params
            call.heard_s, call.is_remote = time.monotonic(), True
            if cached is not None:
                call.timing.prefill_worker = candidate.worker_id
                call.timing.prefill_cached_tokens = min(cached, len(call.submit.token_ids))
            return


async def _read(call: _Call, line: bytes) -> worker_pb2.StepDelta | EngineUsage | None:
    call.heard_s = time.monotonic()
    read = functools.partial(read_event, line, call.submit.sampling.HasField("logprobs"))
    return await asyncio.to_thread(read) if len(line) > _LONG_LINE_BYTES else read()


async def _unless_silent(engine: PrefillEnd, body: dict[str, object]) -> object:
    """Returns a prefill engine's answer. Raises BrokenStream once the engine counts as silent."""
    call = asyncio.ensure_future(engine.http.post(_COMPLETIONS, body))
    silence = asyncio.ensure_future(engine.silent.wait())
    try:
        await asyncio.wait([call, silence], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise BrokenStream("it has stopped answering")
        return call.result()
    finally:
        for task in (call, silence):
            task.cancel()


def _outcome(candidate: worker_pb2.PrefillCandidate, fault: worker_pb2.PrefillFault) -> worker_pb2.StepDelta:
    outcome = worker_pb2.PrefillOutcome(worker_id=candidate.worker_id, epoch=candidate.epoch, fault=fault)
    return worker_pb2.StepDelta(prefill=outcome)
