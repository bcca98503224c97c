"""The state machine of one completion, which decides whether it continues after the loss of its worker.

Pure: the token stream reports events and acts on the answers, and the simulator's router runs the same code in virtual
time. It owns the completion's entries in the in-flight ledger and tracks whether a worker still holds it; it must not
know links or messages.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Protocol

from penstock.errors import PenstockError, Unavailable, WorkerPaused
from penstock.types import Epoch
from router.routing.costs.inflight import InflightLedger, WorkKey

WAIT_TO_START_S = 5.0  # for a decode worker; short, so that a client can soon try another router
WAIT_TO_RESUME_S = 30.0  # the same after the first token, so that a dead worker's successor can load its weights
RETRY_AFTER_S = 1.0
MAX_PAUSES = 1000  # pauses of workers that one completion survives


def no_worker_error() -> Unavailable:
    """Returns the error of a request for which no decode worker became available in time."""
    return Unavailable("no decode worker takes requests now; try again", RETRY_AFTER_S)


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
        """`num_generated` counts the tokens that an earlier call has emitted."""
        self.num_generated = num_generated  # tokens that have arrived, even if the client has not read them
        self.num_redispatches = 0
        self.over = over
        self.worker_epoch = Epoch(0)  # of the worker that it was sent to last
        self._ledger = ledger
        self._retries = retries
        self._max_redispatches = max_redispatches
        self._credits: list[WorkKey] = []  # ledger entries, settled at the first token
        self._is_at_worker = False
        self._refused_by: set[Epoch] = set()  # workers that have refused it
        self._paused: set[Epoch] = set()  # workers that pause; they return under new epochs
        self._num_free = 0  # re-dispatches after pauses, which count against no budget

    def may_go_to(self, epoch: Epoch) -> bool:
        """Returns False for a worker that has refused the completion."""
        return epoch not in self._refused_by

    def all_pause(self, epochs: Collection[Epoch]) -> bool:
        """Returns whether all of these workers pause, so that waiting for them helps."""
        return self._paused.issuperset(epochs)

    def patience_s(self) -> float:
        """Returns how long the completion waits for a worker that takes requests."""
        return WAIT_TO_RESUME_S if self.num_generated or self._paused else WAIT_TO_START_S

    def on_placed(self, credits: Collection[WorkKey]) -> None:
        """Takes over the ledger entries of the completion's placement."""
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
        """Records that the worker no longer holds the completion: it ended, refused or migrated it, or was lost."""
        self._is_at_worker = False

    def on_end(self) -> None:
        """Records that the completion has ended with a finish reason."""
        self.on_left()
        self._settle()
        self.over = True

    def on_failure(self, error: PenstockError, now_s: float, rng: random.Random, *, refused: bool) -> None:
        """Readies the completion for another placement after its worker was lost or refused it.

        Raises `error` if it would recur at any worker, and Unavailable if no more re-dispatches are allowed.
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
