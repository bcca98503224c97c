"""Tests tickets: one that is not signed here, is late or used, or reaches the wrong worker, is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PermissionDenied, Unauthenticated, Unavailable
from penstock.rpc.secret import ClusterSecret, ClusterSecrets
from penstock.rpc.ticket import SKEW_S, TicketKey, TicketVerifier, page_salt, time_left_s
from penstock.types import Epoch, WorkerId
from penstock.v1 import worker_pb2
from worker.ticket_log import TicketLog

SECRET = ClusterSecret("s" * 32)
SECRETS = ClusterSecrets.only(SECRET)
KEY = TicketKey(SECRET)
ISSUED_S = 1_700_000_000.0
LIFETIME_S = 5.0


def ticket(name: str = "a", **changes: object) -> worker_pb2.Ticket:
    made = worker_pb2.Ticket(
        id=name,
        router=7,
        worker_id="decode-0",
        epoch=3,
        issued_unix_ms=int(ISSUED_S * 1e3),
        lifetime_ms=int(LIFETIME_S * 1e3),
        timeout_ms=60_000,
        request_id="r",
        token_ids=range(20),
    )
    for field, value in changes.items():
        setattr(made, field, value)
    return made


def verifier(worker_id: str = "decode-0", epoch: int = 3) -> TicketVerifier:
    return TicketVerifier(WorkerId(worker_id), Epoch(epoch))


def test_a_verified_ticket_equals_the_signed_one() -> None:
    assert verifier().admit(KEY.sign(ticket()), SECRETS, ISSUED_S + 1) == (ticket(), SECRET)


SIGNED = KEY.sign(ticket())


@given(st.integers(0, len(SIGNED) - 1), st.integers(1, 255))
@settings(deadline=None)
def test_a_changed_byte_anywhere_is_refused(position: int, change: int) -> None:
    bad = bytearray(SIGNED)
    bad[position] ^= change
    with pytest.raises(Unauthenticated, match="not signed"):
        verifier().admit(bytes(bad), SECRETS, ISSUED_S)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Unauthenticated):
        verifier().admit(data, SECRETS, ISSUED_S)


@given(st.integers(0, len(SIGNED) - 1), st.binary(max_size=40))
@settings(deadline=None)
def test_truncated_and_extended_tickets_are_refused(cut: int, more: bytes) -> None:
    with pytest.raises(Unauthenticated):
        verifier().admit(SIGNED[:cut], SECRETS, ISSUED_S)
    with pytest.raises(Unauthenticated):
        verifier().admit(SIGNED + b"\0" + more, SECRETS, ISSUED_S)


def test_another_deployments_signature_is_refused() -> None:
    other = TicketKey(ClusterSecret("t" * 32)).sign(ticket())
    with pytest.raises(Unauthenticated):
        verifier().admit(other, SECRETS, ISSUED_S)


def test_while_a_secret_is_replaced_tickets_of_both_are_accepted() -> None:
    newer = ClusterSecret("t" * 32)
    both = ClusterSecrets(newer, (newer, SECRET))
    assert verifier().admit(SIGNED, both, ISSUED_S) == (ticket(), SECRET)
    assert verifier().admit(TicketKey(newer).sign(ticket()), both, ISSUED_S) == (ticket(), newer)
    with pytest.raises(Unauthenticated):
        verifier().admit(SIGNED, ClusterSecrets.only(newer), ISSUED_S)


@pytest.mark.parametrize("after_s", [-SKEW_S - 0.1, LIFETIME_S + SKEW_S + 0.1])
def test_a_ticket_outside_its_lifetime_is_refused(after_s: float) -> None:
    with pytest.raises(Unavailable, match="past its time"):
        verifier().admit(SIGNED, SECRETS, ISSUED_S + after_s)


@pytest.mark.parametrize("after_s", [-SKEW_S + 0.1, LIFETIME_S + SKEW_S - 0.1])
def test_clocks_may_differ_slightly(after_s: float) -> None:
    assert verifier().admit(SIGNED, SECRETS, ISSUED_S + after_s)[0].id == "a"


@pytest.mark.parametrize(("worker_id", "epoch"), [("decode-1", 3), ("decode-0", 4)])
def test_another_worker_or_epoch_refuses_a_ticket(worker_id: str, epoch: int) -> None:
    with pytest.raises(Unavailable, match="decode-0"):
        verifier(worker_id, epoch).admit(SIGNED, SECRETS, ISSUED_S)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.floats(0, 3)), max_size=40))
@settings(deadline=None)
def test_each_ticket_is_accepted_once_and_forgotten_when_it_expires(steps: list[tuple[str, float]]) -> None:
    gate, now_s, used = verifier(), ISSUED_S, set()
    for name, passed_s in steps:
        now_s += passed_s
        made = KEY.sign(ticket(name))
        if now_s > ISSUED_S + LIFETIME_S + SKEW_S:
            with pytest.raises(Unavailable):
                gate.admit(made, SECRETS, now_s)
        elif name in used:
            with pytest.raises(PermissionDenied, match="used before"):
                gate.admit(made, SECRETS, now_s)
        else:
            assert gate.admit(made, SECRETS, now_s)[0].id == name
            used.add(name)
    later_s = now_s + 100
    gate.admit(KEY.sign(ticket("later", issued_unix_ms=int(later_s * 1e3))), SECRETS, later_s)
    assert gate.num_remembered == 1


@given(st.floats(-1e6, 1e6))
def test_clock_skew_shifts_a_deadline_by_at_most_a_tickets_lifetime(skew_s: float) -> None:
    left_s = time_left_s(ticket(), ISSUED_S + skew_s)
    assert 60 - LIFETIME_S - SKEW_S <= left_s <= 60


def test_the_salt_is_not_in_the_ticket() -> None:
    signed = KEY.sign(ticket(cache_scope="tenant:acme", model_revision="r1"))
    assert page_salt(SECRET, "r1", "tenant:acme") not in signed
    assert page_salt(SECRET, "r1", "tenant:acme") != page_salt(SECRET, "r1", "tenant:other")


def test_a_router_gets_its_own_tickets_and_after_a_broken_call_all_of_them() -> None:
    now_s = [0.0]
    log = TicketLog(lambda: now_s[0])
    first, second, other = (worker_pb2.TicketState(id=name) for name in ("first", "second", "other"))
    log.update(1, first)
    log.update(2, other)
    log.update(1, second)
    states, seen = log.since(1, 0)
    assert [state.id for state in states] == ["first", "second"]
    assert log.since(1, seen) == ([], seen)
    first.started = True
    log.update(1, first)
    states, seen = log.since(1, seen)
    assert [(state.id, state.started) for state in states] == [("first", True)]
    assert [state.id for state in log.since(1, 0)[0]] == ["second", "first"]
    first.over = True
    log.update(1, first)
    now_s[0] = 60.0
    log.update(1, second)
    assert [state.id for state in log.since(1, 0)[0]] == ["second"]
    assert len(log) == 2


def test_ended_tickets_are_kept_up_to_a_bound_and_open_ones_always() -> None:
    log = TicketLog(lambda: 0.0, max_ended=10)
    for number in range(5):
        log.update(7, worker_pb2.TicketState(id=f"open-{number}"))
    for number in range(1000):
        state = worker_pb2.TicketState(id=f"t-{number}")
        log.update(8 + number % 3, state)
        state.over = True
        log.update(8 + number % 3, state)
    assert len(log) == 15
    assert [state.id for state in log.since(7, 0)[0]] == [f"open-{number}" for number in range(5)]
    kept = {state.id for router in (8, 9, 10) for state in log.since(router, 0)[0]}
    assert kept == {f"t-{number}" for number in range(990, 1000)}
