"""What to do with a worker whose node is about to go: wait for its successor elsewhere, or empty it now. Pure.

A worker that serves until another one can take its streams loses nothing; one that is emptied too late loses what it
still holds to a new computation. So the time that is left is divided: as much as emptying may take is kept for that,
the rest may go to the successor's start. Where there is no other decode worker, emptying would only end the service
earlier: then it serves until its node goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_EMPTY_S = 3.0  # of an idle worker: two quiet reports, cached pages, its end
_SEQUENCE_S = 0.25  # for each that it holds, to move or to end
_AT_MOST = 0.5  # of the time that was given, for emptying
_MARGIN_S = 1.0  # before the node goes


@dataclass(frozen=True, slots=True)
class Notice:
    """A node goes."""

    node: str
    given_s: float  # when it was told, monotonic
    deadline_s: float | None = None  # by when everything there must have ended; None: no hurry
    reason: str = ""


class Verdict(StrEnum):
    WAIT = "wait"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Step:
    verdict: Verdict
    until_s: float | None = None  # when to decide again at the latest; of EMPTY by when it has to be over


@dataclass(frozen=True, slots=True)
class Resident:
    """A ready worker on such a node, and who could stand in for it."""

    num_open: int
    successor_ready: bool
    others_serve: bool  # ready workers that can take what it has, elsewhere, the successor apart


def decide(resident: Resident, notice: Notice, successor_patience_s: float, now_s: float) -> Step:
    """`successor_patience_s` bounds the wait for a successor that cannot be placed, where there is no deadline."""
    latest_s = empty_from_s(resident.num_open, notice)
    must_end_s = None if notice.deadline_s is None else notice.deadline_s - _MARGIN_S
    if resident.successor_ready:
        return Step(Verdict.EMPTY, must_end_s)
    if not resident.others_serve:
        return Step(Verdict.WAIT, None)
    wait_until_s = notice.given_s + successor_patience_s if latest_s is None else latest_s
    if now_s < wait_until_s:
        return Step(Verdict.WAIT, wait_until_s)
    return Step(Verdict.EMPTY, must_end_s)


def empty_from_s(num_open: int, notice: Notice) -> float | None:
    """The last moment at which emptying may begin."""
    if notice.deadline_s is None:
        return None
    given_s = max(0.0, notice.deadline_s - notice.given_s)
    return notice.deadline_s - min(_MARGIN_S + _EMPTY_S + num_open * _SEQUENCE_S, _AT_MOST * given_s)
