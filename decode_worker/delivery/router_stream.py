"""Encodes the deltas of one router's requests. The deltas of many sequences leave as one frame per step.

Runs on the server's event loop. A router that reads slowly gets several steps in one frame instead of a growing queue
of frames.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import numpy as np
from google.protobuf.message import Message

from decode_worker.request import DecodeRequest, Delta, TokenDelta
from penstock import wire
from penstock.errors import to_status
from penstock.v1 import worker_pb2

_FRAME_SCORES_BYTES = 8 << 20  # far below `penstock.wire.MAX_MESSAGE_BYTES`, because a frame has other deltas too


class RouterStream:
    """Owns the unsent deltas of one router and its open requests. Implements `DeltaStream`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: list[Delta] = []
        self._changed = asyncio.Event()
        self._closed = False
        self._open: dict[int, tuple[DecodeRequest, asyncio.TimerHandle]] = {}  # by stream id

    @property
    def open_requests(self) -> list[DecodeRequest]:
        return [request for request, _ in self._open.values()]

    def begin(self, request: DecodeRequest, deadline: asyncio.TimerHandle) -> None:
        self._open[request.stream_id] = (request, deadline)

    def end(self, stream_id: int) -> DecodeRequest | None:
        """Closes this id and stops its deadline. Returns the request that was open under it, if any."""
        request, deadline = self._open.pop(stream_id, (None, None))
        if deadline is not None:
            deadline.cancel()
        return request

    def send(self, deltas: list[Delta]) -> None:
        """Queues deltas. Called on the step loop; never blocks."""
        self._loop.call_soon_threadsafe(self._append, deltas)

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def _append(self, deltas: list[Delta]) -> None:
        self._pending += deltas
        self._changed.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yields encoded `StepFrame`s. Ends after `close` once everything pending is out."""
        number = 0
        while True:
            # Without a deadline: the stream lives as long as its router, and keepalive pings detect a dead one.
            await self._changed.wait()
            self._changed.clear()
            deltas, self._pending = self._pending, []
            for part in _split(deltas):
                number += 1
                yield self.encode(number, part)
            if self._closed and not self._pending:
                return

    def encode(self, number: int, deltas: list[Delta]) -> bytes:
        """Returns one encoded frame, joined from parts as protobuf allows. Closes the streams that end in it."""
        parts: list[bytes] = []
        frame = worker_pb2.StepFrame(step=number)
        for delta in deltas:
            if isinstance(delta, TokenDelta):
                frame.deltas.append(self._to_wire(delta))
            else:
                parts += (frame.SerializeToString(), encode_plain(delta.stream_ids, delta.token_ids))
                frame = worker_pb2.StepFrame()
        return b"".join((*parts, frame.SerializeToString()))

    def _to_wire(self, delta: TokenDelta) -> worker_pb2.StepDelta:
        message = worker_pb2.StepDelta(
            stream_id=delta.stream_id, finish_reason=wire.finish_reason_to_wire(delta.finish_reason)
        )
        if delta.token is not None:
            message.token_ids.append(delta.token.token_id)
            if delta.token.logprob is not None:
                message.logprobs.append(wire.logprob_to_wire(delta.token.logprob))
        for part in delta.prompt_logprobs:
            message.MergeFromString(part)
        if delta.error is not None:
            message.error.CopyFrom(to_status(delta.error))
        if delta.timing is not None:
            message.timing.CopyFrom(delta.timing)
        if delta.migrated is not None:
            message.migrated.CopyFrom(delta.migrated)
        if delta.prefill is not None:
            message.prefill.CopyFrom(delta.prefill)
        if delta.finish_reason is not None or delta.error is not None or delta.migrated is not None:
            self.end(delta.stream_id)
        return message


def _split(deltas: list[Delta]) -> Iterator[list[Delta]]:
    """Yields the deltas in order, in parts that hold at most `_FRAME_SCORES_BYTES` of prompt log-probabilities or a
    single larger delta.
    """
    part: list[Delta] = []
    num_bytes = 0
    for delta in deltas:
        size = sum(map(len, delta.prompt_logprobs)) if isinstance(delta, TokenDelta) else 0
        if part and size and num_bytes + size > _FRAME_SCORES_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(delta)
        num_bytes += size
    if part:
        yield part


def encode_plain(stream_ids: np.ndarray, token_ids: np.ndarray) -> bytes:
    """Returns protobuf `StepFrame.deltas` of one token each, several times faster than by making that many messages.

    Every number is padded with leading zeros, which varint readers accept, to the length of the largest, so that numpy
    can write all of them at once.
    """
    form = _plain_form(_varint_bytes(int(stream_ids.max())), _varint_bytes(int(token_ids.max())))
    numbers = np.empty((len(form.shifts), len(stream_ids)), form.shifts.dtype)  # one row for each byte
    numbers[form.streams], numbers[form.tokens] = stream_ids, token_ids
    numbers >>= form.shifts
    columns = numbers.astype(np.uint8)
    columns &= form.mask
    columns |= form.bits
    return columns.T.tobytes()


def _varint_bytes(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


class _PlainForm(NamedTuple):
    """Describes the bytes of one `StepDelta` in a frame: which number each byte comes from, and which bits are
    constant.
    """

    streams: slice
    tokens: slice
    shifts: np.ndarray  # [bytes, 1], as wide as the numbers need
    mask: np.ndarray  # uint8 [bytes, 1]
    bits: np.ndarray  # uint8 [bytes, 1]


@functools.lru_cache(maxsize=64)
def _plain_form(num_stream_bytes: int, num_token_bytes: int) -> _PlainForm:
    size = 3 + num_stream_bytes + num_token_bytes
    head = [_tag(worker_pb2.StepFrame, "deltas"), size, _tag(worker_pb2.StepDelta, "stream_id")]
    middle = [_tag(worker_pb2.StepDelta, "token_ids"), num_token_bytes]
    streams, tokens = slice(0, 3 + num_stream_bytes), slice(3 + num_stream_bytes, size + 2)
    dtype = np.uint32 if max(num_stream_bytes, num_token_bytes) <= 4 else np.uint64
    shifts, mask, bits = (np.zeros((size + 2, 1), kind) for kind in (dtype, np.uint8, np.uint8))
    for first, constant, num_bytes in ((0, head, num_stream_bytes), (streams.stop, middle, num_token_bytes)):
        start = first + len(constant)
        bits[first:start, 0] = constant
        bits[start : start + num_bytes - 1] = 0x80  # continuation bit
        mask[start : start + num_bytes] = 0x7F
        shifts[start : start + num_bytes, 0] = np.arange(num_bytes) * 7
    return _PlainForm(streams, tokens, shifts, mask, bits)


@functools.cache
def _tag(message: type[Message], field: str) -> int:
    """Returns field number and wire type as one byte. Lists of numbers are packed, and so are bytes like messages."""
    found = message.DESCRIPTOR.fields_by_name[field]
    has_length = found.is_repeated or found.message_type is not None
    return found.number << 3 | (2 if has_length else 0)
