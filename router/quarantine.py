"""Requests that kill workers: suspected after two deaths, tried once more alone, refused if that kills too.

Every request that was on a worker when that died is re-dispatched. One that gets no token between two such deaths is
suspected, and so are the innocent that waited beside it. Suspects go on one at a time: the *ward* holds one request of
this router until its first token clears it. One whose worker dies then is the cause, beyond doubt. It is refused, and
so is the same prompt for a while, before it ends the whole pool. A long stream that lives through two deaths has got
tokens in between and is never suspected.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_REMEMBER_S = 600.0
_MAX_REMEMBERED = 10_000


class Suspicion:
    """Of one completion under way. Pure."""

    __slots__ = ("_tokens_at_loss",)

    def __init__(self) -> None:
        self._tokens_at_loss: int | None = None

    def on_worker_lost(self, num_emitted: int) -> bool:
        """Its worker is lost with so many tokens out; True where none came since it lost the one before."""
        again = self._tokens_at_loss == num_emitted
        self._tokens_at_loss = num_emitted
        return again


class Quarantine:
    """One for all requests of a router: the ward, and the prompts that are refused, for `ttl_s` seconds each."""

    def __init__(self, ttl_s: float = _REMEMBER_S) -> None:
        self._ttl_s = ttl_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # by digest, in order of expiry
        self.ward = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, token_ids: Sequence[int], now_s: float) -> None:
        digest = _digest(token_ids)
        self._until_s[digest] = now_s + self._ttl_s
        self._until_s.move_to_end(digest)
        if len(self._until_s) > _MAX_REMEMBERED:
            self._until_s.popitem(last=False)

    def holds(self, token_ids: Sequence[int], now_s: float) -> bool:
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        return bool(self._until_s) and _digest(token_ids) in self._until_s


def _digest(token_ids: Sequence[int]) -> bytes:
    return blake2b(array("I", token_ids).tobytes(), digest_size=16).digest()
