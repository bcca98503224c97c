"""Tests streams whose sequence migrates: they continue at the new worker, or anywhere with the tokens they have."""

from __future__ import annotations

import asyncio

from penstock.types import WorkerLoad
from penstock.v1 import worker_pb2
from tests.router.api.test_grpc_service import collect, request
from tests.support.router.router_fakes import FakeWorker, expected_tokens, running_router

MOVE_AT = 4  # in output tokens
TICKET = "a ticket"


class MovingWorker(FakeWorker):
    """Reports after a few tokens that its first sequence has migrated."""

    move_to: worker_pb2.Migrated | None = None

    async def _generate(self, submit: worker_pb2.DecodeSubmit, frames: asyncio.Queue[worker_pb2.StepFrame]) -> None:
        if self.move_to is None:
            await super()._generate(submit, frames)
            return
        tokens = expected_tokens(submit, MOVE_AT)
        last = worker_pb2.StepDelta(stream_id=submit.stream_id, migrated=self.move_to)
        self.move_to = None
        deltas = [worker_pb2.StepDelta(stream_id=submit.stream_id, token_ids=[token]) for token in tokens]
        for delta in [*deltas, last]:
            frames.put_nowait(worker_pb2.StepFrame(deltas=[delta]))
        self.running.pop(submit.stream_id, None)


def moved_to(worker: FakeWorker, epoch: int) -> worker_pb2.Migrated:
    return worker_pb2.Migrated(worker_id=worker.worker_id, epoch=epoch, address=worker.address, ticket=TICKET)


async def pair() -> tuple[MovingWorker, FakeWorker]:
    """Starts two workers; the second looks so loaded that every request goes to the first."""
    source, target = MovingWorker("decode-0", epoch=1), FakeWorker("decode-1", epoch=2, pause_at=MOVE_AT + 1)
    target.load = WorkerLoad(free_pages=1, total_pages=1000, num_running=60, num_waiting=500, step_s=1.0)
    await source.start()
    await target.start()
    return source, target


async def test_the_stream_follows_its_sequence() -> None:
    source, target = await pair()
    source.move_to = moved_to(target, 2)
    target.pause_at = None
    async with running_router(source, target) as router:
        messages = await collect(router.stub.Generate(request("move on", max_tokens=12)))
    (submit,) = target.submits
    assert (submit.ticket, len(submit.token_ids) - submit.num_prompt_tokens) == (TICKET, MOVE_AT)
    assert (submit.salt, submit.sampling) == (source.submits[0].salt, source.submits[0].sampling)
    tokens = [token for message in messages for token in message.token_ids]
    assert tokens == expected_tokens(source.submits[0], 12)
    assert all(message.token_ids or message.finish_reason for message in messages)
    assert (messages[-1].timing.decode_worker, messages[-1].timing.num_redispatches) == ("decode-1", 0)


async def test_an_unreachable_target_leads_to_a_redispatch_and_loses_no_token() -> None:
    source, target = await pair()
    source.move_to = moved_to(target, 99)  # an epoch that this router does not know
    async with running_router(source, target) as router:
        target.pause_at = None
        messages = await collect(router.stub.Generate(request("move on", max_tokens=12)))
    (submit,) = [*source.submits[1:], *target.submits]
    assert (submit.ticket, len(submit.token_ids) - submit.num_prompt_tokens) == ("", MOVE_AT)
    tokens = [token for message in messages for token in message.token_ids]
    assert tokens == expected_tokens(source.submits[0], 12)
    assert messages[-1].timing.num_redispatches == 1


async def test_a_target_that_dies_after_the_migration_is_redispatched_like_any_other() -> None:
    source, target = await pair()
    source.move_to = moved_to(target, 2)
    async with running_router(source, target) as router:
        call = router.stub.Generate(request("move on", max_tokens=12))
        await target.until(lambda worker: bool(worker.submits))
        await target.stop()
        messages = await collect(call)
    tokens = [token for message in messages for token in message.token_ids]
    assert tokens == expected_tokens(source.submits[0], 12)
    assert messages[-1].timing.num_redispatches == 1
