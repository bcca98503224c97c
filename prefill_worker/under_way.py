"""A step of prompts that the device has been given, and what is still to be done when it is over.

No prompt waits for another one's token, so on a GPU the next step is given before this one's tokens are known: what it
has computed counts from when it was given, since everything that reads the pages comes after it on the device. Only who
gives a page to somebody else must wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.drawing import Drawn, Known
from engine.sequence import ScheduledSequence, Sequence
from penstock.types import PageId


@dataclass(frozen=True, slots=True, eq=False)
class StepUnderWay:
    work: list[ScheduledSequence]
    complete: list[Sequence]  # whose first token it draws
    tokens: Drawn | Known
    started_s: float
    contexts: float  # see `ScheduledSequence.num_contexts`; of all together
    # Of each that has ended meanwhile, and of whom some may share pages: it may still write them.
    parked: list[list[PageId]] = field(default_factory=list)

    def computes(self, sequence: Sequence) -> bool:
        return any(item.sequence is sequence for item in self.work)
