"""Tests pools in shared memory: mapping, refusals, and that no descriptor or file outlives its pool."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.pool_memory import FILE_NAME, allocate_pool, shared_file
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import WHOLE_PAGE
from kv_transfer.session.handshake import parse_offer
from kv_transfer.transports.channel import Channel
from kv_transfer.transports.mapped.ends import MappedReceiver
from kv_transfer.transports.mapped.link import MappedLink
from kv_transfer.transports.mapped.shared_memory import _map_pool
from kv_transfer.transports.transport import Arrival
from penstock.errors import ConfigError, TransferError
from penstock.types import Epoch, PageId
from tests.support.transfer.transfer_pair import PREFILL, WAIT_S, Log, config, key, receiver, sender

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


def open_pools() -> list[str]:
    """Returns this process's descriptors of pools."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(file) for file in folder.iterdir() if file.is_symlink()]
    return [link for link in links if FILE_NAME in link]


def test_a_pool_is_zeroed_and_freed_with_its_last_tensor() -> None:
    gc.collect()
    before = len(open_pools())
    pool = allocate_pool((3, 5, 7), torch.bfloat16, CPU)
    assert pool.shape == (3, 5, 7)
    assert pool.is_contiguous()
    assert not pool.any()
    assert shared_file(pool) is not None
    assert shared_file(torch.zeros(3, 5)) is None
    view = pool[1]
    del pool
    gc.collect()
    assert len(open_pools()) == before + 1
    del view
    gc.collect()
    assert len(open_pools()) == before


def test_a_mapping_writes_into_the_pool() -> None:
    pool = allocate_pool((4, 8192), torch.uint8, CPU)
    fd, mark = shared_file(pool), b"m" * 32
    assert fd is not None
    os.pwrite(fd, mark, os.fstat(fd).st_size - os.sysconf("SC_PAGE_SIZE"))
    mapped = _map_pool(os.getpid(), fd, mark, 4, 8192)
    source = PageBuffer(torch.arange(2 * 8192).view(2, -1)[:, :8192].to(torch.uint8).contiguous())
    mapped.write(source, [PageId(1)], [PageId(2)])
    assert torch.equal(pool[2], source.tensor[1])
    assert not pool[[0, 1, 3]].any()


def test_memory_other_than_the_receivers_pool_is_not_mapped(tmp_path: Path) -> None:
    pool = allocate_pool((4, 4096), torch.uint8, CPU)
    fd = shared_file(pool)
    assert fd is not None
    with pytest.raises(TransferError, match="another process's pool"):
        _map_pool(os.getpid(), fd, b"x" * 32, 4, 4096)
    with pytest.raises(TransferError, match=r"offer\.num_pages: 5 of 4096"):
        _map_pool(os.getpid(), fd, bytes(32), 5, 4096)
    unsealed = os.memfd_create(FILE_NAME)
    os.ftruncate(unsealed, 1 << 16)
    with pytest.raises(TransferError, match="could shrink"):
        _map_pool(os.getpid(), unsealed, bytes(32), 4, 4096)
    os.close(unsealed)
    with open(tmp_path / "file", "wb") as plain, pytest.raises(TransferError, match="not a pool"):
        _map_pool(os.getpid(), plain.fileno(), bytes(32), 4, 4096)
    with pytest.raises(OSError):
        _map_pool(os.getpid(), 1 << 20, bytes(32), 4, 4096)


def test_shared_memory_is_not_tried_for_a_receiver_on_another_host() -> None:
    """A different boot id means another host: auto takes the next transport, shm alone is refused."""
    source, target = torch.ones(4, 512), allocate_pool((4, 512), torch.float32, CPU)
    arrivals, pushes = Log(), Log()
    to, origin = receiver(target, arrivals, config("auto")), sender(source, pushes, config("auto"))
    alone = sender(source, Log(), config("shm"))
    try:
        offer = parse_offer(to.offer(PREFILL, Epoch(1)))
        elsewhere = replace(
            offer,
            transports=tuple(
                (name, {**details, "boot_id": "another"} if name == "shm" else details)
                for name, details in offer.transports
                if name in ("shm", "torch")
            ),
        ).encode()
        with pytest.raises(TransferError, match="shm and cuda_ipc need both ends on one host"):
            alone.open(key(1), elsewhere)
        to.open(key(1), [PageId(2)])
        origin.open(key(1), elsewhere)
        origin.push(key(1), 0, [PageId(0)], [PageId(2)])
        origin.finish(key(1))
        arrivals.wait(lambda: arrivals.landed.get(key(1)) == {0})
        pushes.wait(lambda: pushes.done == [key(1)])
        assert origin.stats.num_fallbacks == 0
        assert torch.equal(target[2], source[0])
    finally:
        for end in (alone, origin, to):
            end.shutdown()


def test_an_unshared_pool_is_offered_only_over_other_transports() -> None:
    plain = torch.zeros(4, 512)
    end = receiver(plain, Log(), config("auto"))
    try:
        assert "shm" not in end.transports
        assert "torch" in end.transports
    finally:
        end.shutdown()
    with pytest.raises(ConfigError, match=r"transport = 'shm': the pool is not in memory that other processes can map"):
        receiver(plain, Log(), config("shm"))


def test_a_page_beyond_the_receivers_pool_fails_only_its_transfer() -> None:
    source, target = torch.ones(8, 512), allocate_pool((4, 512), torch.float32, CPU)
    arrivals, pushes = Log(), Log()
    to, origin = receiver(target, arrivals, config("shm")), sender(source, pushes, config("shm"))
    try:
        for number, dst in ((1, 4), (2, 3)):
            to.open(key(number), [PageId(3)])
            origin.open(key(number), to.offer(PREFILL, Epoch(1)))
            origin.push(key(number), 0, [PageId(0)], [PageId(dst)])
            origin.finish(key(number))
        pushes.wait(lambda: len(pushes.done) == 2)
        assert pushes.failed_keys() == [key(1)]
        assert "destination page 4: the receiver has 4" in pushes.failed[0][1].message
        assert torch.equal(target[3], source[0])
    finally:
        origin.shutdown()
        to.shutdown()


def test_a_sender_that_writes_to_another_peers_transfer_is_disconnected() -> None:
    source, target = torch.ones(4, 512), allocate_pool((4, 512), torch.float32, CPU)
    arrivals, pushes = Log(), Log()
    to, origin = receiver(target, arrivals, config("shm")), sender(source, pushes, config("shm"))
    try:
        victim = key(9, sender_epoch=7)
        to.open(victim, [PageId(1)])
        transport = to._transports[0]
        assert isinstance(transport, MappedReceiver)
        details = dict(parse_offer(to.offer(PREFILL, Epoch(1))).transports)["shm"]
        link = origin._transports["shm"].connect(details, Epoch(2))
        assert isinstance(link, MappedLink)
        link.push(Arrival(victim, 0, 1), [PageId(0)], [PageId(0)])
        for thread in link.threads:
            thread.join(60.0)
        with pytest.raises(TransferError, match=r"gone|closed"):
            link.check()
        assert victim not in arrivals.landed
        link.close()
    finally:
        origin.shutdown()
        to.shutdown()


def test_a_copy_that_fails_ends_its_link_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.ones(4, 512), allocate_pool((4, 512), torch.float32, CPU)
    arrivals, pushes = Log(), Log()
    to, origin = receiver(target, arrivals, config("shm")), sender(source, pushes, config("shm", timeout_s=10 * WAIT_S))

    def broken(self: PageBuffer, *arguments: object) -> None:
        raise MemoryError("no room")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(PageBuffer, "copy_from", broken)
            origin.open(key(1), to.offer(PREFILL, Epoch(1)))
            origin.push(key(1), 0, [PageId(0)], [PageId(1)])
            pushes.wait(lambda: pushes.done == [key(1)])
        assert "no room" in pushes.failed[0][1].message
        to.open(key(2), [PageId(2)])
        origin.open(key(2), to.offer(PREFILL, Epoch(1)))
        origin.push(key(2), 0, [PageId(0)], [PageId(2)])
        origin.finish(key(2))
        pushes.wait(lambda: pushes.done == [key(1), key(2)])
        assert torch.equal(target[2], source[0])
    finally:
        origin.shutdown()
        to.shutdown()


def test_a_late_duplicate_on_a_staging_transport_writes_nothing() -> None:
    """A landed page may already be shared, so a duplicate is acknowledged and dropped, index by index."""
    target = allocate_pool((6, 64), torch.uint8, CPU)
    log = Log()
    end = receiver(target, log, config("torch"))
    try:
        end.open(key(1), [PageId(number) for number in (5, 0, 3)])
        first, again = (PageBuffer(torch.full((3, 64), value, dtype=torch.uint8)) for value in (1, 2))
        assert end.land(Arrival(key(1), 1, 1), first.head(1), WHOLE_PAGE)
        assert end.land(Arrival(key(1), 0, 3), again, WHOLE_PAGE)  # 1 has landed; 0 and 2 are new
        assert end.land(Arrival(key(1), 0, 3), first, WHOLE_PAGE)
        log.wait(lambda: log.landed.get(key(1)) == {0, 1, 2})
        assert target[:, 0].tolist() == [1, 0, 0, 2, 0, 2]
        assert end.stats.num_late_arrivals == 1
        end.close(key(1))
        assert not end.land(Arrival(key(1), 0, 3), first, WHOLE_PAGE)
        assert target[:, 0].tolist() == [1, 0, 0, 2, 0, 2]
    finally:
        end.shutdown()


@pytest.mark.processes
def test_a_killed_process_leaves_no_memory_behind() -> None:
    code = (
        "import os, signal, torch\n"
        "from engine.cache.pool_memory import allocate_pool\n"
        "pool = allocate_pool((64, 1 << 20), torch.uint8, torch.device('cpu')).fill_(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = sorted(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -9
    assert not [name for name in set(os.listdir("/dev/shm")) - set(before) if FILE_NAME in name]


def test_a_channel_has_room_until_its_buffers_are_full() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listening.getsockname())
    theirs, _ = listening.accept()
    with listening, ours, theirs:
        channel = Channel(ours)
        assert channel.has_room()
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        assert not channel.has_room()


def test_a_receiver_that_stops_reading_blocks_only_the_copy_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a small push to the link's thread, so that the sender's thread continues to serve other links."""
    source, target = torch.ones(4, 512), allocate_pool((4, 512), torch.float32, CPU)
    arrivals, pushes = Log(), Log()
    to, origin = receiver(target, arrivals, config("shm")), sender(source, pushes, config("shm"))
    copied_by: list[str] = []
    copy = PageBuffer.copy_from

    def noted(self: PageBuffer, *arguments: Any) -> None:
        copied_by.append(threading.current_thread().name)
        copy(self, *arguments)

    monkeypatch.setattr(PageBuffer, "copy_from", noted)
    try:
        for number, has_room in enumerate((True, False)):
            monkeypatch.setattr(Channel, "has_room", lambda self, has_room=has_room: has_room)
            to.open(key(number), [PageId(number)])
            origin.open(key(number), to.offer(PREFILL, Epoch(1)))
            origin.push(key(number), 0, [PageId(0)], [PageId(number)])
            origin.finish(key(number))
            pushes.wait(lambda: len(pushes.done) == number + 1)  # noqa: B023
        assert copied_by == ["kv-sender", "kv-copy"]
        assert torch.equal(target[:2], source[:2])
    finally:
        origin.shutdown()
        to.shutdown()
