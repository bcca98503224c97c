"""Tests transfers between real processes that are killed, frozen or restarted at random points, and over failing links.

Every transfer must end: its bytes are exact, or its owner is notified. Nothing else is written, no other peer is
disturbed, and no thread, descriptor or open transfer is left.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.cache.pool_memory import FILE_NAME
from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.session.handshake import parse_offer
from kv_transfer.transports import nixl_agent
from penstock.types import Epoch, PageId, TransferKey, WorkerId
from tests.support.transfer.chaos_proxy import TO_CLIENT, TO_TARGET, ChaosProxy
from tests.support.transfer.transfer_child import Child, children, make_source, make_target
from tests.support.transfer.transfer_pair import PREFILL, Log, config, key, receiver, sender

NUM_PAGES, PAGE_BYTES = 64, 128 * 1024
NUM_MOVED = 24  # pages of a transfer
NUM_TRANSFERS = 60  # transfers in each test; each transport sees them from both ends
NUM_RESTARTS = {"torch": 8, "nixl": 5}  # 12 over shm; a sender over NIXL takes a second to start
TRANSPORTS = [
    "shm",
    "torch",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")),
]
LONGEST_PAUSE_S = 0.004  # delay before a fault: some transfers have ended by then, most are in flight
BETWEEN_MOVES_S = 0.01  # pause of a steady sender, which leaves the cores to others
BOUND_S = 60.0  # deadline for whatever must end; only a hang takes as long

Pages = list[PageId]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails unless the block leaves no additional thread or descriptor."""

    def count() -> tuple[int, int]:
        return sum(thread.name.startswith("kv-") for thread in threading.enumerate()), len(os.listdir("/proc/self/fd"))

    threads, descriptors = count()
    yield
    deadline_s = time.monotonic() + BOUND_S
    bound = threads, descriptors + 6  # pipes to the process that forks; a leak would grow with each transfer
    while any(now > before for now, before in zip(count(), bound, strict=True)):
        assert time.monotonic() < deadline_s, (count(), bound, [thread.name for thread in threading.enumerate()])
        time.sleep(0.02)
        gc.collect()  # threads of transfers end by themselves, and leave what they held


def pick_pages(rng: random.Random, pool: range = range(NUM_PAGES)) -> tuple[Pages, Pages]:
    return tuple([PageId(page) for page in rng.sample(pool, NUM_MOVED)] for _ in range(2))  # type: ignore[return-value]


def cut_pushes(rng: random.Random, src: Pages, dst: Pages) -> list[tuple[int, Pages, Pages]]:
    """Splits a transfer into pushes of random sizes."""
    cuts = [0, *sorted(rng.sample(range(1, NUM_MOVED), 3)), NUM_MOVED]
    return [(first, src[first:end], dst[first:end]) for first, end in pairwise(cuts)]


def faults(rng: random.Random, num_kills: int, num_freezes: int) -> dict[int, str]:
    """Returns which transfers are disturbed, and how."""
    chosen = rng.sample(range(2, NUM_TRANSFERS), num_kills + num_freezes)
    return {number: "kill" if index < num_kills else "freeze" for index, number in enumerate(chosen)}


def freeze(child: Child, rng: random.Random, longest_s: float = 0.05) -> None:
    """Freezes a child for less than any timeout, so that no peer may notice."""
    child.signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0, longest_s))
    child.signal(signal.SIGCONT)


def ended(log: Log, moving: TransferKey) -> bool:
    return len(log.landed.get(moving, ())) == NUM_MOVED or moving in log.failed_keys()


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_senders_die_and_freeze_at_random_points(transport: str) -> None:
    with nothing_left():
        senders_die_and_freeze(transport)


def senders_die_and_freeze(transport: str) -> None:
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES)
    rng, epoch, lost = random.Random(17), 1, 0
    plan = faults(rng, num_kills=4, num_freezes=15)
    child = Child("sender", transport, epoch, NUM_PAGES, PAGE_BYTES)
    log = Log()
    end = receiver(target, log, config(transport, timeout_s=5.0))
    try:
        assert child.reply() == "ready"
        for number in range(NUM_TRANSFERS):
            moving, (src, dst) = key(number, epoch), pick_pages(rng)
            target.zero_()
            end.open(moving, dst)
            child.send("run", moving, end.offer(PREFILL, Epoch(epoch)), cut_pushes(rng, src, dst))
            fault = plan.get(number)
            if fault:
                time.sleep(rng.uniform(0, LONGEST_PAUSE_S))
            if fault == "freeze":
                freeze(child, rng)
            if fault == "kill":
                child.kill()
                epoch += 2
                end.forget(Epoch(epoch - 2))
            else:
                assert child.reply() == []
            log.wait(lambda moving=moving: ended(log, moving), BOUND_S)  # type: ignore[misc]
            end.close(moving)
            landed = sorted(log.landed.get(moving, ()))
            assert fault == "kill" or len(landed) == NUM_MOVED
            lost += len(landed) < NUM_MOVED
            assert torch.equal(target[[dst[i] for i in landed]], source[[src[i] for i in landed]])
            assert not target[sorted(set(range(NUM_PAGES)) - set(dst))].any()
            if fault == "kill":
                child = Child("sender", transport, epoch, NUM_PAGES, PAGE_BYTES)
                assert child.reply() == "ready"
        assert len(log.failed) == lost
        assert len(end._open) == 0
    finally:
        child.kill()
        end.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_receivers_die_and_freeze_at_random_points(transport: str) -> None:
    with nothing_left():
        receivers_die_and_freeze(transport)


def receivers_die_and_freeze(transport: str) -> None:
    source = make_source(NUM_PAGES, PAGE_BYTES)
    rng, epoch = random.Random(29), 2
    plan = faults(rng, num_kills=4, num_freezes=15)
    child = Child("receiver", transport, epoch, NUM_PAGES, PAGE_BYTES)
    log = Log()
    origin = sender(source, log, config(transport, timeout_s=5.0))
    try:
        assert child.reply() == "ready"
        for number in range(NUM_TRANSFERS):
            moving, (src, dst) = key(number, 1, epoch), pick_pages(rng)
            origin.open(moving, child.call("open", moving, dst))
            for push in cut_pushes(rng, src, dst):
                origin.push(moving, *push)
            origin.finish(moving)
            fault = plan.get(number)
            if fault:
                time.sleep(rng.uniform(0, LONGEST_PAUSE_S))
            if fault == "freeze":
                freeze(child, rng)
            if fault == "kill":
                child.kill()
            log.wait(lambda moving=moving: moving in log.done, BOUND_S)  # type: ignore[misc]
            assert not origin.is_open(moving)
            if fault == "kill":
                epoch += 2
                child = Child("receiver", transport, epoch, NUM_PAGES, PAGE_BYTES)
                assert child.reply() == "ready"
            else:
                assert child.call("landed", moving, dst) == source[src].numpy().tobytes()
                assert moving not in log.failed_keys()
        assert len(log.done) == len(set(log.done)) == NUM_TRANSFERS
        assert len(log.failed) <= 4
    finally:
        child.kill()
        origin.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_that_keeps_restarting_does_not_disturb_another(transport: str) -> None:
    """Kills a worker within a transfer repeatedly; each successor has a new epoch and is served at once."""
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES)
    half, num_restarts = NUM_PAGES // 2, NUM_RESTARTS.get(transport, 12)
    rng, log, steady_log_error = random.Random(5), Log(), list[BaseException]()
    end = receiver(target, log, config(transport, timeout_s=10 * BOUND_S))
    steady = Child("sender", transport, 1, NUM_PAGES, PAGE_BYTES)
    stopping, moved = threading.Event(), list[int]()

    def keep_moving() -> None:
        own, number = random.Random(6), 1000
        try:
            while not stopping.wait(BETWEEN_MOVES_S) or len(moved) < 20:
                src, dst = pick_pages(own, range(half, NUM_PAGES))
                transfer_all(steady, end, log, key(number, 1), WorkerId("steady"), cut_pushes(own, src, dst))
                assert torch.equal(target[dst], source[src])
                moved.append(number)
                number += 1
        except BaseException as error:
            steady_log_error.append(error)

    load = threading.Thread(target=keep_moving)
    try:
        assert steady.reply() == "ready"
        load.start()
        for restart in range(num_restarts):
            epoch = 101 + restart
            with children(Child("sender", transport, epoch, NUM_PAGES, PAGE_BYTES)) as (child,):
                src, dst = pick_pages(rng, range(half))
                transfer_all(child, end, log, key(2 * restart, epoch), PREFILL, cut_pushes(rng, src, dst))
                assert torch.equal(target[dst], source[src])
                cut_short = key(2 * restart + 1, epoch)
                end.open(cut_short, dst)
                child.call("start", cut_short, end.offer(PREFILL, Epoch(epoch)), (0, src[:4], dst[:4]))
            end.forget(Epoch(epoch))
            log.wait(lambda: cut_short in log.failed_keys(), BOUND_S)  # noqa: B023
            end.close(cut_short)
        stopping.set()
        load.join(BOUND_S)
        assert steady_log_error == []
        assert len(moved) >= 20
        assert len(log.failed) == num_restarts
        assert len(end._open) == 0
    finally:
        stopping.set()
        load.join(BOUND_S)
        steady.kill()
        end.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_frozen_beyond_its_lease_writes_only_its_own_pages(transport: str) -> None:
    """Wakes the sender after its transfer has been closed. A staging transport writes nothing more; a one-sided one may
    finish the writes that it began, so the pages stay fenced until the sender is done."""
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES)
    rng, log = random.Random(41), Log()
    # Longer than any undisturbed transfer on a busy machine; each round waits for it once.
    end = receiver(target, log, config(transport, timeout_s=2.5))
    try:
        with children(Child("sender", transport, 1, NUM_PAGES, PAGE_BYTES)) as (child,):
            assert child.call("run", key(99), end.offer(PREFILL, Epoch(1)), []) == []  # connects before timing matters
            num_cut_short = 0
            for number in range(50):
                if number >= 3 and num_cut_short:
                    break  # three rounds, or more until a freeze has hit a copy in flight
                target.zero_()
                moving, (src, dst) = key(number), pick_pages(rng)
                end.open(moving, dst)
                child.send("run", moving, end.offer(PREFILL, Epoch(1)), cut_pushes(rng, src, dst))
                time.sleep(rng.uniform(0, 0.0008))
                child.signal(signal.SIGSTOP)
                log.wait(lambda: ended(log, moving), BOUND_S)  # noqa: B023
                end.close(moving)
                before = target.clone()
                child.signal(signal.SIGCONT)
                child.reply()  # it is done, successfully or not
                num_cut_short += moving in log.failed_keys()
                if transport == "torch":
                    assert torch.equal(target, before)
                elsewhere = sorted(set(range(NUM_PAGES)) - set(dst))
                assert not target[elsewhere].any()
                assert ((target[dst] == source[src]) | (target[dst] == 0)).all()
                again = key(100 + number)
                transfer_all(child, end, log, again, PREFILL, cut_pushes(rng, src, dst))
                assert torch.equal(target[dst], source[src])
            assert num_cut_short
    finally:
        end.shutdown()


@pytest.mark.processes
@pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")
def test_no_page_changes_after_a_frozen_receiver_has_lifted_its_fence() -> None:
    """Wakes the receiver long after the sender has reported its failure. If UCX left bytes to the receiver's polling,
    as it does over TCP, they would land now, in pages that other requests own."""
    rng = random.Random(43)
    ends = children(
        Child("receiver", "nixl", 2, NUM_PAGES, 8 * PAGE_BYTES), Child("sender", "nixl", 1, NUM_PAGES, 8 * PAGE_BYTES)
    )
    with ends as (end, origin):
        num_given_up = 0
        for number in range(4):
            moving, (src, dst) = key(number), pick_pages(rng)
            offer = end.call("open", moving, dst)
            is_disturbed = number % 2 == 1
            if number == 1:  # before the first push, so that the sender must give up
                end.signal(signal.SIGSTOP)
            origin.send("run", moving, offer, cut_pushes(rng, src, dst))
            if is_disturbed:  # in the middle of a push, unless the receiver is already frozen
                time.sleep(rng.uniform(0, LONGEST_PAUSE_S))
                end.signal(signal.SIGSTOP)
            errors = origin.reply()
            end.send("lift", moving, dst, 0.3)  # the first thing that it does when it wakes
            end.signal(signal.SIGCONT)
            num_changed, pages = end.reply()
            assert num_changed == 0
            whole_pages = make_source(NUM_PAGES, 8 * PAGE_BYTES)[src].numpy().tobytes()
            assert is_disturbed or (errors, pages) == ([], whole_pages)
            num_given_up += bool(errors)
        assert num_given_up


@pytest.mark.processes
@pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")
@pytest.mark.parametrize("page_bytes", [128, 4096, 64 * 1024, 1 << 20])
def test_nixl_writes_pages_while_the_receiver_is_frozen(page_bytes: int) -> None:
    """The sender moves all bytes itself, so a receiver that wakes has nothing to write."""
    rng, source = random.Random(44), make_source(NUM_PAGES, page_bytes)
    ends = children(
        Child("receiver", "nixl", 2, NUM_PAGES, page_bytes), Child("sender", "nixl", 1, NUM_PAGES, page_bytes)
    )
    with ends as (end, origin):
        src, dst = pick_pages(rng)
        origin.send("run", key(0), end.call("open", key(0), dst), cut_pushes(rng, src, dst))  # they connect
        assert origin.reply() == []
        end.call("landed", key(0), dst)
        src, dst = pick_pages(rng)
        offer = end.call("open", key(1), dst)
        pool = mapped_pool(end, NUM_PAGES * page_bytes)
        end.signal(signal.SIGSTOP)
        origin.send("run", key(1), offer, cut_pushes(rng, src, dst))
        origin.reply()  # every write has ended, or the sender has given up on the frozen receiver
        for from_page, to_page in zip(src, dst, strict=True):
            found = pool[to_page * page_bytes : (to_page + 1) * page_bytes]
            assert found == source[from_page].numpy().tobytes()


def mapped_pool(child: Child, num_bytes: int) -> mmap.mmap:
    """Maps the pool of a receiving child, which shows its content at any moment."""
    for path in Path(f"/proc/{child.process.pid}/fd").iterdir():
        if path.is_symlink() and f"memfd:{FILE_NAME}" in os.readlink(path):
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ)
    raise AssertionError("the child has no pool in shared memory")


def transfer_all(
    child: Child,
    end: TransferReceiver,
    log: Log,
    moving: TransferKey,
    worker: WorkerId,
    pushes: list[tuple[int, Pages, Pages]],
) -> None:
    """Runs one undisturbed transfer from a child."""
    end.open(moving, [page for _, _, dst in pushes for page in dst])
    assert child.call("run", moving, end.offer(worker, moving.sender_epoch), pushes) == []
    log.wait(lambda: len(log.landed.get(moving, ())) == NUM_MOVED, BOUND_S)
    end.close(moving)


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("fault", [TO_TARGET, TO_CLIENT, "cut"])
def test_a_transfer_ends_when_its_link_loses_one_direction_or_is_cut(transport: str, fault: str) -> None:
    """Runs the channel through a proxy: an end that misses a message fails in time and can connect again."""
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES)
    arrivals, pushes, settings = Log(), Log(), config(transport, timeout_s=1.0)
    end, origin = receiver(target, arrivals, settings), sender(source, pushes, settings)
    offer = parse_offer(end.offer(PREFILL, Epoch(1)))
    ((name, details),) = offer.transports
    port = details["port"]
    assert isinstance(port, int)
    proxy = ChaosProxy("127.0.0.1", port)
    proxied = replace(offer, transports=((name, {**details, "port": proxy.port}),)).encode()
    src, dst = pick_pages(random.Random(1))
    try:
        for number in range(2):  # the second transfer meets the fault
            if number:
                proxy.cut() if fault == "cut" else proxy.lose(fault)
            end.open(key(number), dst)
            origin.open(key(number), proxied)
            origin.push(key(number), 0, src, dst)
            origin.finish(key(number))
            pushes.wait(lambda: key(number) in pushes.done, BOUND_S)  # noqa: B023
            arrivals.wait(lambda: ended(arrivals, key(number)), BOUND_S)  # noqa: B023
            end.close(key(number))
        assert key(0) not in (*arrivals.failed_keys(), *pushes.failed_keys())
        expected = {  # fails at (receiver, sender); shm is one-sided, so each end misses only what it waits for
            ("shm", TO_TARGET): (True, False),
            ("shm", TO_CLIENT): (False, False),
            ("torch", TO_TARGET): (True, True),
            ("torch", TO_CLIENT): (False, True),
        }.get((transport, fault), (True, True))
        failed = (key(1) in arrivals.failed_keys(), key(1) in pushes.failed_keys())
        if (transport, fault) == ("shm", "cut"):  # the sender may have sent everything before it notices the cut
            assert failed[0]
        else:
            assert failed == expected
        proxy.cut()
        deadline_s = time.monotonic() + BOUND_S
        # Once both ends have noticed, the next transfer connects again.
        while origin._links._receivers or not end.stats.num_lost_peers:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        target.zero_()
        end.open(key(2), dst)
        origin.open(key(2), end.offer(PREFILL, Epoch(1)))
        origin.push(key(2), 0, src, dst)
        origin.finish(key(2))
        arrivals.wait(lambda: len(arrivals.landed.get(key(2), ())) == NUM_MOVED, BOUND_S)
        assert torch.equal(target[dst], source[src])
    finally:
        proxy.cut()
        origin.shutdown()
        end.shutdown()
