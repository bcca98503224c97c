"""Tests that admission charges exactly what is served: refunds, idle tenants, debts, and late requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.admission import TenantLimits
from router.admission.capacity import Outstanding
from router.admission.fairness import FairCounters
from router.admission.interface import Dispatched, Queued, RefusalReason, Refused, RequestUsage
from router.admission.tenant_accounts import TenantAccounts, TokenBucket
from tests.support.router.admission_requests import FLEET, admission, ask, fill

# A request of 100 prompt tokens and 50 expected output tokens fits twice into this rate's burst.
RATED = TenantLimits(tokens_per_s=1.0, burst_tokens=300)


@pytest.mark.parametrize("ends_by", ["leaving", "expiry"])
def test_a_request_that_is_never_served_is_refunded_in_full(ends_by):
    made = admission(limits_of=lambda tenant: RATED if tenant else TenantLimits())
    fill(made)
    for key in (1, 2):
        assert made.offer(ask(key, tenant="a", timeout=10.0), 0.0) == Queued(key)
    assert made.offer(ask(3, tenant="a"), 0.0).reason is RefusalReason.TOKEN_RATE
    if ends_by == "leaving":
        for key in (1, 2):
            made.end(key, None, 0.0)
    else:
        assert [answer.key for answer in made.poll(10.0)] == [1, 2]
    assert [made.offer(ask(key, tenant="a", at=10.0), 10.0) for key in (4, 5)] == [Queued(4), Queued(5)]


def test_a_request_whose_turn_comes_too_late_is_refused_and_refunded():
    made = admission(limits_of=lambda tenant: RATED if tenant else TenantLimits())
    out = fill(made)
    for key in (1, 2):
        assert made.offer(ask(key, tenant="a", timeout=5.0), 0.0) == Queued(key)
    made.end(out.pop(), None, 1.0)
    made.on_fleet(replace(FLEET, prefill_tokens_per_s=1000.0, queued_prefill_tokens=8000), 1.0)
    late = made.poll(1.0)  # 8 seconds of prompts are queued at the workers, and 4 are left
    assert [(answer.key, answer.reason) for answer in late] == [
        (1, RefusalReason.DEADLINE),
        (2, RefusalReason.DEADLINE),
    ]
    assert isinstance(made.offer(ask(3, tenant="a", at=1.0), 1.0), Dispatched)
    last = made.offer(ask(4, tenant="a", at=1.0), 1.0)
    assert not isinstance(last, Refused) or last.reason is not RefusalReason.TOKEN_RATE


def test_every_ended_request_frees_what_it_held():
    made = admission(limits_of=lambda tenant: TenantLimits(max_inflight_tokens=300))
    assert made.offer(ask(1, tenant="a"), 0.0) == Dispatched(1, 50)
    made.start(1)
    made.start(1)
    assert (made.inflight_tokens("a"), made.outstanding.num_requests) == (150, 1)
    assert made.offer(ask(2, tenant="a"), 0.0) == Dispatched(2, 50)  # exactly the quota
    for key in (1, 2):  # the second one has no token
        made.end(key, RequestUsage(10), 1.0)
    assert made.inflight_tokens("a") == 0
    assert made.outstanding == Outstanding()


def test_idle_time_earns_no_credit():
    counters = FairCounters[str]()
    counters.activate("idle")
    counters.serve("idle", 10.0)
    counters.deactivate("idle")
    counters.activate("busy")
    for _ in range(10):
        counters.serve("busy", 10.0)
    counters.activate("idle")
    assert counters["idle"] == counters["busy"]
    counters.activate("new")
    assert counters["new"] == counters["busy"]


def test_a_tenant_that_leaves_with_a_debt_returns_with_it():
    counters = FairCounters[str]()
    for tenant in ("patient", "greedy"):
        counters.activate(tenant)
    counters.serve("greedy", 1000.0)
    counters.deactivate("greedy")
    counters.serve("patient", 10.0)
    counters.activate("greedy")
    assert counters["greedy"] == 1000.0


def test_usage_beyond_an_idle_tenants_charge_becomes_a_debt():
    counters = FairCounters[str]()
    for tenant in ("stays", "leaves"):
        counters.activate(tenant)
    counters.deactivate("leaves")
    counters.settle("leaves", 500.0, contended=True)
    counters.activate("leaves")
    assert counters["leaves"] - counters["stays"] == 500.0


def test_a_refund_to_an_idle_tenant_puts_it_ahead_of_nobody():
    counters = FairCounters[str]()
    counters.activate("stays")
    counters.serve("stays", 100.0)
    counters.settle("leaves", -500.0, contended=True)
    counters.activate("leaves")
    assert counters["leaves"] == counters["stays"]


def test_a_tenant_alone_starts_where_the_previous_one_stood():
    counters = FairCounters[str]()
    counters.activate("first")
    for _ in range(3):
        counters.serve("first", 10.0)
    counters.deactivate("first")
    counters.activate("second")
    assert counters["second"] == 20.0  # `first` stood there after two of its three turns, and was the least
    assert counters["first"] == 30.0


def test_a_bucket_keeps_a_debt_and_never_exceeds_its_burst():
    bucket = TokenBucket(10.0, 100.0, 0.0)
    bucket.take(150.0, 0.0)
    assert not bucket.is_full(14.9)
    assert bucket.is_full(15.0)
    bucket.take(-1000.0, 15.0)
    bucket.take(100.0, 15.0)
    assert bucket.wait_s(50.0, 15.0) == 5.0


def test_a_quota_can_be_used_to_the_last_token():
    accounts = TenantAccounts(lambda tenant: TenantLimits(max_inflight_tokens=100))
    accounts.send("a", 60)
    assert accounts.fits("a", 40)
    assert not accounts.fits("a", 41)
    assert accounts.fits("b", 100)
    accounts.end("a", 60)
    assert accounts.fits("a", 100)


def test_a_queued_request_of_several_sequences_waits_for_room_for_all_of_them():
    made = admission()
    out = fill(made)
    assert made.offer(ask(1, n=2), 0.0) == Queued(1)
    made.end(out.pop(), None, 1.0)
    assert made.poll(1.0) == []
    made.end(out.pop(), None, 2.0)
    assert [answer.key for answer in made.poll(2.0)] == [1]
