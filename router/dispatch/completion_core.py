"""The state machine of one completion, which decides whether it continues after the loss of its worker.

Pure: the token stream reports events and acts on the answers, and the simulator's router runs the same code in virtual
time. It owns the completion's entries in the in-flight ledger and knows whether a worker still has it; it knows neither
links nor messages.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Protocol

from penstock.errors import PenstockError, Unavailable, WorkerPaused
from penstock.types import Epoch
from router.routing.costs.inflight import InflightLedger, WorkKey

WAIT_TO_START_S = 5.0  # for a decode worker; a client that gets its error soon may go elsewhere
WAIT_TO_RESUME_S = 30.0  # with tokens out already: a dead worker's successor loads its weights first
RETRY_AFTER_S = 1.0
MAX_PAUSES = 1000  # of its workers, that one completion outlives


class Retries(Protocol):
    """The budget of re-dispatches that all requests of a router share."""

    def take(self, now_s: float) -> bool:
        """Counts one re-dispatch; returns False if the budget does not allow it."""


class CompletionCore:
    """The state of one completion. `over` means that no worker computes it any more."""

    def __init__(
        self,
        ledger: InflightLedger,
        retries: Retries,
        max_redispatches: int,
        *,
        num_generated: int = 0,
        over: bool = False,
    ) -> None:
        """`num_generated` counts tokens that an earlier call has delivered."""
        self.num_generated = num_generated  # delivered, read or not
        self.num_redispatches = 0
        self.over = over
        self.worker_epoch = Epoch(0)  # of the worker that it was sent to last
        self._ledger = ledger
        self._retries = retries
        self._max_redispatches = max_redispatches
        self._credits: list[WorkKey] = []  # until its first token
        self._is_at_worker = False
        self._refused_by: set[Epoch] = set()  # workers that would not take it
        self._paused: set[Epoch] = set()  # workers that pause, and come back under other epochs
        self._num_free = 0  # re-dispatches that are no retries

    def may_go_to(self, epoch: Epoch) -> bool:
        """Returns False for a worker that has refused the completion."""
        return epoch not in self._refused_by

    def all_pause(self, epochs: Collection[Epoch]) -> bool:
        """Returns whether all of these workers pause, so that waiting helps."""
        return self._paused.issuperset(epochs)

    def patience_s(self) -> float:
        """Returns how long the completion waits for a worker that takes requests."""
        return WAIT_TO_RESUME_S if self.num_generated or self._paused else WAIT_TO_START_S

    def on_placed(self, credits: Collection[WorkKey]) -> None:
        """Keeps the ledger entries of the completion's placement."""
        self._credits = list(credits)

    def on_sent(self, epoch: Epoch) -> None:
        """Records the worker that the completion was sent to, or that its sequence has migrated to."""
        self.worker_epoch = epoch
        self._is_at_worker = True

    def on_tokens(self, num_tokens: int) -> bool:
        """Counts tokens as they arrive. Returns whether they are the first since the completion was placed."""
        self.num_generated += num_tokens
        if not num_tokens or not self._credits:
            return False
        self._settle()
        return True

    def on_left(self) -> None:
        """Records that the worker no longer holds the completion: it has ended, refused or migrated it, or was lost."""
        self._is_at_worker = False

    def on_end(self) -> None:
        """Records the completion's regular end."""
        self.on_left()
        self._settle()
        self.over = True

    def on_failure(self, error: PenstockError, now_s: float, rng: random.Random, *, refused: bool) -> None:
        """Prepares the completion to be placed again after its worker was lost or refused it.

        Raises `error` if it would recur anywhere, and Unavailable if the completion was re-dispatched often enough.
        """
        self.on_left()
        self._settle()
        if not isinstance(error, Unavailable):
            raise error
        if isinstance(error, WorkerPaused) and self._num_free < MAX_PAUSES:
            self._paused.add(self.worker_epoch)
            self._refused_by.add(self.worker_epoch)
            self._num_free += 1
            self.num_redispatches += 1
            return
        if self.num_redispatches - self._num_free >= self._max_redispatches:
            raise Unavailable(
                f"gave up after {self.num_redispatches} re-dispatches; the last error was: {error.message}",
                RETRY_AFTER_S,
            )
        if not self._retries.take(now_s):
            raise Unavailable(
                f"too many requests were re-dispatched lately, so this one is not: {error.message}",
                RETRY_AFTER_S * rng.uniform(1.0, 2.0),
            )
        if refused:
            self._refused_by.add(self.worker_epoch)
        self.num_redispatches += 1

    def release(self) -> bool:
        """Ends the completion, for whatever reason. Returns whether it must be cancelled at a worker."""
        is_at_worker, self._is_at_worker = self._is_at_worker, False
        self._settle()
        self.over = True
        return is_at_worker

    def _settle(self) -> None:
        self._ledger.settle(self._credits)
        self._credits = []
