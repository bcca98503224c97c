"""Tests how long a receiver polls for peers on transports that need polling."""

from __future__ import annotations

from kv_transfer.receive.known_peers import KnownPeers
from kv_transfer.transports.transport import Peer
from penstock.types import Epoch, WorkerId

PEER = Peer(WorkerId("p"), Epoch(7))


def known() -> KnownPeers:
    peers = KnownPeers()
    peers.admit(PEER, None)
    return peers


def test_a_peer_is_expected_until_it_connects_or_times_out() -> None:
    peers = known()
    peers.expect(PEER.epoch, 10.0)
    assert peers.any_expected(9.0)
    assert not peers.any_expected(10.0)
    peers.expect(PEER.epoch, 20.0)
    peers.has_come(PEER.epoch)
    assert not peers.any_expected(11.0)


def test_a_peer_that_announces_pages_is_not_polled_for_until_its_connection_ends() -> None:
    peers = known()
    peers.expect(PEER.epoch, 10.0)
    peers.has_announced(PEER.epoch)
    assert peers.announces(PEER.epoch)
    peers.expect(PEER.epoch, 20.0)  # the next offer
    assert not peers.any_expected(1.0)
    peers.has_left(PEER.epoch, 15.0)  # it may return over any transport
    assert not peers.announces(PEER.epoch)
    assert peers.any_expected(14.0)


def test_a_forgotten_peer_is_not_expected() -> None:
    peers = known()
    peers.has_announced(PEER.epoch)
    peers.forget(PEER)
    assert not peers.announces(PEER.epoch)
    peers.has_left(PEER.epoch, 10.0)
    peers.has_announced(PEER.epoch)
    assert not peers.any_expected(1.0)
    assert not peers.announces(PEER.epoch)
