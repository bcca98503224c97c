"""Tests that a computation on the router's event loop shows as loop lag, and that stopping leaves no timer."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, generate_latest

from router.metrics.loop_lag import LoopLag

HELD_S = 0.3


def above(registry: CollectorRegistry, bound: str) -> float:
    """Returns how many timers were later than `bound`."""
    text = generate_latest(registry).decode()
    at_most = [line for line in text.splitlines() if line.startswith("penstock:router_loop_lag_seconds_bucket")]
    counts = {line.split('le="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in at_most}
    return counts["+Inf"] - counts[bound]


async def test_a_computation_on_the_loop_shows_as_lag() -> None:
    registry = CollectorRegistry()
    lag = LoopLag(registry, "m")
    lag.start()
    before = above(registry, "0.25")
    time.sleep(HELD_S)  # noqa: ASYNC251  it holds the loop up, which is what is measured
    async with asyncio.timeout(60):
        while above(registry, "0.25") == before:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert "penstock:router_tasks" in generate_latest(registry).decode()
    lag.stop()


async def test_a_stopped_monitor_leaves_no_timer() -> None:
    registry = CollectorRegistry()
    lag = LoopLag(registry, "m")
    lag.start()
    timer = lag._timer
    assert timer is not None
    lag.stop()
    assert timer.cancelled()
