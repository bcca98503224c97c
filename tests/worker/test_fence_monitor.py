"""Tests what lifts the fence of a lost transfer: an answer, a refusal, or a proof that the sender cannot write; never
time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock import wire
from penstock.errors import TransferError
from penstock.types import Epoch, TransferId, TransferKey
from penstock.v1 import worker_pb2
from worker import fence_monitor
from worker.fence_monitor import MAX_GONE, FenceMonitor

SENDER = Epoch(1 << 40)
KEY = TransferKey(TransferId("t"), SENDER, Epoch(2))
WAIT_S = 60.0
Answer = worker_pb2.TransferStateResponse | grpc.StatusCode


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


class FakeSender:
    """Answers as the test sets, and counts the questions."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers  # the last answer is repeated
        self.num_asked = 0

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Any]:
        assert address == "sender:1"
        yield self

    def unary_unary(self, method: str, **kinds: object) -> Callable[..., Any]:
        async def call(request: worker_pb2.TransferStateRequest, timeout: float) -> worker_pb2.TransferStateResponse:
            assert wire.transfer_key_from_wire(request.transfer) == KEY
            answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
            self.num_asked += 1
            if isinstance(answer, worker_pb2.TransferStateResponse):
                return answer
            raise grpc.aio.AioRpcError(
                answer, grpc.aio.Metadata(), grpc.aio.Metadata(), "connection refused" * _refuses(answer)
            )

        return call

    unary_stream = unary_unary


def _refuses(answer: grpc.StatusCode) -> bool:
    return answer is grpc.StatusCode.UNAVAILABLE


class FakeAccess:
    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.ends_by_tearing_down = False
        self.error: TransferError | None = None
        self.num_cut_off = self.num_torn_down = 0
        self.threads: set[int] = set()

    def cut_off(self, epoch: Epoch) -> bool:
        self.num_cut_off += 1
        return self._answer(epoch)

    def tear_down(self, epoch: Epoch) -> bool:
        self.num_torn_down += 1
        if self.error is not None:
            raise self.error
        self.is_open = self.is_open and not self.ends_by_tearing_down
        return self._answer(epoch)

    def _answer(self, epoch: Epoch) -> bool:
        assert epoch == SENDER
        self.threads.add(threading.get_ident())
        return not self.is_open


class Watched:
    """Holds a monitor that watches one transfer."""

    def __init__(self, sender: FakeSender, access: FakeAccess, pause_s: float = 0.001) -> None:
        self.quiet = asyncio.Event()
        self.monitor = FenceMonitor(sender.use, lambda key: self.quiet.set(), lambda: access, pause_s)
        self.monitor.watch(KEY, "sender:1")

    async def is_lifted(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.quiet.wait()
        await until(lambda: not self.monitor.num_watched)


SILENT = grpc.StatusCode.DEADLINE_EXCEEDED


def state(epoch: Epoch = SENDER, *, is_open: bool = True) -> worker_pb2.TransferStateResponse:
    return worker_pb2.TransferStateResponse(epoch=epoch, open=is_open)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_monitor, "_LONGEST_PAUSE_S", 0.005)


@pytest.mark.parametrize("last", [state(is_open=False), state(Epoch(7))])
async def test_an_answer_lifts_the_fence_and_disconnects_nobody(last: Answer) -> None:
    access, sender = FakeAccess(is_open=False), FakeSender(state(), SILENT, SILENT, state(), SILENT, SILENT, last)
    await Watched(sender, access).is_lifted()
    assert (sender.num_asked, access.num_cut_off) == (7, 0)


async def test_a_silent_sender_that_cannot_write_loses_its_fence() -> None:
    access, sender = FakeAccess(is_open=False), FakeSender(SILENT)
    await Watched(sender, access).is_lifted()
    assert (sender.num_asked, access.num_cut_off, access.num_torn_down) == (3, 1, 0)
    assert access.threads.isdisjoint({threading.get_ident()}), "the event loop waits for answers of ranks"


async def test_a_silent_sender_that_can_write_keeps_its_fence_until_it_cannot() -> None:
    access, sender = FakeAccess(is_open=True), FakeSender(SILENT)
    watched = Watched(sender, access)
    await until(lambda: access.num_cut_off >= 20)
    assert not watched.quiet.is_set()
    assert access.num_torn_down == 0, "nobody has said that its machine is dead"
    access.is_open = False  # its kernel has closed the connection
    await watched.is_lifted()


async def test_a_dead_machine_is_disconnected_at_once_and_a_failure_keeps_the_fence() -> None:
    access, sender = FakeAccess(is_open=True), FakeSender(SILENT)
    access.ends_by_tearing_down, access.error = True, TransferError("the memory cannot be withdrawn")
    watched = Watched(sender, access, pause_s=3600.0)  # only the news of its death ends this pause
    await until(lambda: sender.num_asked == 1)
    watched.monitor.on_gone([Epoch(5)])
    await until(lambda: sender.num_asked == 2)
    assert access.num_torn_down == 0
    watched.monitor.on_gone([SENDER])
    await until(lambda: access.num_torn_down == 1)
    assert not watched.quiet.is_set()
    access.error = None
    watched.monitor.on_gone([SENDER])  # another notice makes it try again
    await watched.is_lifted()


async def test_news_from_before_the_loss_counts_too() -> None:
    access = FakeAccess(is_open=True)
    access.ends_by_tearing_down = True
    sender = FakeSender(SILENT)
    monitor = FenceMonitor(sender.use, lambda key: lifted.set(), lambda: access)
    lifted = asyncio.Event()
    monitor.on_gone([SENDER])
    monitor.watch(KEY, "sender:1")
    async with asyncio.timeout(WAIT_S):
        await lifted.wait()
    assert sender.num_asked == 0
    monitor.on_gone(map(Epoch, range(3 * MAX_GONE)))
    assert len(monitor._gone) == MAX_GONE


async def test_two_refusals_follow_without_the_long_pause_of_a_silent_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fence_monitor, "_LONGEST_PAUSE_S", 3600.0)
    access, pauses = FakeAccess(is_open=True), list[float]()
    sender = FakeSender(*[SILENT] * 12, grpc.StatusCode.UNAVAILABLE)

    async def wait(event: asyncio.Event, timeout_s: float) -> None:
        pauses.append(timeout_s)

    monkeypatch.setattr(fence_monitor, "_wait", wait)
    await Watched(sender, access, pause_s=1.0).is_lifted()
    assert max(pauses) > 1000.0
    assert pauses[-1] == 1.0, "a refusal is looked at again soon"
