"""Tests the link's rounds: deltas that arrive while requests write are held and delivered together, in order."""

from __future__ import annotations

import asyncio
import math

from penstock.errors import PenstockError
from penstock.types import WorkerId
from penstock.v1 import common_pb2, worker_pb2
from router.fleet.decode_link import DecodeLink


class _Stream:
    """Collects what the link delivers to one submission."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.lost: PenstockError | None = None
        self.changed = asyncio.Event()

    def deliver(self, item: worker_pb2.StepDelta | PenstockError) -> None:
        if isinstance(item, PenstockError):
            self.lost = item
        else:
            self.token_ids += item.token_ids
        self.changed.set()


class _Call:
    """Stands in for a Serve call; the test provides its frames."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[worker_pb2.StepFrame | None] = asyncio.Queue()

    def Serve(self) -> _Call:
        return self

    async def write(self, command: worker_pb2.DecodeCommand) -> None:
        """Drops the command."""

    def cancel(self) -> None:
        """Does nothing: the test ends the frames."""

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
            worker_pb2.StepDelta(stream_id=stream_id, token_ids=[token], finish_reason=reason)
            for stream_id, token in tokens.items()
        ]
        self.frames.put_nowait(worker_pb2.StepFrame(deltas=deltas))


async def _open(num_streams: int) -> tuple[_Call, DecodeLink, asyncio.Task[None], list[_Stream]]:
    call = _Call()
    link = DecodeLink(WorkerId("w"), lambda: None)
    running = asyncio.create_task(link.run(call))
    await asyncio.sleep(0)
    streams = [_Stream() for _ in range(num_streams)]
    for stream in streams:
        link.submit(worker_pb2.DecodeCommand(), stream.deliver)
    return call, link, running, streams


async def test_frames_of_a_burst_arrive_complete_and_in_order():
    call, link, running, streams = await _open(3)
    for token in range(50):
        call.send({1: token, 2: 100 + token, 3: 200 + token}, ends=token == 49)
    async with asyncio.timeout(60):
        await link.wait_idle()
    assert [stream.token_ids for stream in streams] == [[first + n for n in range(50)] for first in (0, 100, 200)]
    assert link._begun == set()
    running.cancel()


async def test_frames_during_a_round_are_held_but_first_tokens_are_not():
    _, link, running, (old, new) = await _open(2)
    link._receive(worker_pb2.StepFrame(deltas=[worker_pb2.StepDelta(stream_id=1, token_ids=[5])]))
    link._receive(
        worker_pb2.StepFrame(
            deltas=[
                worker_pb2.StepDelta(stream_id=1, token_ids=[6]),
                worker_pb2.StepDelta(stream_id=2, token_ids=[7]),
            ]
        )
    )
    assert (old.token_ids, new.token_ids) == ([5], [7])
    old.changed.clear()
    async with asyncio.timeout(60):
        await old.changed.wait()
    assert old.token_ids == [5, 6]
    running.cancel()


async def test_a_broken_link_delivers_what_it_held_before_it_reports_the_loss():
    call, link, running, (stream,) = await _open(1)
    for token in range(3):
        link._receive(worker_pb2.StepFrame(deltas=[worker_pb2.StepDelta(stream_id=1, token_ids=[token])]))
    call.frames.put_nowait(None)
    await running
    assert stream.token_ids == [0, 1, 2]
    assert stream.lost is not None


async def test_held_deltas_are_not_delivered_after_a_cancel():
    call, link, running, (stream,) = await _open(1)
    for token in range(2):
        link._receive(worker_pb2.StepFrame(deltas=[worker_pb2.StepDelta(stream_id=1, token_ids=[token])]))
    link.cancel(1)
    call.frames.put_nowait(None)
    await running
    assert stream.token_ids == [0]
    assert stream.lost is None


async def test_a_false_figure_of_a_worker_ends_at_the_link():
    """A single NaN would make the sums of the router's metrics NaN for ever."""
    call = _Call()
    link = DecodeLink(WorkerId("w"), lambda: None)
    running = asyncio.create_task(link.run(call))
    await asyncio.sleep(0)
    ended: asyncio.Future[worker_pb2.StepDelta] = asyncio.get_running_loop().create_future()
    link.submit(worker_pb2.DecodeCommand(), ended.set_result)
    timing = common_pb2.Timing(queue_ms=math.nan, prefill_ms=math.inf, decode_ms=-1.0, transfer_ms=4.0)
    last = worker_pb2.StepDelta(stream_id=1, finish_reason=common_pb2.FINISH_REASON_STOP, timing=timing)
    call.frames.put_nowait(worker_pb2.StepFrame(deltas=[last]))
    assert (await ended).timing == common_pb2.Timing(transfer_ms=4.0)
    call.frames.put_nowait(None)
    await running
