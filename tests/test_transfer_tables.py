"""What a receiver keeps under its lock, as plain tables: open transfers, peers, who waits for quiet."""

from __future__ import annotations

import math

import pytest

from kv_transfer.open_transfers import OpenTransfers
from kv_transfer.peers import Peers
from kv_transfer.quiet import QUIET_LOOK_S, QUIET_LOOKS, Quiet
from kv_transfer.transport import Arrival, Peer
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferId, TransferKey, WorkerId

KEY = TransferKey(TransferId("t"), Epoch(1), Epoch(2))
PAGES = [PageId(4), PageId(5), PageId(6)]


def test_a_transfer_stalls_while_pages_are_missing_and_fails_once() -> None:
    table = OpenTransfers()
    table.open(KEY, PAGES, 10.0, 0.0)
    table.arrive(Arrival(KEY, 0, 2), 5.0)
    assert (table.next_due_s(), table.last_progress_s()) == (15.0, 5.0)
    assert table.stalled(14.9) == []
    (incoming,) = table.stalled(15.0)
    assert table.fail(incoming)
    assert not table.fail(incoming)
    assert (table.stalled(99.0), table.find(Arrival(KEY, 2, 1)), len(table)) == ([], None, 1)


def test_one_that_has_landed_or_is_closed_does_not_fail() -> None:
    table = OpenTransfers()
    table.open(KEY, PAGES, 10.0, 0.0)
    (incoming,) = table.waiting_for(Epoch(1))
    assert table.waiting_for(Epoch(3)) == []
    table.arrive(Arrival(KEY, 0, 3), 1.0)
    assert not table.fail(incoming)
    assert (table.next_due_s(), table.last_progress_s()) == (math.inf, None)
    assert table.close(KEY) is incoming
    table.open(KEY, PAGES, 10.0, 0.0)
    assert not table.fail(incoming), "its key is another transfer's"


def test_pages_that_a_transfer_does_not_have_are_nobodys() -> None:
    table = OpenTransfers()
    table.open(KEY, PAGES, 10.0, 0.0)
    assert table.find(Arrival(KEY, 2, 2)) is None
    table.arrive(Arrival(KEY, 2, 2), 5.0)
    incoming = table.find(Arrival(KEY, 1, 2))
    assert incoming is not None
    assert (incoming.missing, incoming.last_progress_s) == ({0, 1, 2}, 0.0)
    incoming.land([1], 6.0)
    assert incoming.fresh(Arrival(KEY, 0, 3)) == [0, 2]


def test_a_newer_incarnation_takes_the_place_of_its_elder() -> None:
    peers, worker = Peers(), WorkerId("p")
    assert peers.admit(Peer(worker, Epoch(1)), range(2)) is None
    assert peers.admit(Peer(worker, Epoch(1)), None) is None
    elder = peers.admit(Peer(worker, Epoch(2)), None)
    assert elder == Peer(worker, Epoch(1))
    assert (peers.heads_of(Epoch(1)), peers.heads_of(Epoch(2))) == (range(2), None)
    peers.forget(elder)
    assert peers.heads_of(Epoch(1)) is None
    with pytest.raises(TransferError, match="epoch 1 is past, 2 has come since"):
        peers.admit(Peer(worker, Epoch(1)), None)


def test_peers_are_expected_until_they_come_or_their_time_is_up() -> None:
    peers = Peers()
    peers.expect(Epoch(1), 5.0)
    peers.expect(Epoch(2), 9.0)
    peers.has_come(Epoch(2))
    assert peers.any_expected(4.0)
    assert not peers.any_expected(5.0)


def test_it_is_quiet_after_enough_looks_in_a_row_that_find_nothing() -> None:
    quiet, now_s = Quiet(), 0.0
    called: list[str] = []
    quiet.wait(lambda: called.append("first"), now_s)
    assert not quiet.is_due(now_s)
    for look in range(2 * QUIET_LOOKS):
        now_s += QUIET_LOOK_S
        assert quiet.is_due(now_s)
        for then in quiet.look(look != QUIET_LOOKS - 2, now_s):  # something unread shortly before the end
            then()
        assert not quiet.is_due(now_s)
        if look == 2 * QUIET_LOOKS - 3:
            assert called == []
            quiet.wait(lambda: called.append("second"), now_s)
        if called:
            break
    assert (look, called, len(quiet)) == (2 * QUIET_LOOKS - 2, ["first"], 1)
