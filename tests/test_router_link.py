"""The link's waves: what comes while requests still write is held and dealt together, in order and without loss."""

from __future__ import annotations

import asyncio

from penstock.errors import PenstockError
from penstock.types import WorkerId
from penstock.v1 import common_pb2, worker_pb2
from router.link import Link


class _Sink:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.lost: PenstockError | None = None
        self.changed = asyncio.Event()

    def on_delta(self, delta: worker_pb2.StepDelta) -> None:
        self.token_ids += delta.token_ids
        self.changed.set()

    def on_lost(self, error: PenstockError) -> None:
        self.lost = error
        self.changed.set()


class _Call:
    """A Serve call whose frames the test makes."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[worker_pb2.StepFrame | None] = asyncio.Queue()

    def Serve(self) -> _Call:
        return self

    async def write(self, command: worker_pb2.DecodeCommand) -> None:
        """Into the void."""

    def cancel(self) -> None:
        """Nothing to end."""

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> worker_pb2.StepFrame:
        frame = await self.frames.get()
        if frame is None:
            raise StopAsyncIteration
        return frame

    def send(self, tokens: dict[int, int], ends: bool = False) -> None:
        reason = common_pb2.FINISH_REASON_LENGTH if ends else common_pb2.FINISH_REASON_UNSPECIFIED
        deltas = [
            worker_pb2.StepDelta(stream_id=one, token_ids=[token], finish_reason=reason)
            for one, token in tokens.items()
        ]
        self.frames.put_nowait(worker_pb2.StepFrame(deltas=deltas))


async def _open(num_sinks: int) -> tuple[_Call, Link, asyncio.Task[None], list[_Sink]]:
    call = _Call()
    link = Link(WorkerId("w"), lambda: None)
    running = asyncio.create_task(link.run(call))
    await asyncio.sleep(0)
    sinks = [_Sink() for _ in range(num_sinks)]
    for sink in sinks:
        link.submit(worker_pb2.DecodeCommand(), sink)
    return call, link, running, sinks


async def test_frames_of_a_burst_come_whole_and_in_order():
    call, link, running, sinks = await _open(3)
    for token in range(50):
        call.send({1: token, 2: 100 + token, 3: 200 + token}, ends=token == 49)
    async with asyncio.timeout(5):
        await link.wait_idle()
    assert [sink.token_ids for sink in sinks] == [[first + n for n in range(50)] for first in (0, 100, 200)]
    assert link._begun == set()
    running.cancel()


async def test_frames_during_a_wave_are_held_but_first_tokens_are_not():
    _, link, running, (old, new) = await _open(2)
    link._take(worker_pb2.StepFrame(deltas=[worker_pb2.StepDelta(stream_id=1, token_ids=[5])]))
    link._take(
        worker_pb2.StepFrame(
            deltas=[
                worker_pb2.StepDelta(stream_id=1, token_ids=[6]),
                worker_pb2.StepDelta(stream_id=2, token_ids=[7]),
            ]
        )
    )
    assert (old.token_ids, new.token_ids) == ([5], [7])
    old.changed.clear()
    async with asyncio.timeout(5):
        await old.changed.wait()
    assert old.token_ids == [5, 6]
    running.cancel()


async def test_a_broken_link_deals_what_it_held_before_it_tells_of_the_loss():
    call, link, running, (sink,) = await _open(1)
    for token in range(3):
        link._take(worker_pb2.StepFrame(deltas=[worker_pb2.StepDelta(stream_id=1, token_ids=[token])]))
    call.frames.put_nowait(None)
    await running
    assert sink.token_ids == [0, 1, 2]
    assert sink.lost is not None


async def test_nothing_held_comes_after_a_cancel():
    call, link, running, (sink,) = await _open(1)
    for token in range(2):
        link._take(worker_pb2.StepFrame(deltas=[worker_pb2.StepDelta(stream_id=1, token_ids=[token])]))
    link.cancel(1)
    call.frames.put_nowait(None)
    await running
    assert sink.token_ids == [0]
    assert sink.lost is None
