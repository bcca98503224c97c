"""Waits for what a sequence needs before its first step: a slot with its adapter, and its compiled grammar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.adapters.queue import AdapterQueue
from engine.sampling.grammar.queue import GrammarQueue
from engine.step.sequence import Sequence
from penstock.errors import InvalidInput, PenstockError

OnReady = Callable[[PenstockError | None], None]  # takes the error if this worker cannot prepare one of them


class SequenceReadiness:
    """Prepares both in parallel, and reports a sequence once both are ready. Call it only on the step loop."""

    def __init__(self, grammars: GrammarQueue | None, adapters: AdapterQueue | None) -> None:
        """Without `grammars` or `adapters`, sequences that need them are refused."""
        self._grammars = grammars
        self._adapters = adapters or AdapterQueue(None, lambda call: None)

    @property
    def loaded_adapters(self) -> tuple[str, ...]:
        return self._adapters.ready

    @property
    def adapter_load_s(self) -> float:
        return self._adapters.load_s

    def check(self, sequence: Sequence) -> None:
        """Raises InvalidInput if this worker cannot compile the sequence's grammar."""
        if sequence.sampling.grammar is not None and self._grammars is None:
            raise InvalidInput("sampling.grammar", "is not supported by this worker; leave it out")

    def prepare(self, sequence: Sequence) -> None:
        """Begins to load the adapter and to compile the grammar. `when_ready` reports what fails."""
        self._adapters.when_ready(sequence, lambda error: None)
        if self._grammars is not None:
            self._grammars.when_ready(sequence, lambda error: None)

    def when_ready(self, sequence: Sequence, then: OnReady) -> None:
        """Calls `then` once the adapter is loaded and the grammar compiled, at once if both are."""
        self._adapters.when_ready(sequence, partial(self._await_grammar, sequence, then))

    def _await_grammar(self, sequence: Sequence, then: OnReady, error: PenstockError | None) -> None:
        if error is not None or self._grammars is None:
            then(error)
        else:
            self._grammars.when_ready(sequence, then)

    def release(self, sequence: Sequence) -> None:
        """Releases the slot of a sequence that has ended."""
        self._adapters.release(sequence)
