"""Tests the tables that a receiver keeps under its lock: open transfers and known peers."""

from __future__ import annotations

import math

import pytest

from kv_transfer.receive.arrival_table import ArrivalTable
from kv_transfer.receive.known_peers import KnownPeers
from kv_transfer.transports.transport import Arrival, Peer
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferId, TransferKey, WorkerId

KEY = TransferKey(TransferId("t"), Epoch(1), Epoch(2))
PAGES = [PageId(4), PageId(5), PageId(6)]


def test_a_transfer_stalls_while_pages_are_missing_and_fails_once() -> None:
    table = ArrivalTable()
    table.open(KEY, PAGES, 10.0, 0.0)
    table.arrive(Arrival(KEY, 0, 2), 5.0)
    assert (table.next_due_s(), table.last_progress_s()) == (15.0, 5.0)
    assert table.stalled(14.9) == []
    (incoming,) = table.stalled(15.0)
    assert table.fail(incoming)
    assert not table.fail(incoming)
    assert (table.stalled(99.0), table.find(Arrival(KEY, 2, 1)), len(table)) == ([], None, 1)


def test_a_landed_or_closed_transfer_does_not_fail() -> None:
    table = ArrivalTable()
    table.open(KEY, PAGES, 10.0, 0.0)
    (incoming,) = table.waiting_for(Epoch(1))
    assert table.waiting_for(Epoch(3)) == []
    table.arrive(Arrival(KEY, 0, 3), 1.0)
    assert not table.fail(incoming)
    assert (table.next_due_s(), table.last_progress_s()) == (math.inf, None)
    assert table.close(KEY) is incoming
    table.open(KEY, PAGES, 10.0, 0.0)
    assert not table.fail(incoming), "its key belongs to another transfer"


def test_pages_outside_a_transfer_are_ignored() -> None:
    table = ArrivalTable()
    table.open(KEY, PAGES, 10.0, 0.0)
    assert table.find(Arrival(KEY, 2, 2)) is None
    table.arrive(Arrival(KEY, 2, 2), 5.0)
    incoming = table.find(Arrival(KEY, 1, 2))
    assert incoming is not None
    assert (incoming.missing, incoming.last_progress_s) == ({0, 1, 2}, 0.0)
    incoming.land([1], 6.0)
    assert incoming.fresh(Arrival(KEY, 0, 3)) == [0, 2]


def test_earlier_epochs_of_a_worker_stay_known_whatever_their_order() -> None:
    """A worker whose clock stepped back, or whose epochs are random, is admitted like any other."""
    peers, worker = KnownPeers(), WorkerId("p")
    for epoch in (9, 3, 5, 1, 9, 3):
        assert peers.admit(Peer(worker, Epoch(epoch)), range(epoch)) is None
    assert peers.admit(Peer(WorkerId("q"), Epoch(2)), None) is None
    gone = peers.admit(Peer(worker, Epoch(4)), None)
    assert gone == Peer(worker, Epoch(5)), "the one that was offered to least recently gives way"
    peers.forget(gone)
    assert [peers.find(Epoch(epoch)) for epoch in (5, 9, 2)] == [
        None,
        Peer(worker, Epoch(9)),
        Peer(WorkerId("q"), Epoch(2)),
    ]
    assert (peers.heads_of(Epoch(9)), peers.heads_of(Epoch(2))) == (range(9), None)


def test_asking_for_the_heads_of_a_forgotten_peer_is_an_error() -> None:
    peers = KnownPeers()
    peer = Peer(WorkerId("p"), Epoch(1))
    peers.admit(peer, range(2))
    with pytest.raises(TransferError, match=r"epoch 1 sends heads range\(0, 2\), it cannot send None too"):
        peers.admit(peer, None)
    peers.forget(peer)
    with pytest.raises(TransferError, match="epoch 1 is not known here, or was forgotten"):
        peers.heads_of(Epoch(1))


def test_peers_are_expected_until_they_connect_or_time_out() -> None:
    peers = KnownPeers()
    peers.expect(Epoch(1), 5.0)
    peers.expect(Epoch(2), 9.0)
    peers.has_come(Epoch(2))
    assert peers.any_expected(4.0)
    assert not peers.any_expected(5.0)
