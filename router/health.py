"""What this router has seen go wrong at workers and on links, and whom it leaves alone for it. Pure.

Workers are known by their epochs: a new incarnation starts with a clean slate. Decode workers are judged by their
streams, prefill workers and the links from them to decode workers by what decode workers say of each attempt.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import NamedTuple

from penstock.types import Epoch
from penstock.v1 import worker_pb2
from router.breaker import BreakerRules, Breakers

log = logging.getLogger(__name__)


class LinkKey(NamedTuple):
    prefill: Epoch
    decode: Epoch


class FleetHealth:
    """Owned by the fleet."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._workers: Breakers[Epoch] = Breakers(rules)
        self._links: Breakers[LinkKey] = Breakers(rules)
        self._link_ends: dict[Epoch, set[LinkKey]] = {}  # that have failed, by either end

    @property
    def is_spotless(self) -> bool:
        """No worker has failed yet: all are usable."""
        return self._workers.is_empty

    def usable(self, epochs: Sequence[Epoch], now_s: float, rng: random.Random) -> list[Epoch]:
        """Workers of one role that a request may go to; some, unless there are none."""
        return self._workers.usable(epochs, now_s, rng)

    def link_is_open(self, prefill: Epoch, decode: Epoch, now_s: float) -> bool:
        """Whether the circuit is: pages do not get through."""
        return self._links.is_open(LinkKey(prefill, decode), now_s)

    def num_open(self, now_s: float) -> int:
        """Workers and links that are left alone."""
        return self._workers.num_open(now_s) + self._links.num_open(now_s)

    def on_sent(self, decode: Epoch, prefill: Epoch | None, now_s: float) -> None:
        """A request goes to this pair, or to the decode worker alone."""
        self._workers.on_sent(decode, now_s)
        if prefill is not None:
            self._workers.on_sent(prefill, now_s)
            self._links.on_sent(LinkKey(prefill, decode), now_s)

    def on_progress(self, decode: Epoch, now_s: float) -> None:
        """A request got its first token there."""
        self._workers.on_success(decode, now_s)

    def on_failure(self, decode: Epoch, now_s: float) -> None:
        """It was lost with a request, or refused one that it should have taken."""
        if self._workers.on_failure(decode, now_s):
            log.warning("decode worker of epoch %d fails; it is left alone for a while", decode)

    def on_prefill(self, outcome: worker_pb2.PrefillOutcome, decode: Epoch, now_s: float) -> None:
        prefill = Epoch(outcome.epoch)
        link = LinkKey(prefill, decode)
        match outcome.fault:
            case worker_pb2.PREFILL_FAULT_WORKER:
                if self._workers.on_failure(prefill, now_s):
                    log.warning("prefill worker %s fails; it is left alone for a while", outcome.worker_id)
            case worker_pb2.PREFILL_FAULT_LINK:
                self._link_ends.setdefault(prefill, set()).add(link)
                self._link_ends.setdefault(decode, set()).add(link)
                if self._links.on_failure(link, now_s):
                    log.warning("no pages get from %s to epoch %d; the pair is avoided", outcome.worker_id, decode)
            case _:
                self._workers.on_success(prefill, now_s)
                self._links.on_success(link, now_s)

    def forget(self, epoch: Epoch) -> None:
        """The incarnation has left."""
        self._workers.forget(epoch)
        for link in self._link_ends.pop(epoch, set()):
            self._links.forget(link)
            for end in link:
                if end in self._link_ends:
                    self._link_ends[end].discard(link)
