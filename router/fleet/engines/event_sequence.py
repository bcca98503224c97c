"""Decides what to do with a numbered batch of events: apply it, drop it, or request the missing batches. Pure.

Live and replayed batches may overlap, so a batch that was already applied is dropped. The numbers of live batches only
grow: if they fall, the publisher has restarted.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    APPLY = "apply"
    DROP = "drop"  # the batch was already applied
    MISSING = "missing"  # earlier batches have not arrived
    RESTARTED = "restarted"  # the publisher has restarted, and everything known of its cache is void


class EventSequence:
    """Tracks the batch numbers of one publisher."""

    def __init__(self) -> None:
        self.next_seq = 0  # number of the first batch that has not been applied
        self._last_live = -1

    def on_live(self, seq: int) -> Verdict:
        """Decides on a batch that was just published."""
        if seq <= self._last_live:
            self.reset()
            self._last_live = seq
            return Verdict.RESTARTED
        self._last_live = seq
        if seq > self.next_seq:
            return Verdict.MISSING
        return self._judge(seq)

    def on_replayed(self, seq: int) -> Verdict:
        """Decides on a replayed batch. Returns MISSING if it skips batches that the publisher no longer keeps."""
        if seq > self.next_seq:
            self.next_seq = seq + 1
            return Verdict.MISSING
        return self._judge(seq)

    def reset(self) -> None:
        """Expects the batches of a restarted publisher, from the first one on."""
        self.next_seq, self._last_live = 0, -1

    def _judge(self, seq: int) -> Verdict:
        if seq < self.next_seq:
            return Verdict.DROP
        self.next_seq = seq + 1
        return Verdict.APPLY
