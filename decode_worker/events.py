"""Defines what a decode worker reports to other parts of its process: the ends of steps, proposals and requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decode_worker.request import DecodeRequest
from engine.step.speculation.proposal import ProposalKind
from penstock.types import Lane


def _ignore(*event: object) -> None:
    """Ignores an event."""


@dataclass(frozen=True, slots=True)
class DecodeEvents:
    """The functions that a decode worker calls on the step loop."""

    after_step: Callable[[], None] = _ignore  # between two steps, and when there was nothing to compute
    on_release: Callable[[DecodeRequest], None] = _ignore  # a request has ended here or has migrated
    on_step: Callable[[int, int, float], None] = _ignore  # the sequences, tokens and seconds of a step
    # A proposal: the lane of its request, its tokens, how many of them were accepted.
    on_verified: Callable[[ProposalKind, Lane, int, int], None] = _ignore
