"""Tests a sender and a receiver in one process over each transport: bytes, order, refusals, aborts and fallback."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from engine.cache.pool_memory import allocate_pool
from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.send.sender import TransferSender
from kv_transfer.session.handshake import parse_offer
from kv_transfer.transports import nixl_agent
from kv_transfer.transports.nixl import NixlReceiver
from kv_transfer.transports.torch_dist import TorchReceiver, TorchSender
from kv_transfer.transports.transport import ALL_LAYERS, Details, LayerGroup
from penstock.errors import ConfigError, TransferError, TransferRefused
from penstock.types import Epoch, PageId
from tests.support.transfer import cuda_double
from tests.support.transfer.transfer_pair import PREFILL, Log, config, key, receiver, sender

NUM_PAGES = 48
TRANSPORTS = [
    "shm",
    "cuda_ipc",  # with a double for the driver
    "torch",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")),
]


def make_pools(transport: str = "shm") -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a source with random bytes and an empty target, both [P, L, 2, K, S, H] in bf16."""
    torch.manual_seed(0)
    source = torch.randint(-(2**15), 2**15, (NUM_PAGES, 2, 2, 3, 4, 8), dtype=torch.int16).view(torch.bfloat16)
    if transport != "cuda_ipc":
        return source, allocate_pool(source.shape, source.dtype, source.device)
    return cuda_double.allocate(source.shape, source.dtype).copy_(source), cuda_double.allocate(
        source.shape, source.dtype
    )


@dataclass
class Pair:
    source: torch.Tensor
    target: torch.Tensor
    receiver: TransferReceiver
    sender: TransferSender
    arrivals: Log
    pushes: Log

    def offer(self) -> bytes:
        return self.receiver.offer(PREFILL, Epoch(1))


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    source, target = make_pools(request.param)
    arrivals, pushes = Log(), Log()
    settings = config(request.param)
    with pytest.MonkeyPatch.context() as patch:
        cuda_double.install(patch)
        pair = Pair(
            source, target, receiver(target, arrivals, settings), sender(source, pushes, settings), arrivals, pushes
        )
        yield pair
        pair.sender.shutdown()
        pair.receiver.shutdown()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    shared_pair.target.zero_()
    for log in (shared_pair.arrivals, shared_pair.pushes):
        log.landed.clear(), log.done.clear(), log.failed.clear()
    return shared_pair


def pages(numbers: list[int]) -> list[PageId]:
    return [PageId(number) for number in numbers]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def test_interleaved_transfers_of_scattered_pages_are_exact(pair: Pair) -> None:
    rng = random.Random(7)
    offer = pair.offer()
    taken_src, taken_dst = rng.sample(range(NUM_PAGES), NUM_PAGES), rng.sample(range(NUM_PAGES), NUM_PAGES)
    pushes: dict[int, list[int]] = {number: list(range(8)) for number in range(6)}  # transfer -> remaining indexes
    for number in pushes:
        pair.receiver.open(key(number), pages(taken_dst[number * 8 : number * 8 + 8]))
        pair.sender.open(key(number), offer)
    while pushes:
        number = rng.choice(list(pushes))
        count = rng.randint(1, len(pushes[number]))
        indexes, pushes[number] = pushes[number][:count], pushes[number][count:]
        at = [number * 8 + index for index in indexes]
        src, dst = pages([taken_src[i] for i in at]), pages([taken_dst[i] for i in at])
        pair.sender.push(key(number), indexes[0], src, dst)
        if not pushes[number]:
            pair.sender.finish(key(number))
            del pushes[number]
    pair.pushes.wait(lambda: len(pair.pushes.done) == 6)
    pair.arrivals.wait(lambda: all(len(pair.arrivals.landed.get(key(n), ())) == 8 for n in range(6)))
    assert same_bits(pair.target[taken_dst], pair.source[taken_src])
    assert pair.pushes.failed == []
    assert pair.arrivals.failed == []
    for number in range(6):
        assert not pair.sender.is_open(key(number))
        pair.receiver.close(key(number))


@pytest.mark.parametrize("num_groups", [2, 3])
def test_pages_sent_by_layers_are_announced_with_their_last_layers(pair: Pair, num_groups: int) -> None:
    moving = key(15 + num_groups)
    src, dst = pages([5, 1, 40, 7]), pages([2, 47, 3, 0])
    sent = pair.sender.stats.num_pages
    pair.receiver.open(moving, dst)
    pair.sender.open(moving, pair.offer())
    pair.sender.push_tokens(moving, 0, range(1), src, dst[:1])
    pair.arrivals.wait(lambda: pair.arrivals.landed.get(moving) == {0})  # the link exists
    assert pair.sender.num_layer_groups(moving) == 1  # a single layer cannot be split
    direct = pair.sender.transports[0] in ("shm", "cuda_ipc")
    for number in range(num_groups if direct else 1):
        assert pair.arrivals.landed[moving] == {0}
        part = LayerGroup(number, num_groups) if direct else ALL_LAYERS
        pair.sender.push_tokens(moving, 1, range(1, 4), src, dst[1:], part)
    pair.sender.finish(moving)
    pair.pushes.wait(lambda: pair.pushes.done == [moving])
    pair.arrivals.wait(lambda: pair.arrivals.landed[moving] == {0, 1, 2, 3})
    assert same_bits(pair.target[dst], pair.source[src])
    assert not pair.target[sorted(set(range(NUM_PAGES)) - set(dst))].any()
    assert pair.pushes.failed == []
    assert pair.sender.stats.num_pages == sent + 4  # a page counts once
    pair.receiver.close(moving)


def test_a_transfer_without_pushes_is_done_when_finished(pair: Pair) -> None:
    pair.sender.open(key(20), pair.offer())
    assert pair.sender.is_open(key(20))
    pair.sender.finish(key(20))
    pair.pushes.wait(lambda: pair.pushes.done == [key(20)])
    assert pair.pushes.failed == []


def test_connecting_needs_no_open_transfer() -> None:
    """A prefill worker connects at the first request; the receiver opens the transfer when the prefill starts."""
    for transport in nixl_agent.is_installed() * ["nixl"] + ["shm", "torch"]:
        source, target = make_pools()
        arrivals, pushes, settings = Log(), Log(), config(transport, connect_timeout_s=60.0)
        to, origin = receiver(target, arrivals, settings), sender(source, pushes, settings)
        try:
            for number in range(2):
                origin.open(key(number), to.offer(PREFILL, Epoch(1)))
                origin.finish(key(number))
                pushes.wait(lambda: len(pushes.done) == number + 1)  # noqa: B023
            deadline_s = time.monotonic() + 50.0  # below the timeout of a connection
            while not origin.stats.num_connects:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert to.stats.num_late_arrivals == 0
        finally:
            origin.shutdown()
            to.shutdown()


def test_nothing_is_pushed_after_an_abort(pair: Pair) -> None:
    pair.receiver.open(key(21), pages([1, 2, 3]))
    pair.sender.open(key(21), pair.offer())
    pair.sender.push(key(21), 0, pages([4]), pages([1]))
    pair.arrivals.wait(lambda: pair.arrivals.landed.get(key(21)) == {0})
    pair.sender.abort(key(21))
    pair.sender.push(key(21), 1, pages([5, 6]), pages([2, 3]))
    pair.sender.finish(key(21))
    pair.pushes.wait(lambda: pair.pushes.done == [key(21)])
    assert not pair.target[2:4].any()
    assert pair.arrivals.landed[key(21)] == {0}
    assert pair.pushes.failed == []  # an abort is not a failure
    pair.receiver.close(key(21))


def test_arrivals_of_a_transfer_that_is_not_open_are_ignored(pair: Pair) -> None:
    """Counts arrivals for closed or unknown transfers and out of range; a staging transport writes nothing."""
    emulated = pair.sender.transports == ["torch"]
    late = pair.receiver.stats.num_late_arrivals
    pair.receiver.open(key(30), pages([7]))
    pair.receiver.close(key(30))
    pair.receiver.close(key(30))  # a second close does nothing
    pair.receiver.open(key(31), pages([8]))
    for number, first in ((30, 0), (31, 1), (32, 0)):
        pair.sender.open(key(number), pair.offer())
        pair.sender.push(key(number), first, pages([0]), pages([9 if number == 31 else 7]))
        pair.sender.finish(key(number))
    pair.pushes.wait(lambda: len(pair.pushes.done) == 3)
    pair.receiver.open(key(33), pages([10]))  # its arrival shows that all earlier ones have been handled
    pair.sender.open(key(33), pair.offer())
    pair.sender.push(key(33), 0, pages([11]), pages([10]))
    pair.sender.finish(key(33))
    pair.arrivals.wait(lambda: pair.arrivals.landed == {key(33): {0}})
    assert pair.receiver.stats.num_late_arrivals == late + 3
    assert sorted(pair.pushes.failed_keys(), key=str) == ([key(30), key(31), key(32)] if emulated else [])
    if emulated:
        assert not pair.target[7:10].any()
    for number in (31, 33):
        pair.receiver.close(key(number))


def test_the_receiver_does_not_poll_while_nothing_is_open(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[int] = []
    original = NixlReceiver.poll
    monkeypatch.setattr(NixlReceiver, "poll", lambda self: polls.append(1) or original(self))  # type: ignore[func-returns-value]
    pair.receiver.open(key(40), pages([1]))
    pair.sender.open(key(40), pair.offer())
    pair.sender.push(key(40), 0, pages([1]), pages([1]))
    pair.sender.finish(key(40))
    pair.arrivals.wait(lambda: key(40) in pair.arrivals.landed)
    pair.receiver.close(key(40))
    during = len(polls)
    with pair.arrivals.changed:
        pair.arrivals.changed.wait(0.3)
    assert (during > 0) == (pair.sender.transports == ["nixl"])
    assert len(polls) <= during + 2


def test_layouts_that_differ_are_refused_with_both_digests(pair: Pair) -> None:
    other = sender(pair.source, Log(), config("torch"), revision="other-layout")
    try:
        with pytest.raises(TransferRefused, match=r"test-layout.*other-layout"):
            other.open(key(50), pair.offer())
        assert not other.is_open(key(50))
    finally:
        other.shutdown()


def test_epochs_must_match_the_offer_and_the_sender(pair: Pair) -> None:
    with pytest.raises(TransferError, match="restarted"):
        pair.sender.open(key(51, sender_epoch=9), pair.offer())
    with pytest.raises(TransferError, match="restarted"):
        pair.sender.open(key(51, receiver_epoch=9), pair.offer())
    with pytest.raises(TransferError, match="receiver epoch 9"):
        pair.receiver.open(key(51, receiver_epoch=9), pages([1]))


def test_invalid_pushes_are_refused(pair: Pair) -> None:
    for first, src, dst in ((0, [1, 2], [1]), (0, [], []), (-1, [1], [1]), (0, [NUM_PAGES], [1]), (0, [-1], [1])):
        with pytest.raises(ValueError, match="push of"):
            pair.sender.push(key(52), first, pages(src), pages(dst))


def test_a_forgotten_epoch_fails_and_another_takes_over(pair: Pair) -> None:
    """Open transfers of the forgotten epoch fail at once; those of the other one arrive."""
    worker = PREFILL
    pair.offer()
    pair.receiver.open(key(60), pages([1, 2]))
    pair.receiver.offer(worker, Epoch(3))
    pair.receiver.forget(Epoch(1))
    pair.arrivals.wait(lambda: pair.arrivals.failed_keys() == [key(60)])
    restarted = sender(pair.source, pair.pushes, config(pair.sender.transports[0]), epoch=3)
    try:
        moved = key(61, sender_epoch=3)
        pair.receiver.open(moved, pages([5]))
        restarted.open(moved, pair.receiver.offer(worker, Epoch(3)))
        restarted.push(moved, 0, pages([6]), pages([5]))
        restarted.finish(moved)
        pair.arrivals.wait(lambda: pair.arrivals.landed.get(moved) == {0})
        assert same_bits(pair.target[5], pair.source[6])
    finally:
        restarted.shutdown()
        pair.receiver.close(key(60))
        pair.receiver.close(key(61, sender_epoch=3))


def test_a_stalled_transfer_fails_once(pair: Pair) -> None:
    """A receiver that gets no page within timeout_s reports the failure once and keeps the transfer until it is
    closed."""
    log = Log()
    impatient = receiver(torch.zeros_like(pair.target), log, config("torch", timeout_s=0.1))
    try:
        impatient.open(key(70), pages([1]))
        log.wait(lambda: log.failed_keys() == [key(70)])
        with log.changed:
            assert not log.changed.wait(0.25)
        assert "no page for 0.1 s, 1 of 1 missing" in log.failed[0][1].message
        impatient.close(key(70))
    finally:
        impatient.shutdown()


@pytest.mark.parametrize("broken", [1, 2])
def test_auto_falls_back_when_transports_do_not_connect(broken: int) -> None:
    """Corrupts the preferred transports of the offer."""
    source, target = make_pools()
    arrivals, pushes = Log(), Log()
    to, origin = receiver(target, arrivals, config("auto")), sender(source, pushes, config("auto"))
    spoiled: dict[str, Details] = {"shm": {"token": b"?" * 32}, "nixl": {"token": b"?" * 32}, "torch": {}}
    try:
        assert to.transports == origin.transports == ["shm", *nixl_agent.is_installed() * ["nixl"], "torch"]
        broken = min(broken, len(to.transports) - 1)
        to.open(key(1), pages([3]))
        offer = parse_offer(to.offer(PREFILL, Epoch(1)))
        transports = [
            (name, {**details, **spoiled[name]} if index < broken else details)
            for index, (name, details) in enumerate(offer.transports)
        ]
        origin.open(key(1), replace(offer, transports=tuple(transports)).encode())
        origin.push(key(1), 0, pages([2]), pages([3]))
        origin.finish(key(1))
        pushes.wait(lambda: pushes.done == [key(1)])
        assert same_bits(target[3], source[2])
        assert origin.stats.num_fallbacks == broken
    finally:
        origin.shutdown()
        to.shutdown()


def test_an_unreachable_receiver_fails_only_its_own_transfers() -> None:
    source, target = make_pools()
    arrivals, pushes = Log(), Log()
    settings = config("torch", connect_timeout_s=4.0)
    gone, origin = receiver(target, arrivals, settings, epoch=5), sender(source, pushes, settings)
    to = receiver(target, arrivals, settings, epoch=6)
    try:
        offer = gone.offer(PREFILL, Epoch(1))
        gone.shutdown()
        lost, fine = key(1, receiver_epoch=5), key(2, receiver_epoch=6)
        to.open(fine, pages([4]))
        for each, there in ((lost, offer), (fine, to.offer(PREFILL, Epoch(1)))):
            origin.open(each, there)
            origin.push(each, 0, pages([1]), pages([4]))
            origin.finish(each)
        pushes.wait(lambda: set(pushes.done) == {lost, fine})
        assert pushes.failed_keys() == [lost]
        assert "cannot be reached" in pushes.failed[0][1].message
        assert same_bits(target[4], source[1])
    finally:
        origin.shutdown()
        to.shutdown()


def test_an_unknown_token_gets_no_connection() -> None:
    _, target = make_pools()
    settings = config("torch", connect_timeout_s=2.0)
    log = Log()
    to = receiver(target, log, settings)
    try:
        name, details = parse_offer(to.offer(PREFILL, Epoch(1))).transports[0]
        assert name == "torch"
        transport = TorchSender(to._pages, settings, lambda: None)
        with pytest.raises(TransferError, match=r"gone|closed"):
            transport.connect({**details, "token": b"x" * 32}, Epoch(2))
        assert isinstance(to._transports[0], TorchReceiver)
    finally:
        to.shutdown()


def test_a_configured_transport_that_is_missing_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_installed_builds", list)
    source, _ = make_pools()
    with pytest.raises(ConfigError, match=r"transfer.transport = 'nixl'.*penstock\[nixl\]"):
        sender(source, Log(), config("nixl"))
