"""Gives sequences a slot with their adapter before they are scheduled. A separate thread reads the files.

A sequence keeps its slot until it is released, even if it loses its pages meanwhile. It waits while every slot is in
use or its adapter is being read. After `_MAX_WAIT_S` it is refused with the adapter's name, and may be served
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from engine.adapters.engine_adapters import EngineAdapters
from engine.step.sequence import Sequence
from penstock.errors import AdapterUnavailable, PenstockError
from penstock.kv.adapter_files import AdapterRef

_MAX_WAIT_S = 10.0
_RETRY_AFTER_S = 1.0

OnReady = Callable[[PenstockError | None], None]  # takes the error of an adapter that this worker cannot serve


@dataclass(slots=True)
class _Waiter:
    ref: AdapterRef
    deadline_s: float
    thens: list[OnReady] = field(default_factory=list)


class AdapterQueue:
    """Assigns adapter slots to sequences. Call it only on the step loop."""

    def __init__(
        self,
        adapters: EngineAdapters | None,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` runs a call on the step loop. Without `adapters`, every sequence with an adapter is refused."""
        self._adapters = adapters
        self._post = post
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter reader")
        self._held: dict[Sequence, str] = {}  # the revision whose slot each sequence uses, ready or not
        self._waiters: dict[Sequence, _Waiter] = {}  # without a slot, or with one that is being filled; by arrival
        self.ready: tuple[str, ...] = ()  # revisions that can be used at once

    @property
    def load_s(self) -> float:
        """The recent mean time to load an adapter; 0 before the first."""
        return 0.0 if self._adapters is None else self._adapters.load_s

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def when_ready(self, sequence: Sequence, then: OnReady) -> None:
        """Calls `then` when the sequence has its slot: immediately if it has one or needs none. Never blocks."""
        ref = sequence.adapter
        if ref is None or (sequence in self._held and sequence not in self._waiters):
            then(None)
            return
        if self._adapters is None:
            then(AdapterUnavailable(f"{ref}: this worker has no adapter slots; set engine.max_adapters"))
            return
        waiter = self._waiters.get(sequence)
        if waiter is None:
            waiter = self._waiters[sequence] = _Waiter(ref, self._clock() + _MAX_WAIT_S)
            self._take(sequence, ref)
        waiter.thens.append(then)
        if sequence in self._held and self._adapters.slots.is_ready(ref.revision):
            self._settle(sequence, None)

    def _take(self, sequence: Sequence, ref: AdapterRef) -> None:
        """Takes a slot if there is one, and begins to fill it if it holds something else."""
        assert self._adapters is not None
        grant = self._adapters.slots.acquire(ref.revision)
        if grant is None:
            return
        self._held[sequence] = ref.revision
        sequence.adapter_slot = grant.slot
        if grant.must_load:
            self._refresh()
            self._thread.submit(self._load, ref, grant.slot)

    def _load(self, ref: AdapterRef, slot: int) -> None:
        assert self._adapters is not None
        error: PenstockError | None = None
        try:
            self._adapters.load(ref, slot)
        except PenstockError as raised:
            error = AdapterUnavailable(raised.message)
        except Exception as raised:  # a lost rank or a fault must not leave the sequences waiting
            error = AdapterUnavailable(f"{ref}: could not be loaded: {type(raised).__name__}: {raised}")
        self._post(partial(self._on_loaded, ref.revision, error))

    def _on_loaded(self, revision: str, error: PenstockError | None) -> None:
        assert self._adapters is not None
        mine = [sequence for sequence, held in self._held.items() if held == revision]
        if error is None:
            self._adapters.slots.loaded(revision)
        else:
            self._adapters.slots.failed(revision)
            for sequence in mine:
                del self._held[sequence]
                sequence.adapter_slot = 0
        self._refresh()
        for sequence in mine:
            self._settle(sequence, error)
        self._serve_waiting()

    def _settle(self, sequence: Sequence, error: PenstockError | None) -> None:
        """Ends the sequence's wait."""
        waiter = self._waiters.pop(sequence, None)
        for then in waiter.thens if waiter is not None else ():
            then(error)

    def release(self, sequence: Sequence) -> None:
        """Releases the sequence's slot, or ends its wait for one; otherwise does nothing."""
        self._waiters.pop(sequence, None)
        revision = self._held.pop(sequence, None)
        if revision is not None:
            assert self._adapters is not None
            self._adapters.slots.release(revision)
            self._serve_waiting()

    def _serve_waiting(self) -> None:
        assert self._adapters is not None
        for sequence, waiter in list(self._waiters.items()):
            if sequence not in self._held and sequence in self._waiters:
                self._take(sequence, waiter.ref)
                if sequence in self._held and self._adapters.slots.is_ready(waiter.ref.revision):
                    self._settle(sequence, None)

    def sweep(self, now_s: float) -> float | None:
        """Refuses sequences that have waited too long; returns when to sweep again."""
        for sequence, waiter in list(self._waiters.items()):
            if now_s >= waiter.deadline_s and sequence in self._waiters:
                has_slot = sequence in self._held
                problem = "its files were not read" if has_slot else "every slot was in use by other adapters"
                error = AdapterUnavailable(
                    f"{waiter.ref}: {problem} for {_MAX_WAIT_S:g} s; raise engine.max_adapters, or try again",
                    _RETRY_AFTER_S,
                )
                thens = waiter.thens
                self.release(sequence)
                for then in thens:
                    then(error)
        return min((waiter.deadline_s for waiter in self._waiters.values()), default=None)

    def _refresh(self) -> None:
        assert self._adapters is not None
        self.ready = tuple(self._adapters.slots.ready)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
