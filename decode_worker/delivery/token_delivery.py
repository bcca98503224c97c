"""Gathers a decode worker's deltas and sends them as one batch per stream. Runs on the step loop.

Most sequences of a step yield a plain token. The plain tokens of one stream are sent together, without touching each
request: every request has a slot, and columns hold its `stream_id` and stream under that slot.

Shapes: `R` rows of a step.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from decode_worker.request import DecodeRequest, Delta, DeltaStream, PlainTokens, TokenDelta
from engine.step.compute import StepTokens
from engine.step.plan import DecodeRows
from engine.step.sequence import SampledToken, ScheduledSequence
from engine.step.sequence import Sequence as Generation
from penstock.errors import Cancelled, DeadlineExceeded, InvalidInput, Overloaded
from penstock.types import FinishReason, RequestTotals
from penstock.v1 import common_pb2

_SEQUENCE_OF = operator.attrgetter("sequence")
_NOT_OUR_FAULT = (Cancelled, DeadlineExceeded, InvalidInput, Overloaded)


class TokenDelivery:
    """Owns the unsent deltas, the readers of sequences, and the totals of ended requests.

    A request has a slot from its acceptance by the worker until it ends here.
    """

    def __init__(self) -> None:
        self.totals = RequestTotals()
        self._unsent: dict[DeltaStream, list[Delta]] = {}
        self._slots: dict[Generation, int] = {}
        self._requests: list[DecodeRequest | None] = []  # by slot, as are the columns
        self._free_slots: list[int] = []
        self._stream_ids = np.zeros(0, np.uint64)
        self._stream_numbers = np.zeros(0, np.int64)
        self._is_apart = np.zeros(0, np.bool_)
        self._numbers: WeakKeyDictionary[DeltaStream, int] = WeakKeyDictionary()
        self._next_number = itertools.count()
        self._items: Sequence[ScheduledSequence] = ()  # the rows that `_slots_R` belongs to
        self._slots_R = np.zeros(0, np.int64)

    # Slots.

    def add(self, request: DecodeRequest) -> None:
        """Gives the request a slot; its first token is sent as its own delta."""
        if not self._free_slots:
            self._grow()
        slot = self._slots[request.sequence] = self._free_slots.pop()
        self._set(slot, request, is_apart=True)

    def refresh(self, request: DecodeRequest) -> None:
        """Records that the request has sent a token, or has inherited the sequence of another request."""
        is_apart = not request.times.first_token_s or request.paused_since_s is not None
        self._set(self._slots[request.sequence], request, is_apart)

    def remove(self, request: DecodeRequest) -> None:
        """Frees the slot, even while a step still computes the sequence."""
        slot = self._slots.pop(request.sequence)
        self._requests[slot] = None
        self._free_slots.append(slot)

    def _set(self, slot: int, request: DecodeRequest, is_apart: bool) -> None:
        number = self._numbers.get(request.stream)
        if number is None:
            number = self._numbers[request.stream] = next(self._next_number)
        self._requests[slot] = request
        self._stream_ids[slot] = request.stream_id
        self._stream_numbers[slot] = number
        self._is_apart[slot] = is_apart

    def _grow(self) -> None:
        count = max(16, len(self._requests))
        self._free_slots = [slot + len(self._requests) for slot in range(count)]
        self._requests += [None] * count
        self._stream_ids = np.append(self._stream_ids, np.zeros(count, np.uint64))
        self._stream_numbers = np.append(self._stream_numbers, np.zeros(count, np.int64))
        self._is_apart = np.append(self._is_apart, np.zeros(count, np.bool_))

    # Deltas.

    def put(self, request: DecodeRequest, delta: TokenDelta) -> None:
        if delta.error is not None and not isinstance(delta.error, _NOT_OUR_FAULT):
            self.totals = replace(self.totals, failed=self.totals.failed + 1)
        self._unsent.setdefault(request.stream, []).append(delta)

    def put_end(
        self, request: DecodeRequest, token: SampledToken | None, reason: FinishReason, timing: common_pb2.Timing
    ) -> None:
        """Adds the request's last token, if there is one, and counts the request as ended."""
        totals = self.totals
        self.totals = replace(
            totals,
            ended=totals.ended + 1,
            first_token_s=totals.first_token_s + timing.first_token_ms / 1e3,
            decode_s=totals.decode_s + timing.decode_ms / 1e3,
            decode_tokens=totals.decode_tokens + max(0, request.sequence.num_output_tokens - 1),
        )
        scores = request.take_prompt_logprobs()
        self.put(request, TokenDelta(request.stream_id, token, reason, timing=timing, prompt_logprobs=scores))

    def put_rows(
        self, items: Sequence[ScheduledSequence], token_ids_R: np.ndarray, is_special_R: np.ndarray
    ) -> list[int]:
        """Adds the plain tokens of a step's rows, grouped by stream.

        `items` has one entry per row, and is the same list until a row joins or leaves. Returns the rows left to the
        caller: those marked in `is_special_R` (bools), and those whose token carries more than its id.
        """
        if items is not self._items:
            found = list(map(self._slots.get, map(_SEQUENCE_OF, items)))
            # None means that the sequence was removed during its step, and that the row is special.
            slots = [slot or 0 for slot in found] if None in found else found
            self._slots_R = np.array(slots, np.int64)
            self._items = items
        slots_R = self._slots_R
        apart_R = self._is_apart[slots_R] | is_special_R
        rows = apart_R.nonzero()[0].tolist()
        if rows:
            slots_R, token_ids_R = slots_R[~apart_R], token_ids_R[~apart_R]
        for stream, tokens in self._by_stream(slots_R, token_ids_R):
            self._unsent.setdefault(stream, []).append(tokens)
        return rows

    def _by_stream(self, slots_R: np.ndarray, token_ids_R: np.ndarray) -> Iterator[tuple[DeltaStream, PlainTokens]]:
        if not len(slots_R):
            return
        stream_ids_R, numbers_R = self._stream_ids[slots_R], self._stream_numbers[slots_R]
        if (numbers_R == numbers_R[0]).all():
            yield self._stream(slots_R[0]), PlainTokens(stream_ids_R, token_ids_R)
            return
        order = np.argsort(numbers_R, kind="stable")
        starts = (np.diff(numbers_R[order]).nonzero()[0] + 1).tolist()
        for start, end in itertools.pairwise((0, *starts, len(order))):
            rows = order[start:end]
            yield self._stream(slots_R[rows[0]]), PlainTokens(stream_ids_R[rows], token_ids_R[rows])

    def _stream(self, slot: int) -> DeltaStream:
        request = self._requests[slot]
        assert request is not None
        return request.stream

    def flush(self) -> None:
        """Sends each stream its deltas as one batch."""
        unsent, self._unsent = self._unsent, {}
        for stream, deltas in unsent.items():
            stream.send(deltas)


def special_rows(
    rows: DecodeRows, tokens: StepTokens, discarded: Collection[Generation], eos_token_ids: Collection[int]
) -> np.ndarray:
    """Returns a mask of the rows whose tokens may end a sequence, carry log-probabilities or are discarded."""
    is_special_R = rows.may_end(tokens.rows, eos_token_ids)
    if tokens.logprobs:
        is_special_R[[place for place in tokens.logprobs if place < len(rows)]] = True
    if discarded:
        is_special_R |= np.array([item.sequence in discarded for item in rows.items], np.bool_)
    return is_special_R
