"""Finds the hidden states of each sequence among those that a step has computed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from engine.step.batch import HostBatch, first_rows
from engine.step.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The hidden states of tokens that a step has computed for one sequence. Proposed tokens are among them."""

    start: int  # position of the first token
    states_TX: torch.Tensor  # on the device; see `engine.layers.hidden_taps`


def by_place(work: Seq[ScheduledSequence], host: HostBatch, states_TX: torch.Tensor) -> Mapping[int, HiddenStates]:
    """Returns the hidden states of each scheduled sequence by its place in `work`, as views of `states_TX`."""
    found = {}
    for place, row in enumerate(first_rows(work)):
        count = work[place].num_positions
        found[place] = HiddenStates(int(host.positions_T[row]), states_TX[row : row + count])
    return found
