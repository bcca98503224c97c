"""Checks the break-even between computing a suffix beside decoding and a remote prefill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_worker.prefill.placement_policy import PlacementCosts, prefill_here

IDLE = PlacementCosts(
    uncached_tokens=16,
    queued_tokens=0,
    num_running=0,
    tokens_per_s=10_000.0,
    remote_queue_s=0.0,
    remote_prefill_s=0.002,
    transfer_s=0.001,
)


@pytest.mark.parametrize(
    ("mode", "has_candidates", "costs", "here"),
    [
        ("auto", True, IDLE, True),
        ("auto", True, replace(IDLE, uncached_tokens=32), True),  # the longest that is computed here
        ("auto", True, replace(IDLE, uncached_tokens=33), False),
        ("auto", True, replace(IDLE, num_running=60, transfer_s=1.0), True),
        ("auto", True, replace(IDLE, num_running=60, remote_prefill_s=1.0), True),
        ("auto", True, replace(IDLE, num_running=60), False),
        ("auto", True, replace(IDLE, queued_tokens=1000), False),
        ("auto", True, replace(IDLE, num_running=60, remote_queue_s=1.0), True),
        ("auto", False, replace(IDLE, uncached_tokens=10_000), True),
        ("local", True, replace(IDLE, uncached_tokens=10_000), True),
        ("remote", True, IDLE, False),
        ("remote", False, IDLE, True),
    ],
)
def test_placement(mode: str, has_candidates: bool, costs: PlacementCosts, here: bool) -> None:
    assert prefill_here(mode, 32, has_candidates, costs) is here  # type: ignore[arg-type]
