"""Pages that a step completes, sent layers by layers while the step computes the rest of them.

Between the prefill worker's step and the sender, on the step loop. Only for transfers whose link gains from it and
whose destination is known before the step; what is sent here is announced by nobody until the worker pushes the last
part, after the step, so a step that fails has told the receiver nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.sequence import ScheduledSequence
from kv_transfer.transport import Part

OutputT = TypeVar("OutputT")


@dataclass(slots=True, eq=False)
class PushAhead:
    """One transfer's pages that are complete at the end of the step."""

    push: Callable[[Part], None]
    num_parts: int
    num_pushed: int = 0


class StepAhead(Generic[OutputT]):
    """`Engine.step` or `give` for one step of some batch; the first try alone sends anything ahead."""

    def __init__(self, step: Callable[..., OutputT], num_layers: int, pushes: Sequence[PushAhead]) -> None:
        self._step = step
        self._num_layers = num_layers
        self._pushes = pushes
        self._tried = False

    def __call__(self, work: Sequence[ScheduledSequence]) -> OutputT:
        if self._tried:  # the batch failed and is computed again, one by one: pages go out whole, afterwards
            for one in self._pushes:
                one.num_pushed = 0
            return self._step(work)
        self._tried = True
        return self._step(work, self._written)

    def _written(self, num_layers: int) -> None:
        if num_layers == self._num_layers:
            return  # the last part goes with the announcement
        for one in self._pushes:
            if num_layers % (self._num_layers // one.num_parts) == 0:
                one.push(Part(one.num_pushed, one.num_parts))
                one.num_pushed += 1


def last_part(ahead: PushAhead | None) -> Part | None:
    """What is left of pages that were sent ahead; None where they were not, or not all."""
    if ahead is None or ahead.num_pushed != ahead.num_parts - 1:
        return None
    return Part(ahead.num_pushed, ahead.num_parts)
