"""Decides when a worker whose node is about to go is drained: now, or after its successor elsewhere is ready. Pure.

A worker that serves until another one can take its streams loses nothing; if it is drained too late, what it still
holds must be recomputed. So the remaining time is divided: the time that draining may take is kept for it, and the rest
may go to the successor's start. Where there is no other decode worker, draining would only end the service earlier, so
the worker serves until its node goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_IDLE_DRAIN_S = 3.0  # drain of an idle worker: two idle reports, cached pages, its end
_SEQUENCE_S = 0.25  # for each sequence that it holds, to migrate or to end
_MAX_DRAIN_SHARE = 0.5  # of the time given
_CONTROLLER_MOVE_S = 20.0  # a new controller and new routers, on a busy machine
_MARGIN_S = 1.0  # before the node goes


@dataclass(frozen=True, slots=True)
class NodeNotice:
    """A node is about to go."""

    node: str
    given_s: float  # when the notice came, monotonic
    deadline_s: float | None = None  # when everything there must have ended; None: no deadline
    reason: str = ""


class RelocationAction(StrEnum):
    """The action for a worker on such a node."""

    WAIT = "wait"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class RelocationStep:
    """An action and its time limit."""

    action: RelocationAction
    until_s: float | None = None  # WAIT: when to decide again at the latest; DRAIN: when it must be over


@dataclass(frozen=True, slots=True)
class LeavingWorker:
    """A ready worker on such a node, and which workers could take its load."""

    num_open: int
    successor_ready: bool
    others_serve: bool  # ready workers elsewhere, besides the successor, that can take its load


def decide_relocation(
    worker: LeavingWorker, notice: NodeNotice, successor_patience_s: float, now_s: float
) -> RelocationStep:
    """`successor_patience_s` bounds the wait for a successor that cannot be placed, where there is no deadline."""
    latest_s = latest_drain_start_s(worker.num_open, notice)
    must_end_s = None if notice.deadline_s is None else notice.deadline_s - _MARGIN_S
    if worker.successor_ready:
        return RelocationStep(RelocationAction.DRAIN, must_end_s)
    if not worker.others_serve:
        return RelocationStep(RelocationAction.WAIT, None)
    wait_until_s = notice.given_s + successor_patience_s if latest_s is None else latest_s
    if now_s < wait_until_s:
        return RelocationStep(RelocationAction.WAIT, wait_until_s)
    return RelocationStep(RelocationAction.DRAIN, must_end_s)


def controller_move_s(notice: NodeNotice) -> float | None:
    """Returns when the controller leaves such a node at the latest, although workers are left there; None: it waits for
    them. Its successor and new routers then have time to start before the node goes."""
    if notice.deadline_s is None:
        return None
    given_s = max(0.0, notice.deadline_s - notice.given_s)
    return notice.deadline_s - min(_CONTROLLER_MOVE_S, _MAX_DRAIN_SHARE * given_s)


def latest_drain_start_s(num_open: int, notice: NodeNotice) -> float | None:
    """Returns the last moment at which the drain may start, or None without a deadline."""
    if notice.deadline_s is None:
        return None
    given_s = max(0.0, notice.deadline_s - notice.given_s)
    drain_s = min(_MARGIN_S + _IDLE_DRAIN_S + num_open * _SEQUENCE_S, _MAX_DRAIN_SHARE * given_s)
    return notice.deadline_s - drain_s
