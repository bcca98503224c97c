"""Transfers between real processes that are killed, frozen and restarted at random points, and over links that fail.

Whatever happens, every transfer ends: its bytes are exact, or its owner is told; nothing else is written, nobody else
is disturbed, and no thread, descriptor or open transfer is left.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kv_transfer import nixl_agent
from kv_transfer.handshake import parse_offer
from kv_transfer.receiver import TransferReceiver
from penstock.types import Epoch, PageId, TransferKey, WorkerId
from tests.chaos_proxy import TO_CLIENT, TO_TARGET, ChaosProxy
from tests.transfer_child import Child, children, make_source, make_target
from tests.transfer_pair import PREFILL, Log, config, key, receiver, sender

NUM_PAGES, PAGE_BYTES = 64, 128 * 1024
NUM_MOVED = 24  # pages of a transfer
NUM_TRANSFERS = 100  # of each test; each wire sees them from both ends
WIRES = [
    "shm",
    "torch",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")),
]
LONGEST_PAUSE_S = 0.004  # before a fault: some transfers are over by then, most are under way
BOUND_S = 10.0  # for any transfer's end on a busy machine; time-outs are 2 s

Pages = list[PageId]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Threads and descriptors are those of before, soon."""

    def count() -> tuple[int, int]:
        return sum(thread.name.startswith("kv-") for thread in threading.enumerate()), len(os.listdir("/proc/self/fd"))

    threads, descriptors = count()
    yield
    gc.collect()  # what is left of the ends themselves
    deadline_s = time.monotonic() + 5.0
    bound = threads, descriptors + 6  # pipes to the process that forks; a leak would come with each of 100 transfers
    while any(now > before for now, before in zip(count(), bound, strict=True)):
        assert time.monotonic() < deadline_s, (count(), bound, [thread.name for thread in threading.enumerate()])
        time.sleep(0.02)


def draw_pages(draw: random.Random, pool: range = range(NUM_PAGES)) -> tuple[Pages, Pages]:
    return tuple([PageId(page) for page in draw.sample(pool, NUM_MOVED)] for _ in range(2))  # type: ignore[return-value]


def cut_up(draw: random.Random, src: Pages, dst: Pages) -> list[tuple[int, Pages, Pages]]:
    """Pushes of random sizes."""
    cuts = [0, *sorted(draw.sample(range(1, NUM_MOVED), 3)), NUM_MOVED]
    return [(first, src[first:end], dst[first:end]) for first, end in pairwise(cuts)]


def faults(draw: random.Random, num_kills: int, num_freezes: int) -> dict[int, str]:
    """Which transfers are disturbed."""
    chosen = draw.sample(range(2, NUM_TRANSFERS), num_kills + num_freezes)
    return {number: "kill" if index < num_kills else "freeze" for index, number in enumerate(chosen)}


def freeze(child: Child, draw: random.Random, longest_s: float = 0.05) -> None:
    """Shorter than any time-out: nobody may notice."""
    child.signal(signal.SIGSTOP)
    time.sleep(draw.uniform(0, longest_s))
    child.signal(signal.SIGCONT)


def ended(log: Log, moving: TransferKey) -> bool:
    return len(log.landed.get(moving, ())) == NUM_MOVED or moving in log.failed_keys()


@pytest.mark.parametrize("wire", WIRES)
def test_senders_die_and_freeze_at_random_points(wire: str) -> None:
    with nothing_left():
        senders_die_and_freeze(wire)


def senders_die_and_freeze(wire: str) -> None:
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES)
    draw, epoch, lost = random.Random(17), 1, 0
    plan = faults(draw, num_kills=4, num_freezes=15)
    child = Child("sender", wire, epoch, NUM_PAGES, PAGE_BYTES)
    log = Log()
    end = receiver(target, log, config(wire, timeout_s=2.0))
    try:
        assert child.reply() == "ready"
        for number in range(NUM_TRANSFERS):
            moving, (src, dst) = key(number, epoch), draw_pages(draw)
            target.zero_()
            end.open(moving, dst)
            child.tell("run", moving, end.offer(PREFILL, Epoch(epoch)), cut_up(draw, src, dst))
            fault = plan.get(number)
            if fault:
                time.sleep(draw.uniform(0, LONGEST_PAUSE_S))
            if fault == "freeze":
                freeze(child, draw)
            if fault == "kill":
                child.kill()
                epoch += 2
                end.offer(PREFILL, Epoch(epoch))  # its successor asks: what the old one had open fails at once
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
                child = Child("sender", wire, epoch, NUM_PAGES, PAGE_BYTES)
                assert child.reply() == "ready"
        assert len(log.failed) == lost
        assert len(end._open) == 0
    finally:
        child.kill()
        end.shutdown()


@pytest.mark.parametrize("wire", WIRES)
def test_receivers_die_and_freeze_at_random_points(wire: str) -> None:
    with nothing_left():
        receivers_die_and_freeze(wire)


def receivers_die_and_freeze(wire: str) -> None:
    source = make_source(NUM_PAGES, PAGE_BYTES)
    draw, epoch = random.Random(29), 2
    plan = faults(draw, num_kills=4, num_freezes=15)
    child = Child("receiver", wire, epoch, NUM_PAGES, PAGE_BYTES)
    log = Log()
    origin = sender(source, log, config(wire, timeout_s=2.0))
    try:
        assert child.reply() == "ready"
        for number in range(NUM_TRANSFERS):
            moving, (src, dst) = key(number, 1, epoch), draw_pages(draw)
            origin.open(moving, child.call("open", moving, dst))
            for push in cut_up(draw, src, dst):
                origin.push(moving, *push)
            origin.finish(moving)
            fault = plan.get(number)
            if fault:
                time.sleep(draw.uniform(0, LONGEST_PAUSE_S))
            if fault == "freeze":
                freeze(child, draw)
            if fault == "kill":
                child.kill()
            log.wait(lambda moving=moving: moving in log.done, BOUND_S)  # type: ignore[misc]
            assert not origin.is_open(moving)
            if fault == "kill":
                epoch += 2
                child = Child("receiver", wire, epoch, NUM_PAGES, PAGE_BYTES)
                assert child.reply() == "ready"
            else:
                assert child.call("landed", moving, dst) == source[src].numpy().tobytes()
                assert moving not in log.failed_keys()
        assert len(log.done) == len(set(log.done)) == NUM_TRANSFERS
        assert len(log.failed) <= 4
    finally:
        child.kill()
        origin.shutdown()


@pytest.mark.parametrize("wire", WIRES)
def test_a_sender_restarts_twenty_times_beside_one_that_never_notices(wire: str) -> None:
    """The same worker with a new epoch each time, killed within a transfer: its successor is served at once."""
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES)
    half = NUM_PAGES // 2
    draw, log, steady_log_error = random.Random(5), Log(), list[BaseException]()
    end = receiver(target, log, config(wire, timeout_s=5.0))
    steady = Child("sender", wire, 1, NUM_PAGES, PAGE_BYTES)
    stopping, moved = threading.Event(), list[int]()

    def keep_moving() -> None:
        own, number = random.Random(6), 1000
        try:
            while not stopping.is_set():
                src, dst = draw_pages(own, range(half, NUM_PAGES))
                whole(steady, end, log, key(number, 1), WorkerId("steady"), cut_up(own, src, dst))
                assert torch.equal(target[dst], source[src])
                moved.append(number)
                number += 1
        except BaseException as error:
            steady_log_error.append(error)

    load = threading.Thread(target=keep_moving)
    try:
        assert steady.reply() == "ready"
        load.start()
        for restart in range(20):
            epoch = 101 + restart
            with children(Child("sender", wire, epoch, NUM_PAGES, PAGE_BYTES)) as (child,):
                src, dst = draw_pages(draw, range(half))
                started_s = time.monotonic()
                whole(child, end, log, key(2 * restart, epoch), PREFILL, cut_up(draw, src, dst))
                assert time.monotonic() - started_s < BOUND_S
                assert torch.equal(target[dst], source[src])
                cut_short = key(2 * restart + 1, epoch)
                end.open(cut_short, dst)
                child.call("start", cut_short, end.offer(PREFILL, Epoch(epoch)), (0, src[:4], dst[:4]))
            end.offer(PREFILL, Epoch(epoch + 1))
            log.wait(lambda: cut_short in log.failed_keys(), 1.0)  # noqa: B023
            end.close(cut_short)
        stopping.set()
        load.join(BOUND_S)
        assert steady_log_error == []
        assert len(moved) >= 20
        assert len(log.failed) == 20
        assert len(end._open) == 0
    finally:
        stopping.set()
        load.join(BOUND_S)
        steady.kill()
        end.shutdown()


@pytest.mark.parametrize("wire", WIRES)
def test_a_sender_frozen_beyond_its_lease_touches_its_own_pages_alone(wire: str) -> None:
    """It wakes when its transfer is long closed: an emulated wire writes nothing more, a one-sided one may finish what
    it had begun, which is why the pages are fenced; once it is done they are safe again."""
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES)
    draw, log = random.Random(41), Log()
    end = receiver(target, log, config(wire, timeout_s=0.8))
    try:
        with children(Child("sender", wire, 1, NUM_PAGES, PAGE_BYTES)) as (child,):
            assert child.call("run", key(99), end.offer(PREFILL, Epoch(1)), []) == []  # it connects, in its own time
            num_cut_short = 0
            for number in range(50):
                if number >= 5 and num_cut_short:
                    break  # five rounds, and more until a freeze has hit a copy under way
                target.zero_()
                moving, (src, dst) = key(number), draw_pages(draw)
                end.open(moving, dst)
                child.tell("run", moving, end.offer(PREFILL, Epoch(1)), cut_up(draw, src, dst))
                time.sleep(draw.uniform(0, 0.0008))
                child.signal(signal.SIGSTOP)
                log.wait(lambda: ended(log, moving), BOUND_S)  # noqa: B023
                end.close(moving)
                before = target.clone()
                child.signal(signal.SIGCONT)
                child.reply()  # it is done, in whatever way
                num_cut_short += moving in log.failed_keys()
                if wire == "torch":
                    assert torch.equal(target, before)
                elsewhere = sorted(set(range(NUM_PAGES)) - set(dst))
                assert not target[elsewhere].any()
                assert ((target[dst] == source[src]) | (target[dst] == 0)).all()
                again = key(100 + number)
                whole(child, end, log, again, PREFILL, cut_up(draw, src, dst))
                assert torch.equal(target[dst], source[src])
            assert num_cut_short
    finally:
        end.shutdown()


@pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")
def test_a_receiver_frozen_beyond_its_lease_reads_everything_before_its_pages_are_reused() -> None:
    """UCX over TCP: the receiver itself writes what it finds in its socket when it wakes, which may be long after the
    sender has given up and said so. Once the receiver says that it is quiet, no page changes any more."""
    draw, tcp = random.Random(43), {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    ends = children(
        Child("receiver", "nixl", 2, NUM_PAGES, 8 * PAGE_BYTES, **tcp),
        Child("sender", "nixl", 1, NUM_PAGES, 8 * PAGE_BYTES, **tcp),
    )
    with ends as (end, origin):
        num_given_up = 0
        for number in range(4):
            moving, (src, dst) = key(number), draw_pages(draw)
            offer = end.call("open", moving, dst)
            is_disturbed = number % 2 == 1
            if is_disturbed and draw.random() < 0.5:
                end.signal(signal.SIGSTOP)
            origin.tell("run", moving, offer, cut_up(draw, src, dst))
            if is_disturbed:
                time.sleep(draw.uniform(0, LONGEST_PAUSE_S))
                end.signal(signal.SIGSTOP)
            errors = origin.reply()
            end.tell("quiet", moving, dst, 0.3)  # the first thing that it does when it wakes
            end.signal(signal.SIGCONT)
            num_changed, pages = end.reply()
            assert num_changed == 0
            whole_pages = make_source(NUM_PAGES, 8 * PAGE_BYTES)[src].numpy().tobytes()
            assert is_disturbed or (errors, pages) == ([], whole_pages)
            num_given_up += bool(errors)
        assert num_given_up


def whole(
    child: Child,
    end: TransferReceiver,
    log: Log,
    moving: TransferKey,
    worker: WorkerId,
    pushes: list[tuple[int, Pages, Pages]],
) -> None:
    """One undisturbed transfer from a child."""
    end.open(moving, [page for _, _, dst in pushes for page in dst])
    assert child.call("run", moving, end.offer(worker, moving.sender_epoch), pushes) == []
    log.wait(lambda: len(log.landed.get(moving, ())) == NUM_MOVED, BOUND_S)
    end.close(moving)


@pytest.mark.parametrize("wire", ["shm", "torch"])
@pytest.mark.parametrize("fault", [TO_TARGET, TO_CLIENT, "cut"])
def test_a_link_that_loses_one_way_or_is_cut(wire: str, fault: str) -> None:
    """The channel runs through a proxy: whoever misses something is told in time, and a new connection works."""
    source, target = make_source(NUM_PAGES, PAGE_BYTES), make_target(NUM_PAGES, PAGE_BYTES)
    arrivals, pushes, settings = Log(), Log(), config(wire, timeout_s=1.0)
    end, origin = receiver(target, arrivals, settings), sender(source, pushes, settings)
    offer = parse_offer(end.offer(PREFILL, Epoch(1)))
    ((name, details),) = offer.transports
    port = details["port"]
    assert isinstance(port, int)
    proxy = ChaosProxy("127.0.0.1", port)
    proxied = replace(offer, transports=((name, {**details, "port": proxy.port}),)).encode()
    src, dst = draw_pages(random.Random(1))
    try:
        for number in range(2):  # the second one meets the fault
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
        expected = {  # fails at (receiver, sender); shm is one-sided: each end misses only what it waits for
            ("shm", TO_TARGET): (True, False),
            ("shm", TO_CLIENT): (False, False),
            ("torch", TO_TARGET): (True, True),
            ("torch", TO_CLIENT): (False, True),
        }.get((wire, fault), (True, True))
        failed = (key(1) in arrivals.failed_keys(), key(1) in pushes.failed_keys())
        if (wire, fault) == ("shm", "cut"):  # the sender has said all it has to say before it hears of the cut, or not
            assert failed[0]
        else:
            assert failed == expected
        proxy.cut()
        deadline_s = time.monotonic() + BOUND_S
        # Both have seen it: what comes now connects anew.
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
