"""Tests transfers between two processes over each transport: bytes are exact, and either end may die."""

from __future__ import annotations

import os
import random
import signal
from itertools import pairwise

import pytest
import torch

from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.transports import nixl_agent
from penstock.types import Epoch, PageId
from tests.support.transfer import cuda_double
from tests.support.transfer.transfer_child import Child, children, make_source, make_target
from tests.support.transfer.transfer_pair import PREFILL, WAIT_S, Log, config, key, receiver, sender

pytestmark = pytest.mark.processes

NUM_PAGES, PAGE_BYTES = 96, 16 * 1024
TRANSPORTS = [
    "shm",
    "cuda_ipc",  # with a double for the driver
    "torch",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")),
]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    cuda_double.install(monkeypatch)


def pages(numbers: list[int]) -> list[PageId]:
    return [PageId(number) for number in numbers]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_transfer_fails_when_its_sender_dies_and_the_successor_is_served(transport: str) -> None:
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES, transport)
    log, rng = Log(), random.Random(3)
    # A transport with a channel notices that its peer has gone; NIXL has no channel, so only a timeout shows the loss.
    end = receiver(target, log, config(transport, timeout_s=2.0 if transport == "nixl" else 10 * WAIT_S))
    try:
        first, second = (Child("sender", transport, epoch, NUM_PAGES, PAGE_BYTES) for epoch in (1, 3))
        with children(first, second):
            for number in range(5):  # scattered pages in chunks of every size
                move(first, end, log, target, source, rng, number, sender_epoch=1)
            lost = key(50, sender_epoch=1)
            end.open(lost, pages([1, 2]))
            first.call("start", lost, end.offer(PREFILL, Epoch(1)), (0, [5], [1]))
            log.wait(lambda: log.landed.get(lost) == {0})
            first.kill()
            log.wait(lambda: log.failed_keys() == [lost], WAIT_S)
            end.close(lost)
            for number in range(60, 63):
                move(second, end, log, target, source, rng, number, sender_epoch=3)
            assert second.call("stop") is None
    finally:
        end.shutdown()


def move(
    child: Child,
    end: TransferReceiver,
    log: Log,
    target: torch.Tensor,
    source: torch.Tensor,
    rng: random.Random,
    number: int,
    sender_epoch: int,
) -> None:
    moving = key(number, sender_epoch)
    src, dst = rng.sample(range(NUM_PAGES), 40), rng.sample(range(NUM_PAGES), 40)
    cuts = [0, *sorted(rng.sample(range(1, 40), 4)), 40]
    target.zero_()
    end.open(moving, pages(dst))
    pushes = [(cut, src[cut:until], dst[cut:until]) for cut, until in pairwise(cuts)]
    assert child.call("run", moving, end.offer(PREFILL, Epoch(sender_epoch)), pushes) == []
    log.wait(lambda: len(log.landed.get(moving, ())) == 40)
    end.close(moving)
    assert torch.equal(target[dst], source[src])
    untouched = sorted(set(range(NUM_PAGES)) - set(dst))
    assert not target[untouched].any()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_that_freezes_or_dies_does_not_delay_another(transport: str) -> None:
    source = make_source(NUM_PAGES, PAGE_BYTES, transport)
    log = Log()
    origin = sender(source, log, config(transport, timeout_s=1.0))
    src, dst = pages(list(range(0, 64))), pages(list(range(16, 80)))
    try:
        frozen, killed, fine = (Child("receiver", transport, epoch, NUM_PAGES, PAGE_BYTES) for epoch in (2, 4, 6))
        with children(frozen, killed, fine):
            for number, (epoch, child) in enumerate(((2, frozen), (4, killed), (6, fine))):
                warm = key(number, 1, epoch)
                origin.open(warm, child.call("open", warm, dst))
                origin.push(warm, 0, src, dst)
                origin.finish(warm)
                assert child.call("landed", warm, dst) == source[src].numpy().tobytes()
            log.wait(lambda: len(log.done) == 3)
            stuck, lost, good = key(10, 1, 2), key(11, 1, 4), key(12, 1, 6)
            offers = {stuck: frozen.call("open", stuck, dst), lost: killed.call("open", lost, dst)}
            offers[good] = fine.call("open", good, dst)
            assert frozen.process.pid is not None
            os.kill(frozen.process.pid, signal.SIGSTOP)
            killed.kill()
            for each in (stuck, lost, good):
                origin.open(each, offers[each])
                for _ in range(3):  # more than sockets hold
                    origin.push(each, 0, src, dst)
                origin.finish(each)
            log.wait(lambda: good in log.done)
            assert fine.call("landed", good, dst) == source[src].numpy().tobytes()
            log.wait(lambda: {stuck, lost} <= set(log.done))
            assert set(log.failed_keys()) <= {stuck, lost}
            assert lost in log.failed_keys()
            if transport == "torch":  # a one-sided write needs no help from a frozen peer and may complete
                assert stuck in log.failed_keys()
            os.kill(frozen.process.pid, signal.SIGCONT)
            assert len(log.done) == len(set(log.done)) == 6
            assert not any(origin.is_open(each) for each in offers)
    finally:
        origin.shutdown()
