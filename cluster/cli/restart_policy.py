"""Decides whether a deployment whose Ray was lost is started once more. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LOSSES = 3
WITHIN_S = 600.0


def may_restart(losses_s: Sequence[float], now_s: float) -> bool:
    """`losses_s` are the moments of all losses, the present one included. What is lost again and again has a cause that
    a restart does not remove."""
    return sum(now_s - lost_s < WITHIN_S for lost_s in losses_s) <= MAX_LOSSES
