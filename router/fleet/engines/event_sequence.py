"""Decides what to do with a numbered batch of events: apply it, drop it, or ask for what is missing. Pure.

Live batches and an answer to a replay request may overlap, so a batch that was applied already is dropped. Live batches
alone never go back: where they do, another incarnation of the publisher numbers them.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    APPLY = "apply"
    DROP = "drop"  # it has already been applied
    MISSING = "missing"  # earlier batches have not arrived
    RESTARTED = "restarted"  # the batch is from another publisher, and everything known is void


class EventSequence:
    """Follows the numbers of one publisher."""

    def __init__(self) -> None:
        self.next_seq = 0  # the first batch that is not applied
        self._last_live = -1

    def on_live(self, seq: int) -> Verdict:
        """Judges a batch that was just published."""
        if seq <= self._last_live:
            self.reset()
            self._last_live = seq
            return Verdict.RESTARTED
        self._last_live = seq
        if seq > self.next_seq:
            return Verdict.MISSING
        return self._judge(seq)

    def on_replayed(self, seq: int) -> Verdict:
        """Judges a batch that was sent again. Batches that the publisher no longer keeps are lost and skipped."""
        if seq > self.next_seq:
            self.next_seq = seq + 1
            return Verdict.MISSING
        return self._judge(seq)

    def reset(self) -> None:
        """Expects a new publisher's batches from the first one on."""
        self.next_seq, self._last_live = 0, -1

    def _judge(self, seq: int) -> Verdict:
        if seq < self.next_seq:
            return Verdict.DROP
        self.next_seq = seq + 1
        return Verdict.APPLY
