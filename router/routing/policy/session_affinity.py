"""Keeps the requests of a session on one worker, whose cache holds its earlier turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.types import WorkerId
from router.routing.policy.rendezvous import preferred


def session_bonuses(session: str, workers: Sequence[WorkerId], affinity_s: float) -> list[float]:
    """Returns a bonus of `affinity_s` for the session's worker: another one serves it only if it is cheaper by more."""
    bonuses = [0.0] * len(workers)
    if session and workers:
        bonuses[preferred(session.encode(), workers)] = affinity_s
    return bonuses
