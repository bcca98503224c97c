"""Tests that no two starts of a worker share an epoch, whatever the clocks of their machines show."""

from __future__ import annotations

import time

import pytest

from kv_transfer.ranks.head_routes import MAX_RANKS, rank_epoch
from penstock.types import RANK_BITS, Epoch, WorkerId, new_epoch
from router.routing.costs.inflight import InflightWork, PeerInflight


def test_epochs_are_unique_though_the_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    epochs = [new_epoch() for _ in range(2000)]
    assert all(0 < epoch < 2**63 for epoch in epochs)
    assert 1 << RANK_BITS == MAX_RANKS
    ranks = {rank_epoch(epoch, rank) for epoch in epochs for rank in range(MAX_RANKS)}
    assert len(ranks) == len(epochs) * MAX_RANKS, "a rank of one worker has the epoch of another's"


@pytest.mark.parametrize("epochs", [(5, 9), (9, 5)])
def test_a_restarted_routers_reports_count_whatever_its_epoch(epochs: tuple[int, int]) -> None:
    load, worker = PeerInflight(), WorkerId("d")
    for number, count in ((100, 1), (99, 7), (101, 2)):  # a late report
        load.apply("peer:1", Epoch(epochs[0]), number, {worker: InflightWork(count)}, now_s=0.0)
    assert load.sent_to(worker, 0.0) == InflightWork(2)
    load.apply("peer:1", Epoch(epochs[1]), 1, {worker: InflightWork(3)}, now_s=0.0)
    assert load.sent_to(worker, 0.0) == InflightWork(3)
