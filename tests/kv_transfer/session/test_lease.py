"""Tests leases, and when their owner sweeps over them."""

from __future__ import annotations

import pytest

from kv_transfer.session.lease import Lease, Sweeper, earliest, heartbeat_s


def test_a_lease_is_over_at_its_deadline() -> None:
    lease = Lease(length_s=2.0, renewed_s=5.0)
    assert not lease.is_over(6.999)
    assert lease.is_over(7.0)


def test_the_first_sweep_comes_one_interval_after_the_first_lease() -> None:
    sweeper = Sweeper(every_s=1.0)
    assert not sweeper.is_due(10.0, any_open=True)
    assert not sweeper.is_due(10.999, any_open=True)
    assert sweeper.is_due(11.0, any_open=True)
    assert sweeper.is_due(11.0, any_open=True), "due until the caller has looked"


def test_the_next_sweep_comes_at_the_next_deadline_or_after_an_interval() -> None:
    sweeper = Sweeper(every_s=1.0)
    sweeper.looked(20.0, [20.25, 30.0])
    assert sweeper.next_s == 20.25
    sweeper.looked(20.25, [30.0])
    assert sweeper.next_s == 21.25


def test_no_sweep_is_due_without_a_lease() -> None:
    sweeper = Sweeper(every_s=1.0)
    sweeper.looked(20.0, [20.5])
    assert not sweeper.is_due(25.0, any_open=False)
    assert sweeper.next_s is None
    assert not sweeper.is_due(26.0, any_open=True), "a new lease starts a new interval"
    assert sweeper.next_s == 27.0


def test_three_heartbeats_may_be_lost() -> None:
    assert heartbeat_s(2.0) == pytest.approx(0.5)


def test_the_earliest_moment_ignores_those_that_are_not_set() -> None:
    assert earliest(None, 3.0, 2.0) == 2.0
    assert earliest(None, None) is None
