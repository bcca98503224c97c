"""Decides for which sequences of the next step tokens are proposed and verified. Pure.

The decode scheduler asks it before each step, and gives the proposed tokens to the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from decode_worker.schedule.run_queues import RunQueues
from engine.memory.estimates import SCORED_TOKENS
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from engine.step.speculation.speculator import Speculator


class StepProposals:
    """Asks the speculator about the sequences of one scheduler's `queues` and `rows`; without one, proposes nothing."""

    def __init__(self, queues: RunQueues, rows: RowTable, speculator: Speculator | None, max_batch_tokens: int) -> None:
        self._queues = queues
        self._rows = rows
        self._speculator = speculator
        self._max_batch_tokens = max_batch_tokens
        self._asked = (0, False)  # (step, whether verifying proposals after it pays)

    def propose(self) -> Mapping[Sequence, tuple[int, ...]]:
        """Returns the tokens to verify in the next step, and withdraws the rows of their sequences."""
        decoding = self._decoding()
        if self._speculator is None or not decoding:
            return {}
        limit = min(SCORED_TOKENS, self._max_batch_tokens - len(decoding))
        proposed = self._speculator.propose(decoding, self._rows.num_left, limit)
        for sequence in proposed:
            self._queues.withdraw_row(sequence)
        return proposed

    def pays_after(self, step: int) -> bool:
        """Returns whether the step after `step`, which is in flight, should verify proposals and so has to wait."""
        if self._asked[0] != step:  # each call during a step in flight would ask again
            decoding = self._decoding()
            pays = False
            if decoding and self._speculator is not None:
                pays = self._speculator.would_propose(decoding, self._rows.num_left)
            self._asked = step, pays
        return self._asked[1]

    def wants_states(self, chunks: Collection[ScheduledSequence]) -> bool:
        """Returns whether the next step, with these sequences beside the rows, should hand out its hidden states if
        layers are tapped."""
        if self._speculator is None or not self._speculator.reads_states:
            return True
        has_chunks = bool(chunks) and any(chunk.num_tokens > 1 for chunk in chunks)
        return self._speculator.wants_states(len(self._rows) + len(chunks), has_chunks)

    def _decoding(self) -> list[Sequence]:
        """Returns the sequences that get one token each in the next step. Returns none if proposals for so many cannot
        pay, or if prompts are computed too, since such a step is long enough already.
        """
        queues = self._queues
        num_decoding = len(self._rows) + len(queues.rowless)
        if self._speculator is None or not num_decoding or queues.waiting:
            return []
        if queues.waiting_bulk and not queues.num_running_others:
            return []
        if not self._speculator.may_pay(num_decoding):
            return []
        rowless = [entry.sequence for entry in queues.rowless]
        if any(sequence.num_uncomputed_tokens > 1 for sequence in rowless):
            return []
        return [*self._rows.sequences, *rowless]

    def forget(self, sequence: Sequence) -> None:
        """Drops what is known of a sequence that has ended."""
        if self._speculator is not None:
            self._speculator.forget(sequence)
