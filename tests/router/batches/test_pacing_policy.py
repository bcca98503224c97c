"""Tests that batches use only the capacity that other requests leave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.config.router import BatchConfig
from router.batches.pacing_policy import PoolUse, lines_at_once

CONFIG = BatchConfig(folder="x", max_running=32, beside=1)
uses = st.builds(PoolUse, st.integers(0, 64), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))


def test_batches_fill_idle_pools_and_yield_to_other_requests() -> None:
    assert lines_at_once(PoolUse(0, num_others=0, num_waiting=0, num_decode_workers=3), CONFIG) == 32
    assert lines_at_once(PoolUse(20, num_others=1, num_waiting=0, num_decode_workers=3), CONFIG) == 3
    assert lines_at_once(PoolUse(20, num_others=0, num_waiting=1, num_decode_workers=3), CONFIG) == 20
    assert lines_at_once(PoolUse(0, num_others=0, num_waiting=0, num_decode_workers=0), CONFIG) == 0
    quiet = CONFIG.model_copy(update={"beside": 0})
    assert lines_at_once(PoolUse(0, num_others=1, num_waiting=0, num_decode_workers=3), quiet) == 0


@given(use=uses, max_running=st.integers(1, 64), beside=st.integers(0, 4))
def test_nothing_is_added_while_other_requests_wait(use: PoolUse, max_running: int, beside: int) -> None:
    limit = lines_at_once(use, BatchConfig(folder="x", max_running=max_running, beside=beside))
    assert 0 <= limit <= max_running
    if use.num_waiting:
        assert limit <= use.num_lines
