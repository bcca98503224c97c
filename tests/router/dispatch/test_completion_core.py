"""Tests the state machine of a completion with random histories: in the end, nothing stays booked."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.retry import RetryBudget
from penstock.errors import InvalidInput, Overloaded, PenstockError, Unavailable
from penstock.types import Epoch, WorkerId
from router.dispatch.completion_core import CompletionCore
from router.routing.costs.inflight import InflightLedger, InflightWork

DECODE, PREFILL = WorkerId("decode-0"), WorkerId("prefill-0")
EVENTS = ("send", "token", "refused", "lost", "migrated", "end", "release")


def make(ledger: InflightLedger, reserve: float = 100.0) -> CompletionCore:
    return CompletionCore(ledger, RetryBudget(0.0, reserve), 3)


def place(core: CompletionCore, ledger: InflightLedger, epoch: int = 1) -> None:
    work = InflightWork(1, 4, 64, 1000)
    core.on_placed([ledger.record(owner, work, 0.0) for owner in (DECODE, PREFILL, (PREFILL, DECODE))])
    core.on_sent(Epoch(epoch))


def test_an_end_before_any_token_leaves_nothing_booked() -> None:
    ledger = InflightLedger()
    core = make(ledger)
    place(core, ledger)
    core.on_end()
    assert ledger.totals() == []
    assert core.over


@given(st.lists(st.sampled_from(EVENTS), max_size=20))
def test_every_history_ends_with_nothing_booked_and_cancels_the_worker_in_charge(events: list[str]) -> None:
    ledger = InflightLedger()
    core = make(ledger)
    at_worker = False
    for event in events:
        if core.over:
            break
        if event == "send" and not at_worker:
            place(core, ledger)
            at_worker = True
        elif event == "token" and at_worker:
            core.on_tokens(2)
            assert ledger.totals() == []
        elif event in {"refused", "lost"} and at_worker:
            at_worker = False
            try:
                core.on_failure(Unavailable("gone", 1.0), 0.0, random.Random(0), refused=event == "refused")
            except PenstockError:
                core.release()
        elif event == "migrated" and at_worker:
            core.on_left()
            core.on_sent(Epoch(2))
        elif event == "end" and at_worker:
            at_worker = False
            core.on_end()
        elif event == "release":
            assert core.release() == at_worker
            at_worker = False
    assert core.release() == at_worker
    assert core.over
    assert not core.release()
    assert ledger.totals() == []
    assert ledger.link_bytes((PREFILL, DECODE)) == 0


def test_a_worker_that_refused_is_not_retried_but_a_lost_one_may_be() -> None:
    ledger = InflightLedger()
    core = make(ledger)
    for epoch, refused in ((1, True), (2, False)):
        place(core, ledger, epoch)
        core.on_failure(Overloaded("full", 1.0), 0.0, random.Random(0), refused=refused)
    assert [core.may_go_to(Epoch(epoch)) for epoch in (1, 2)] == [False, True]
    assert core.num_redispatches == 2


def test_recurring_errors_and_spent_budgets_end_a_completion() -> None:
    rng = random.Random(0)
    with pytest.raises(InvalidInput, match="prompt"):
        make(InflightLedger()).on_failure(InvalidInput("prompt", "too long"), 0.0, rng, refused=True)
    core = make(InflightLedger())
    for _ in range(3):
        core.on_failure(Unavailable("lost", 1.0), 0.0, rng, refused=False)
    with pytest.raises(Unavailable, match="gave up after 3 re-dispatches; the last error was: lost"):
        core.on_failure(Unavailable("lost", 1.0), 0.0, rng, refused=False)
    with pytest.raises(Unavailable, match="too many requests were re-dispatched lately, so this one is not: lost"):
        make(InflightLedger(), reserve=0.0).on_failure(Unavailable("lost", 1.0), 0.0, rng, refused=False)


def test_a_completion_that_has_tokens_waits_longer_for_a_worker() -> None:
    fresh = make(InflightLedger())
    resumed = CompletionCore(InflightLedger(), RetryBudget(), 3, num_generated=4)
    assert fresh.patience_s() < resumed.patience_s()
