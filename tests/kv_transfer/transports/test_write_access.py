"""Tests when an epoch can no longer write into a pool: never after time alone, but certainly after each proof."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import PageRows
from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.send.sender import TransferSender
from kv_transfer.session.handshake import parse_offer
from kv_transfer.transports import nixl_agent
from kv_transfer.transports.channel import Channel
from kv_transfer.transports.mapped.link import MappedLink
from kv_transfer.transports.nixl import NixlReceiver
from kv_transfer.transports.peer_channels import WritesEnd
from kv_transfer.transports.transport import ALL_LAYERS, Arrival, LayerGroup, Peer
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey
from tests.support.transfer.transfer_child import Child, children, make_source, make_target
from tests.support.transfer.transfer_pair import PREFILL, WAIT_S, Log, config, key, receiver, sender

ONE_SIDED = ["shm", *nixl_agent.is_installed() * ["nixl"]]
TRANSPORTS = [*ONE_SIDED, "torch"]
SENDER = Epoch(1)
NUM_PAGES, PAGE_BYTES = 8, 4096


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def run(
    origin: TransferSender, to: TransferReceiver, moving: TransferKey, log: Log, offer: bytes
) -> list[TransferError]:
    """Moves page 1 to page 2; returns the transfer's errors."""
    to.open(moving, [PageId(2)])
    origin.open(moving, offer)
    origin.push(moving, 0, [PageId(1)], [PageId(2)])
    origin.finish(moving)
    log.wait(lambda: moving in log.done)
    to.close(moving)
    return [error for failed, error in log.failed if failed == moving]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_never_connected_cannot_write_after_it_is_forgotten(transport: str) -> None:
    """A sender frozen since its offer was made wakes up, and can connect only over the two-sided transport."""
    source, target, log = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES), Log()
    to, origin = receiver(target, Log(), config("auto")), sender(source, log, config(transport))
    try:
        offer = to.offer(PREFILL, SENDER)
        assert to.cut_off(SENDER)
        errors = run(origin, to, key(1), log, offer)
        assert bool(errors) == (transport != "torch")
        assert torch.equal(target[2], source[1]) == (transport == "torch")
        assert to.cut_off(SENDER)
        assert [name for name, _ in parse_offer(to.offer(PREFILL, SENDER)).transports] == ["torch"]
        assert to.cut_off(SENDER)
        assert len(parse_offer(to.offer(PREFILL, Epoch(5))).transports) == len(TRANSPORTS)  # another epoch
    finally:
        origin.shutdown()
        to.shutdown()


def test_if_only_a_one_sided_transport_is_configured_the_offer_is_an_error() -> None:
    to = receiver(make_target(NUM_PAGES, PAGE_BYTES), Log(), config("shm"))
    try:
        to.cut_off(SENDER)
        with pytest.raises(TransferError, match=r"was silent and is cut off; .* 'shm'; restart prefill-0"):
            to.offer(PREFILL, SENDER)
    finally:
        to.shutdown()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_connected_peer_can_write_until_it_closes_its_link(transport: str) -> None:
    source, target, log = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES), Log()
    to, origin = receiver(target, Log(), config(transport)), sender(source, log, config(transport))
    try:
        assert run(origin, to, key(1), log, to.offer(PREFILL, SENDER)) == []
        is_two_sided = transport == "torch"
        assert to.cut_off(SENDER) == is_two_sided
        origin.shutdown()
        until(lambda: to.cut_off(SENDER))
    finally:
        origin.shutdown()
        to.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize("transport", ONE_SIDED)
def test_a_frozen_peer_can_write_even_if_forgotten_but_a_killed_one_cannot(transport: str) -> None:
    target = make_target(NUM_PAGES, PAGE_BYTES)
    to = receiver(target, Log(), config(transport))
    try:
        with children(Child("sender", transport, 1, NUM_PAGES, PAGE_BYTES)) as (child,):
            to.open(key(1), [PageId(2)])
            push = (0, [PageId(1)], [PageId(2)])
            assert child.call("run", key(1), to.offer(PREFILL, SENDER), [push]) == []
            child.signal(signal.SIGSTOP)
            assert not to.cut_off(SENDER)
            to.forget(SENDER)
            assert not to.tear_down(SENDER), "only its own end proves that a process of this host writes no more"
            child.kill()
            until(lambda: to.cut_off(SENDER))
    finally:
        to.shutdown()


@pytest.mark.parametrize("transport", ONE_SIDED)
def test_a_forgotten_peer_ends_its_link_itself(transport: str) -> None:
    """The receiver hangs up; a live sender notices, stops and closes, which proves the end without its death."""
    source, target, log = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES), Log()
    to, origin = receiver(target, Log(), config(transport)), sender(source, log, config(transport))
    try:
        assert run(origin, to, key(1), log, to.offer(PREFILL, SENDER)) == []
        assert not to.cut_off(SENDER)
        to.forget(SENDER)
        until(lambda: to.cut_off(SENDER))
    finally:
        origin.shutdown()
        to.shutdown()


class SlowPool:
    """Implements `link.MappedPool`; a write lasts until the test ends it."""

    num_pages = NUM_PAGES

    def __init__(self) -> None:
        self.writing, self.may_end = threading.Event(), threading.Event()

    def write(
        self,
        source: PageBuffer,
        src_pages: object,
        dst_pages: object,
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None:
        self.writing.set()
        assert self.may_end.wait(WAIT_S)

    def close(self) -> None: ...


class WatchedChannel(Channel):
    """Stands in for a channel whose other end has gone, and records when it is closed."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()
        self.hung_up = threading.Event()

    def receive(self) -> list[object]:
        assert self.hung_up.wait(WAIT_S)
        raise TransferError("the peer closed the connection")

    def send(self, frame: list[object]) -> None: ...

    def has_room(self) -> bool:
        return False  # makes the copying thread copy

    def close(self) -> None:
        self.is_closed.set()


def test_a_link_closes_its_channel_only_after_the_copy_in_progress() -> None:
    pool, channel = SlowPool(), WatchedChannel()
    link = MappedLink("shm", PageBuffer(torch.zeros(NUM_PAGES, PAGE_BYTES)), pool, channel, lambda: None)
    link.push(Arrival(key(1), 0, 1), [PageId(1)], [PageId(2)])
    assert pool.writing.wait(WAIT_S)
    channel.hung_up.set()
    closing = threading.Thread(target=link.close)
    closing.start()
    until(lambda: _has_failed(link))
    assert not channel.is_closed.is_set(), "the receiver would take the copy in progress as over"
    pool.may_end.set()
    assert channel.is_closed.wait(WAIT_S)
    closing.join(WAIT_S)


def _has_failed(link: MappedLink) -> bool:
    try:
        link.check()
    except TransferError:
        return True
    return False


@pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")
def test_over_rdma_only_withdrawn_memory_is_a_proof_and_live_peers_reconnect() -> None:
    """There is no RDMA here; the receiver treats its CMA links as if they crossed machines."""
    source, target, log = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES), Log()
    to = receiver(target, Log(), config("nixl"))
    (transport,) = to._transports
    assert isinstance(transport, NixlReceiver)
    transport._agent.uses_rdma = True
    transport._channels._writes_end = WritesEnd.WITH_MEMORY
    others = Log()
    dead, alive = sender(source, others, config("nixl"), epoch=3), sender(source, log, config("nixl"))
    try:
        before = transport._agent.name
        assert run(alive, to, key(1), log, to.offer(PREFILL, SENDER)) == []
        assert run(dead, to, key(2, sender_epoch=3), others, to.offer(PREFILL, Epoch(3))) == []
        dead.shutdown()  # its channel ends, as it may when a network breaks
        until(lambda: len(transport._channels._held) == 1)
        assert not to.cut_off(Epoch(3))
        assert to.tear_down(Epoch(3))
        assert transport._agent.name != before
        transport._agent.uses_rdma = True
        target.zero_()
        numbers = itertools.count(10)  # transfers until its link has noticed
        until(lambda: run(alive, to, key(next(numbers)), log, to.offer(PREFILL, SENDER)) == [])
        assert torch.equal(target[2], source[1])
    finally:
        dead.shutdown()
        alive.shutdown()
        to.shutdown()


# Forgetting a peer while its pages land.


def test_pages_that_land_after_their_sender_was_forgotten_reach_their_place_or_fail() -> None:
    """The rows belong to the connection, so a forgotten peer's pages are never taken for whole pages."""
    target = make_target(NUM_PAGES, PAGE_BYTES)
    end = receiver(target, Log(), config("torch"))
    try:
        rows, whole = PageRows(2, (1,)), PageBuffer(torch.ones(1, PAGE_BYTES, dtype=torch.uint8))
        half = PageBuffer(torch.ones(1, PAGE_BYTES // 2, dtype=torch.uint8))
        end.offer(PREFILL, SENDER)
        end.open(key(1), [PageId(2)])
        end.forget(SENDER)
        with pytest.raises(TransferError, match="epoch 1 is not known here, or was forgotten"):
            end.rows_of(Peer(PREFILL, SENDER))
        for staged, part in ((half, PageRows(1, (0,))), (whole, rows)):
            with pytest.raises(TransferError, match="staged pages of"):
                end.land(Arrival(key(1), 0, 1), staged, part)
        with pytest.raises(TransferError, match="1 staged pages of 2048 bytes; want 2 of 2048"):
            end.land(Arrival(key(1), 0, 2), half, rows)
        assert not target.any()
        if end.land(Arrival(key(1), 0, 1), half, rows):  # unless the transfer has already failed
            assert not target[2, : PAGE_BYTES // 2].any()
            assert target[2, PAGE_BYTES // 2 :].all()
        target[2] = 0
        assert not target.any()
    finally:
        end.shutdown()


def test_concurrent_landing_and_forgetting_raises_nothing_and_writes_nothing_elsewhere() -> None:
    target = make_target(NUM_PAGES, PAGE_BYTES)
    end = receiver(target, Log(), config("torch"))
    half, rows = PageBuffer(torch.ones(1, PAGE_BYTES // 2, dtype=torch.uint8)), PageRows(2, (1,))
    try:
        for number in range(50):
            end.offer(PREFILL, SENDER)
            end.open(key(number), [PageId(2)])
            forgetting = threading.Thread(target=end.forget, args=(SENDER,))
            forgetting.start()
            end.land(Arrival(key(number), 0, 1), half, rows)
            forgetting.join(WAIT_S)
            end.close(key(number))
            assert not target[2, : PAGE_BYTES // 2].any()
            target[2] = 0
            assert not target.any()
    finally:
        end.shutdown()
