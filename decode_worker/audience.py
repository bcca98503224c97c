"""Who hears the tokens of which row: what most of a step's sequences have to say is dealt out without asking each one.

Owned by the decode worker, on the step loop. Every request has a number, which its sequence carries into its row
(`Sequence.listener`); under that number stand its stream and its router, as columns.

Shapes: `R` rows of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from decode_worker.request import DecodeRequest, Send, TokenRun


class Audience:
    """A request is in it from the moment that the worker takes it on until it ends or goes on elsewhere."""

    def __init__(self) -> None:
        self._requests: list[DecodeRequest | None] = []  # by number
        self._free: list[int] = []
        self._stream_ids = np.zeros(0, np.uint64)
        self._routers = np.zeros(0, np.int64)  # identity of `DecodeRequest.send`
        self._is_apart = np.zeros(0, np.bool_)

    def add(self, request: DecodeRequest) -> None:
        """Its first token is told apart."""
        if not self._free:
            self._grow()
        number = request.sequence.listener = self._free.pop()
        self._set(number, request, is_apart=True)

    def told(self, request: DecodeRequest) -> None:
        """It has told a token, or has taken the sequence over from another: who hears the next one, and whether that
        says more than a token does."""
        self._set(request.sequence.listener, request, not request.times.first_token_s or request.paused_since_s > 0)

    def remove(self, request: DecodeRequest) -> None:
        """Its number may be another's from now on, also while a step computes the sequence still."""
        number = request.sequence.listener
        self._requests[number] = None
        self._free.append(number)

    def _set(self, number: int, request: DecodeRequest, is_apart: bool) -> None:
        self._requests[number] = request
        self._stream_ids[number] = request.stream_id
        self._routers[number] = id(request.send)
        self._is_apart[number] = is_apart

    def _grow(self) -> None:
        count = max(16, len(self._requests))
        self._free = [number + len(self._requests) for number in range(count)]
        self._requests += [None] * count
        self._stream_ids = np.append(self._stream_ids, np.zeros(count, np.uint64))
        self._routers = np.append(self._routers, np.zeros(count, np.int64))
        self._is_apart = np.append(self._is_apart, np.zeros(count, np.bool_))

    # A step's tokens.

    def apart(self, listeners_R: np.ndarray) -> np.ndarray:
        """Whose token says more than which it is, as bools."""
        return self._is_apart[listeners_R]

    def runs(self, listeners_R: np.ndarray, token_ids_R: np.ndarray) -> Iterator[tuple[Send, TokenRun]]:
        """A token for each listener, those of one router together."""
        if not len(listeners_R):
            return
        stream_ids_R, routers_R = self._stream_ids[listeners_R], self._routers[listeners_R]
        if (routers_R == routers_R[0]).all():
            yield self._send(listeners_R[0]), TokenRun(stream_ids_R, token_ids_R)
            return
        order = np.argsort(routers_R, kind="stable")
        starts = (np.diff(routers_R[order]).nonzero()[0] + 1).tolist()
        for start, end in itertools.pairwise((0, *starts, len(order))):
            places = order[start:end]
            yield self._send(listeners_R[places[0]]), TokenRun(stream_ids_R[places], token_ids_R[places])

    def _send(self, number: int) -> Send:
        request = self._requests[number]
        assert request is not None
        return request.send
