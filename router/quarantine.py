"""Requests that kill workers. Pure.

A request that was on a worker when that died is re-dispatched. One that makes no progress between two such deaths is
taken for their cause: it would take the whole pool down, one worker after the other. It is refused, and so is the same
prompt for a while. A long stream that merely lives through two deaths has got tokens in between and is not suspected.
"""

from __future__ import annotations

from collections import OrderedDict

_MAX_REMEMBERED = 10_000


class Suspicion:
    """Of one completion under way."""

    __slots__ = ("_tokens_at_loss",)

    def __init__(self) -> None:
        self._tokens_at_loss: int | None = None

    def on_worker_lost(self, num_emitted: int) -> bool:
        """Its worker died with so many tokens out; True where that was its second victim."""
        again = self._tokens_at_loss == num_emitted
        self._tokens_at_loss = num_emitted
        return again


class Quarantine:
    """Digests of requests that have killed two workers, for `ttl_s` seconds each."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # in order of expiry

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, digest: bytes, now_s: float) -> None:
        self._until_s[digest] = now_s + self._ttl_s
        self._until_s.move_to_end(digest)
        if len(self._until_s) > _MAX_REMEMBERED:
            self._until_s.popitem(last=False)

    def holds(self, digest: bytes, now_s: float) -> bool:
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        return digest in self._until_s
