"""Sends the pages that a step completes layer by layer: one group of layers at a time, while the step is computing.

It sits between the prefill worker's step and the sender, on the step loop. It serves only transfers whose transport
gains from it and whose destination is known before the step. The receiver learns of these pages only when the worker
pushes the last group, after the step, so a step that fails has announced nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.step.sequence import ScheduledSequence
from kv_transfer.transports.transport import LayerGroup

OutputT = TypeVar("OutputT")


@dataclass(slots=True, eq=False)
class LayerwisePush:
    """A transfer's pages that are complete at the end of the step."""

    push: Callable[[LayerGroup], None]
    num_groups: int
    num_pushed: int = 0

    def last_group(self) -> LayerGroup | None:
        """Returns the group that remains to be pushed, or None if the pages must be pushed whole."""
        if self.num_pushed != self.num_groups - 1:
            return None
        return LayerGroup(self.num_pushed, self.num_groups)


class LayerwiseStep(Generic[OutputT]):
    """Calls `step` (`Engine.step` or `Engine.launch`) for one batch; only its first call pushes layer by layer."""

    def __init__(self, step: Callable[..., OutputT], num_layers: int, pushes: Sequence[LayerwisePush]) -> None:
        self._step = step
        self._num_layers = num_layers
        self._pushes = pushes
        self._called = False

    def __call__(self, work: Sequence[ScheduledSequence]) -> OutputT:
        if self._called:  # the batch failed and is recomputed sequence by sequence: its pages are pushed whole
            for push in self._pushes:
                push.num_pushed = 0
            return self._step(work)
        self._called = True
        return self._step(work, self._on_layers)

    def _on_layers(self, num_layers: int) -> None:
        if num_layers == self._num_layers:
            return  # the last group is pushed with the announcement
        for push in self._pushes:
            if num_layers % (self._num_layers // push.num_groups) == 0:
                push.push(LayerGroup(push.num_pushed, push.num_groups))
                push.num_pushed += 1
