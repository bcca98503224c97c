"""Prices what a prompt does to others: the queue behind it, and the weight of delays within a target. Pure.

Routers and decode workers price a prefill by the prompts that it delays. With random arrivals and a utilization of u, a
mean of u / (1 - u) prompts are waiting or in service (an M/M/1 queue).
"""

from __future__ import annotations

_SMOOTHING = 0.05  # weight of the newest prompt
WITHIN_TARGET = 0.1  # weight of a delay that leaves the time between tokens within its target
_MAX_PROMPTS = 4.0  # beyond this, prices rise no further, and admission has to act


class QueueLength:
    """Owns a running mean of the utilization that prompts find."""

    def __init__(self) -> None:
        self._busy_share = 0.0

    def observe(self, share: float) -> None:
        """Learns from a prompt: `share` is the share of the workers it could use that had a queue."""
        self._busy_share += _SMOOTHING * (share - self._busy_share)

    @property
    def num_prompts(self) -> float:
        """The mean queue length at that utilization, including the prompt in service."""
        if self._busy_share >= 1.0:
            return _MAX_PROMPTS
        return min(_MAX_PROMPTS, self._busy_share / (1.0 - self._busy_share))
