"""Records the failures of workers and links that this router sees, and decides which of them to avoid. Pure.

Workers are identified by their epochs, so a restarted worker begins without recorded failures. Failures of decode
workers show in their streams; decode workers report the outcome of each prefill attempt, which shows failures of
prefill workers and of the links from them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import NamedTuple

from penstock.types import Epoch
from penstock.v1 import worker_pb2
from router.fleet.circuit_breaker import BreakerRules, CircuitBreakers

log = logging.getLogger(__name__)


class LinkKey(NamedTuple):
    prefill: Epoch
    decode: Epoch


class FleetHealth:
    """Holds the circuit breakers of all workers and links. The fleet owns it."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._workers: CircuitBreakers[Epoch] = CircuitBreakers(rules)
        self._links: CircuitBreakers[LinkKey] = CircuitBreakers(rules)
        self._link_ends: dict[Epoch, set[LinkKey]] = {}  # links that have failed, by each of their ends

    @property
    def is_without_failures(self) -> bool:
        """Returns whether no worker has failed, so that all are usable."""
        return self._workers.is_empty

    def usable(self, epochs: Sequence[Epoch], now_s: float, rng: random.Random) -> list[Epoch]:
        """Returns which workers of one role a request may go to. The result is empty only if `epochs` is."""
        return self._workers.usable(epochs, now_s, rng)

    def link_is_open(self, prefill: Epoch, decode: Epoch, now_s: float) -> bool:
        """Returns whether the link's circuit is open: recent transfers over it failed."""
        return self._links.is_open(LinkKey(prefill, decode), now_s)

    def is_avoided(self, worker: Epoch, now_s: float) -> bool:
        """Returns whether the worker's own circuit is open: requests go to other workers if there are any."""
        return self._workers.is_open(worker, now_s)

    def num_open(self, now_s: float) -> int:
        """Returns the number of workers and links whose circuit is open."""
        return self._workers.num_open(now_s) + self._links.num_open(now_s)

    def on_sent(self, decode: Epoch, prefill: Epoch | None, now_s: float) -> None:
        """Records a request sent to this pair, or to the decode worker alone if `prefill` is None."""
        self._workers.on_sent(decode, now_s)
        if prefill is not None:
            self._workers.on_sent(prefill, now_s)
            self._links.on_sent(LinkKey(prefill, decode), now_s)

    def on_progress(self, decode: Epoch, now_s: float) -> None:
        """Records that a request got its first token from the worker."""
        self._workers.on_success(decode, now_s)

    def on_failure(self, decode: Epoch, now_s: float) -> None:
        """Records that the worker was lost during a request, or refused a request that it should have taken."""
        if self._workers.on_failure(decode, now_s):
            log.warning("decode worker of epoch %d keeps failing; it gets no requests for a while", decode)

    def on_prefill(self, outcome: worker_pb2.PrefillOutcome, decode: Epoch, now_s: float) -> None:
        """Records the outcome of one prefill attempt, as the decode worker reports it."""
        prefill = Epoch(outcome.epoch)
        link = LinkKey(prefill, decode)
        match outcome.fault:
            case worker_pb2.PREFILL_FAULT_WORKER:
                if self._workers.on_failure(prefill, now_s):
                    log.warning("prefill worker %s keeps failing; it gets no requests for a while", outcome.worker_id)
            case worker_pb2.PREFILL_FAULT_LINK:
                self._link_ends.setdefault(prefill, set()).add(link)
                self._link_ends.setdefault(decode, set()).add(link)
                if self._links.on_failure(link, now_s):
                    log.warning(
                        "transfers from %s to epoch %d keep failing; the pair is avoided for a while",
                        outcome.worker_id,
                        decode,
                    )
            case _:
                self._workers.on_success(prefill, now_s)
                self._links.on_success(link, now_s)

    def forget(self, epoch: Epoch) -> None:
        """Drops everything about an incarnation of a worker that has left."""
        self._workers.forget(epoch)
        for link in self._link_ends.pop(epoch, set()):
            self._links.forget(link)
            for end in link:
                if end in self._link_ends:
                    self._link_ends[end].discard(link)
