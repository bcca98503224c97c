"""Tests tenants in admission: they share by weight, and each has a token rate, a request limit and a KV quota."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.config.admission import TenantLimits
from penstock.errors import InvalidInput, Overloaded
from router.admission import tenant_accounts
from router.admission.fairness import FairCounters
from router.admission.interface import Dispatched, Queued, RefusalReason, RequestUsage
from router.admission.tenant_accounts import TenantAccounts, TokenBucket
from router.fleet.tenant_use import TenantUse
from tests.support.router.admission_requests import admission, ask, fill
from tests.support.suite.examples import examples

# Fairness.


@examples(60)
@given(
    weights=st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.sampled_from([1.0, 3.0])),
    prompts=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    outputs=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    seed=st.integers(0, 1000),
)
def test_two_busy_tenants_are_served_by_weight(weights, prompts, outputs, seed):
    """This holds for any requests, although dispatch only estimates their usage."""
    limits = {"a": TenantLimits(weight=weights[0]), "b": TenantLimits(weight=weights[1])}
    made = admission(limits_of=lambda tenant: limits.get(tenant, TenantLimits()))
    rng = random.Random(seed)
    size = {"a": (prompts[0], outputs[0]), "b": (prompts[1], outputs[1])}
    out = [(key, "") for key in fill(made)]
    service, waiting = {"a": 0.0, "b": 0.0}, {"a": 0, "b": 0}
    tenant_of = {}
    key = 0
    for turn in range(200):
        for tenant in ("a", "b"):
            while waiting[tenant] < 3:
                key += 1
                tenant_of[key] = tenant
                assert made.offer(ask(key, tenant=tenant, prompt=size[tenant][0]), turn) == Queued(key)
                waiting[tenant] += 1
        ended, tenant = out.pop(rng.randrange(len(out)))
        made.end(ended, RequestUsage(size[tenant][1] if tenant else 50), turn)
        for answer in made.poll(turn):
            tenant = tenant_of[answer.key]
            waiting[tenant] -= 1
            out.append((answer.key, tenant))
            service[tenant] += (size[tenant][0] + 2.0 * size[tenant][1]) / limits[tenant].weight
        costliest = max((size[name][0] + 2.0 * 50) / limits[name].weight for name in ("a", "b"))
        unsettled = sum(2.0 * 50 / limits[name].weight for _, name in out if name)
        assert abs(service["a"] - service["b"]) <= 2 * costliest + unsettled


def test_a_returning_tenant_starts_at_the_least_of_those_that_stayed():
    counters = FairCounters[str]()
    for tenant in ("stayed", "busy"):
        counters.activate(tenant)
    for _ in range(10):
        counters.serve("stayed", 10.0)
        counters.serve("busy", 20.0)
    counters.activate("back")
    assert counters["back"] == counters["stayed"] == 100.0


def test_a_refund_without_competitors_puts_no_tenant_ahead():
    counters = FairCounters[str]()
    counters.serve("alone", 1000.0)
    counters.activate("alone")
    counters.activate("new")
    counters.settle("alone", -900.0, contended=False)
    assert counters["alone"] == counters["new"] == 1000.0
    counters.settle("alone", -50.0, contended=True)
    assert counters["alone"] == 950.0


def test_a_refund_without_competitors_counts_for_those_that_come_later():
    counters = FairCounters[str]()
    counters.activate("alone")
    counters.serve("alone", 1000.0)
    counters.settle("alone", -900.0, contended=False)
    counters.activate("new")
    assert counters["alone"] == counters["new"] == 100.0


def test_changes_of_use_are_reported_for_tenants_with_limits_alone():
    accounts = TenantAccounts(lambda tenant: TenantLimits(tokens_per_s=10.0) if tenant == "limited" else TenantLimits())
    seen = []
    accounts.watch(lambda: seen.append(accounts.uses()))
    for tenant in ("limited", "free"):
        accounts.send(tenant, 5)
        accounts.spend(tenant, 7, 0.0)
        accounts.end(tenant, 5)
    assert seen == [{"limited": TenantUse(0, *use)} for use in ((5, 0), (5, 7), (0, 7))]


def test_buckets_that_are_full_make_room_for_others(monkeypatch):
    monkeypatch.setattr(tenant_accounts, "_MAX_BUCKETS", 3)
    accounts = TenantAccounts(lambda tenant: TenantLimits(tokens_per_s=1.0, burst_tokens=10))
    accounts.spend("owing", 20, 0.0)
    for number in range(10):
        assert accounts.rate_wait_s(f"idle {number}", 10, 0.0) == 0.0
    assert len(accounts._buckets) <= 4
    assert accounts.rate_wait_s("owing", 1, 0.0) == 11.0, "a debt stays"


# Tenants.


def test_a_token_rate_is_enforced_and_settled_by_usage():
    limits = TenantLimits(tokens_per_s=100.0, burst_tokens=300)
    made = admission(limits_of=lambda tenant: limits)
    assert isinstance(made.offer(ask(1, tenant="a"), 0.0), Dispatched)
    assert isinstance(made.offer(ask(2, tenant="a"), 0.0), Dispatched)
    refused = made.offer(ask(3, tenant="a"), 0.0)
    assert refused.reason is RefusalReason.TOKEN_RATE
    assert 1.5 <= refused.retry_after_s <= 1.5 * 1.5
    assert isinstance(made.offer(ask(4, tenant="b"), 0.0), Dispatched)
    made.end(1, RequestUsage(0), 0.0)  # 50 tokens of output were estimated
    made.end(2, RequestUsage(0), 0.0)
    assert made.offer(ask(5, tenant="a"), 0.0).retry_after_s <= 0.75
    assert isinstance(made.offer(ask(6, tenant="a"), 1.0), Dispatched)


def test_a_bucket_refills_its_debt_before_it_grants_more():
    bucket = TokenBucket(10.0, 100.0, 0.0)
    bucket.take(100.0, 0.0)
    bucket.take(50.0, 0.0)
    assert bucket.wait_s(10.0, 0.0) == 6.0
    assert bucket.wait_s(10.0, 6.0) == 0.0
    assert bucket.wait_s(500.0, 15.0) == 0.0  # more than a burst is granted when the bucket is full


def test_a_tenants_concurrent_requests_are_limited():
    made = admission(limits_of=lambda tenant: TenantLimits(max_requests=1 if tenant else None))
    assert isinstance(made.offer(ask(1, tenant="a"), 0.0), Dispatched)
    refused = made.offer(ask(2, tenant="a"), 0.0)
    assert (refused.reason, isinstance(refused.error(), Overloaded)) == (RefusalReason.TENANT_REQUESTS, True)
    assert isinstance(made.offer(ask(3), 0.0), Dispatched)
    made.end(1, None, 0.0)
    assert isinstance(made.offer(ask(4, tenant="a"), 0.0), Dispatched)


def test_a_tenant_over_its_quota_waits_while_others_are_dispatched():
    limits = {"a": TenantLimits(max_inflight_tokens=200)}
    made = admission(limits_of=lambda tenant: limits.get(tenant, TenantLimits()))
    assert isinstance(made.offer(ask(1, tenant="a"), 0.0), Dispatched)
    assert made.offer(ask(2, tenant="a"), 0.0) == Queued(2)
    assert made.poll(0.0) == []
    assert isinstance(made.offer(ask(3, tenant="b"), 0.0), Dispatched)
    made.end(1, RequestUsage(50), 1.0)
    assert [answer.key for answer in made.poll(1.0)] == [2]


def test_a_request_beyond_its_quota_is_refused_as_invalid_input():
    made = admission(limits_of=lambda tenant: TenantLimits(max_inflight_tokens=120))
    refused = made.offer(ask(1), 0.0)
    assert isinstance(refused.error(), InvalidInput)
    assert "150 tokens, more than this tenant's quota of 120" in refused.error().message


def test_a_request_without_max_tokens_is_charged_as_it_grows():
    """The context may be larger than the whole quota."""
    made = admission(limits_of=lambda tenant: TenantLimits(max_inflight_tokens=10_000))
    assert isinstance(made.offer(ask(1, tenant="a", max_tokens=100_000, open_ended=True), 0.0), Dispatched)
    assert made.inflight_tokens("a") == 100 + 4096
    made.grow(1, 4095)
    assert made.inflight_tokens("a") == 100 + 4096
    made.grow(1, 4096)
    assert made.inflight_tokens("a") == 100 + 2 * 4096
    assert isinstance(made.offer(ask(2, tenant="a", prompt=2000), 0.0), Queued)
    made.grow(1, 99_999)
    assert made.inflight_tokens("a") == 100 + 100_000
    made.end(1, RequestUsage(100_000), 1.0)
    assert [answer.key for answer in made.poll(1.0)] == [2]
    made.end(2, RequestUsage(1), 2.0)
    assert made.inflight_tokens("a") == 0
