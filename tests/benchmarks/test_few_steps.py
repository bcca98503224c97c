"""Runs parts of benchmarks with few steps, so that a change of what they measure cannot break them unnoticed."""

from __future__ import annotations

import random

from benchmarks.router.choice import BusyFleet, check
from benchmarks.steps.__main__ import rows


def test_the_choice_of_a_pair_is_the_cheapest() -> None:
    check(BusyFleet(random.Random(0), num_pages=100_000))


async def test_every_kind_of_step_is_measured() -> None:
    measured = {row.metric: row.value for row in await rows(5)}
    kinds = ("step with a null model", "colocated step", "prefill step")
    assert all(measured[name] > 0 for name in measured if name.startswith(kinds))
    assert {kind for kind in kinds for name in measured if name.startswith(kind)} == set(kinds)
