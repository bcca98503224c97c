"""Tests the receiver's state machine with duplicates, reordering, late events, aborts and deaths at any point."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.session.lease import Lease
from kv_transfer.session.transfer_session import ENDED, Effect, Manifest, Phase, TransferSession
from penstock.types import PageId
from tests.support.suite.examples import examples
from tests.support.transfer.transfer_pair import key

LEASE_S = 10.0


def session(num_pages: int = 2) -> TransferSession:
    made = TransferSession(key(1), Lease(LEASE_S, 0.0))
    assert made.on_reserved([PageId(page) for page in range(num_pages)], now_s=0.0) == ()
    return made


def manifest(num_pages: int = 2) -> Manifest:
    return Manifest(num_tokens=16 * num_pages, num_pages=num_pages, page_hashes=())


def test_an_undisturbed_session_passes_through_every_phase() -> None:
    life = session()
    assert life.on_arrival(1, 1, 1.0) == ()
    assert life.phase is Phase.STREAMING
    assert life.on_manifest(manifest()) == ()
    assert life.fenced
    assert life.on_arrival(0, 1, 2.0) == (Effect.VERIFY, Effect.LIFT)
    assert not life.fenced
    assert life.on_verified(True) == ()
    assert life.on_admitted() == ()
    assert life.on_closed() == (Effect.CLOSE,)
    assert life.releasable


def test_pages_that_do_not_match_are_not_admitted() -> None:
    life = session(1)
    life.on_manifest(manifest(1))
    life.on_arrival(0, 1, 1.0)
    assert life.on_verified(False) == (Effect.CANCEL,)
    assert life.on_admitted() == ()
    assert life.phase is Phase.ABORTED
    assert life.on_closed() == (Effect.CLOSE,)


def test_a_frozen_sender_keeps_the_fence_forever() -> None:
    life = session()
    assert life.expire(LEASE_S - 0.1) == ()
    assert life.expire(LEASE_S) == (Effect.CANCEL,)
    assert life.expire(1e9) == ()
    assert life.fenced
    assert not life.releasable
    assert life.on_sender_dead() == (Effect.CLOSE, Effect.LIFT)


def test_a_late_heartbeat_does_not_shorten_the_lease() -> None:
    lease = Lease(LEASE_S, 5.0)
    lease.renew(3.0)
    assert lease.deadline_s == 5.0 + LEASE_S


def test_a_heartbeat_extends_the_lease_until_the_sender_has_closed() -> None:
    life = session()
    life.on_heartbeat(LEASE_S - 1)
    assert life.expire(LEASE_S) == ()
    assert life.deadline_s == 2 * LEASE_S - 1
    assert life.on_closed() == ()
    life.on_heartbeat(LEASE_S)
    assert life.expire(2 * LEASE_S - 1) == (Effect.CLOSE, Effect.LIFT)
    assert life.phase is Phase.EXPIRED
    assert life.deadline_s is None


def test_a_sender_that_never_starts_loses_its_lease() -> None:
    life = TransferSession(key(1), Lease(LEASE_S, 5.0))
    assert life.expire(LEASE_S) == ()
    assert life.expire(LEASE_S + 5.0) == (Effect.CANCEL,)
    assert life.on_reserved([PageId(1)], LEASE_S + 5.0) == ()
    assert not life.fenced


def test_arrivals_in_flight_when_the_sender_closes_still_count() -> None:
    life = session(1)
    life.on_manifest(manifest(1))
    assert life.on_closed() == ()
    assert life.on_arrival(0, 1, 1.0) == (Effect.VERIFY, Effect.LIFT)


def test_pages_that_the_manifest_leaves_out_are_not_awaited() -> None:
    life = session(3)
    assert life.on_arrival(0, 1, 1.0) == ()
    assert life.num_landed == 1
    assert life.on_manifest(manifest(1)) == (Effect.VERIFY, Effect.LIFT)
    assert life.on_verified(True) == ()
    assert life.on_admitted() == ()
    assert life.on_closed() == (Effect.CLOSE,)


def test_the_first_manifest_after_the_reservation_counts() -> None:
    life = TransferSession(key(1), Lease(LEASE_S, 0.0))
    life.on_manifest(manifest(1))  # empty, because no page is reserved for it
    life.on_reserved([PageId(page) for page in range(3)], 0.0)
    assert life.on_arrival(0, 1, 1.0) == ()
    life.on_manifest(manifest(2))
    life.on_manifest(manifest(1))
    assert life.phase is Phase.STREAMING
    assert life.manifest == manifest(2)


def test_a_repeated_arrival_does_not_extend_the_lease() -> None:
    life = session(2)
    life.on_arrival(0, 1, 1.0)
    life.on_arrival(0, 1, 5.0)
    assert life.deadline_s == LEASE_S + 1.0


def test_pages_are_admitted_only_once_they_are_verified() -> None:
    life = session(1)
    life.on_manifest(manifest(1))
    life.on_arrival(0, 1, 1.0)
    assert life.on_admitted() == ()
    assert life.phase is Phase.LANDED


def test_a_transfer_without_pages_has_no_fence() -> None:
    life = TransferSession(key(1), Lease(LEASE_S, 0.0))
    assert life.on_abort() == (Effect.CANCEL,)
    assert life.on_reserved([PageId(1)], 0.0) == ()
    assert life.pages == ()
    assert life.on_closed() == (Effect.CLOSE,)


class Transfer(RuleBasedStateMachine):
    """Models an owner, a sender that writes each page at most once, and a transport that repeats and reorders
    notices."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.session = TransferSession(key(1), Lease(LEASE_S, 0.0))
        self.last_sign_s = 0.0  # the last sign of life from the sender, while it can give one
        self.effects: list[Effect] = []
        self.num_pages = 0
        self.unwritten: set[int] = set()  # pages that the sender may still write
        self.noticed: list[int] = []  # written pages, whose notices may arrive at any time, any number of times
        self.delivered: set[int] = set()
        self.sender_alive = True
        self.sender_closed = False
        self.manifest_sent = False
        self.reserved = self.expired = False
        self.left_out = 0  # pages at the end that the manifest omits and the sender does not write

    def seen(self, effects: tuple[Effect, ...]) -> None:
        assert list(effects) == sorted(effects, key=list(Effect).index)
        for effect in effects:
            assert effect not in self.effects, f"{effect} twice"
            self.effects.append(effect)
            if effect is Effect.VERIFY:
                assert self.delivered >= set(range(self.num_pages - self.left_out))
                assert self.manifest_sent
            if effect is Effect.LIFT:
                assert self.num_pages
                assert not self.unwritten, "the fence was lifted while a page could still be written"
            if effect is Effect.CLOSE:
                assert not self.unwritten
                assert self.session.phase in ENDED

    @initialize(num_pages=st.integers(0, 4))
    def offer(self, num_pages: int) -> None:
        self.wanted = num_pages

    @rule()
    def reserve(self) -> None:
        granted = self.session.phase is Phase.OFFERED and not self.session.sender_over
        self.seen(self.session.on_reserved([PageId(n) for n in range(self.wanted)], self.now_s))
        if granted:
            self.reserved = True
            self.last_sign_s = self.now_s
            self.num_pages = self.wanted
            self.unwritten = set(range(self.wanted))

    @precondition(lambda self: self.unwritten)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.unwritten)))
        assert self.session.fenced, "an unfenced page is written"
        self.unwritten.remove(page)
        self.noticed.append(page)

    @precondition(lambda self: self.noticed)
    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.noticed))
        if self.reserved and page not in self.delivered:
            self.last_sign_s = self.now_s
        self.delivered.add(page)
        self.seen(self.session.on_arrival(page, 1, self.now_s))

    @rule(first=st.integers(5, 9))
    def notice_out_of_range(self, first: int) -> None:
        self.seen(self.session.on_arrival(first, 3, self.now_s))

    @rule(left_out=st.integers(0, 4))
    def send_manifest(self, left_out: int) -> None:
        if self.reserved and not self.manifest_sent:
            ends = [page for page in range(self.num_pages) if page not in self.unwritten]
            self.left_out = min(left_out, self.num_pages - 1 - max(ends, default=-1))
            self.unwritten -= set(range(self.num_pages - self.left_out, self.num_pages))
            self.manifest_sent = True
        self.seen(self.session.on_manifest(manifest(self.num_pages - self.left_out)))

    @rule(matches=st.booleans())
    def verify(self, matches: bool) -> None:
        self.seen(self.session.on_verified(matches))

    @rule()
    def admit(self) -> None:
        verified = self.session.phase is Phase.VERIFIED
        self.seen(self.session.on_admitted())
        assert not verified or self.session.phase is Phase.ADMITTED

    @rule()
    def abort(self) -> None:
        self.seen(self.session.on_abort())

    @rule(passes_s=st.floats(0, 2 * LEASE_S))
    def time_passes(self, passes_s: float) -> None:
        self.now_s += passes_s
        waits = self.session.deadline_s is not None
        self.seen(self.session.expire(self.now_s))
        if waits:
            assert (self.session.phase is Phase.EXPIRED) == (self.now_s - self.last_sign_s >= LEASE_S)
        else:
            assert self.session.phase is not Phase.EXPIRED or self.expired
        self.expired = self.session.phase is Phase.EXPIRED

    @rule()
    def heartbeat(self) -> None:
        before = self.session.deadline_s
        self.session.on_heartbeat(self.now_s)
        if self.sender_alive and not self.sender_closed:
            self.last_sign_s = self.now_s
        else:
            assert self.session.deadline_s == before

    @rule()
    def close(self) -> None:
        self.unwritten = set()
        self.sender_closed = True
        self.seen(self.session.on_closed())

    @rule()
    def die(self) -> None:
        self.unwritten = set()
        self.sender_alive = False
        self.seen(self.session.on_sender_dead())

    @invariant()
    def only_verified_pages_are_admitted(self) -> None:
        if self.session.phase is Phase.ADMITTED:
            assert Effect.VERIFY in self.effects

    @invariant()
    def time_alone_lifts_no_fence(self) -> None:
        to_come = set(range(self.num_pages - self.left_out))
        if self.sender_alive and not self.sender_closed and not self.delivered >= to_come:
            assert not {Effect.LIFT, Effect.CLOSE} & set(self.effects)

    def teardown(self) -> None:
        """Ends the request and the sender; the session must then be releasable."""
        self.unwritten = set()
        self.seen(self.session.on_abort())
        self.seen(self.session.on_closed())
        assert self.session.releasable
        assert not self.session.fenced
        assert (Effect.LIFT in self.effects) == bool(self.num_pages)


Transfer.TestCase.settings = examples(75, stateful_step_count=25)
TestTransfer = Transfer.TestCase
