"""Gives sequences their matchers before they are scheduled: grammars compile on threads, never on the step loop.

A recently compiled grammar costs microseconds. Any other waits for one of two threads, and its sequence waits with it;
the step loop continues. `penstock.text.grammars` bounds how long a grammar compiles, and `_MAX_WAIT_S` how long it
waits for a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from llguidance import LLMatcher

from engine.sampling.grammar.matcher import GrammarMatcher
from engine.step.sequence import Sequence
from penstock.errors import CheckpointError, DeadlineExceeded, InternalError, Overloaded, PenstockError
from penstock.text.grammars import GrammarCompiler

_NUM_THREADS = 2
_MAX_QUEUED = 4096
_MAX_WAIT_S = 10.0
_RETRY_AFTER_S = 1.0

OnReady = Callable[[PenstockError | None], None]  # takes the error of a grammar that cannot be used


class GrammarQueue:
    """Compiles the grammars of sequences. Call it only on the step loop."""

    def __init__(
        self, compiler: GrammarCompiler, eos_token_ids: Collection[int], post: Callable[[Callable[[], None]], None]
    ) -> None:
        """`post` runs a call on the step loop."""
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._post = post
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar compiler")
        self._waiting: dict[Sequence, list[OnReady]] = {}

    def when_ready(self, sequence: Sequence, then: OnReady) -> None:
        """Calls `then` when the sequence has its matcher: immediately if it has one or needs none. Never blocks."""
        grammar = sequence.sampling.grammar
        if grammar is None or sequence.matcher is not None:
            then(None)
            return
        if sequence in self._waiting:
            self._waiting[sequence].append(then)
            return
        try:
            if not self._eos_token_ids:
                raise CheckpointError(
                    "config.json names no eos_token_id, with which an output of a grammar ends; set it"
                )
            if (known := self._compiler.cached(grammar)) is not None:
                sequence.matcher = GrammarMatcher(known, self._eos_token_ids)
            elif len(self._waiting) >= _MAX_QUEUED:
                raise Overloaded(f"{len(self._waiting)} grammars wait to be compiled; try again", _RETRY_AFTER_S)
        except PenstockError as error:
            then(error)
            return
        if sequence.matcher is not None:
            then(None)
            return
        self._waiting[sequence] = [then]
        self._threads.submit(self._compile, sequence, time.monotonic())

    def _compile(self, sequence: Sequence, queued_s: float) -> None:
        outcome: LLMatcher | PenstockError
        assert sequence.sampling.grammar is not None
        try:
            if time.monotonic() - queued_s > _MAX_WAIT_S:
                raise DeadlineExceeded(f"the grammar waited more than {_MAX_WAIT_S:g} s to be compiled", _RETRY_AFTER_S)
            outcome = self._compiler.compile(sequence.sampling.grammar)
        except PenstockError as error:
            outcome = error
        except Exception as error:  # a fault of the library must not leave the sequence waiting
            outcome = InternalError(f"the grammar was not compiled: {error}")
        self._post(partial(self._finish, sequence, outcome))

    def _finish(self, sequence: Sequence, outcome: LLMatcher | PenstockError) -> None:
        error = outcome if isinstance(outcome, PenstockError) else None
        if not isinstance(outcome, PenstockError):
            sequence.matcher = GrammarMatcher(outcome, self._eos_token_ids)
        for then in self._waiting.pop(sequence):
            then(error)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
