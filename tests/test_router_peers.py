"""Several routers: what each has under way is known to all, and a stream whose router dies goes on at another."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.types import Epoch, WorkerId
from penstock.v1 import inference_pb2
from router.inflight import NO_WORK, Work
from router.peer_load import STALE_S, PeerLoad
from tests.router_fakes import FakeAdmin, FakeWorker, running_router, until
from tests.test_router_grpc import collect, failure, finish_of, request

WORKER = WorkerId("decode-0")
REPORTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(1, 5)), max_size=30)


@given(reports=REPORTS)
def test_the_newest_report_of_each_peer_counts_in_whatever_order_they_come(reports: list[tuple[str, int, int]]) -> None:
    load = PeerLoad()
    newest: dict[str, tuple[int, int]] = {}
    for peer, epoch, number in reports:
        load.apply(peer, Epoch(epoch), number, {WORKER: Work(num_requests=10 * epoch + number)}, now_s=1.0)
        newest[peer] = max(newest.get(peer, (0, 0)), (epoch, number))
    wanted = sum(10 * epoch + number for epoch, number in newest.values())
    assert load.sent_to(WORKER, 1.0).num_requests == wanted
    assert load.sent_to(WorkerId("other"), 1.0) == NO_WORK
    assert load.sent_to(WORKER, 1.0 + STALE_S) == NO_WORK
    for peer in "ab":
        load.drop(peer)
    assert load.sent_to(WORKER, 1.0) == NO_WORK


async def test_routers_know_what_the_others_have_sent() -> None:
    """The worker's reports show nothing here: it never leaves the fake's first load."""
    admin = await FakeAdmin().start()
    worker = await FakeWorker(pause_at=0).start()
    admin.set(worker)
    async with running_router(worker, admin=admin) as first:
        ledger, far = first.server.fleet.ledger, first.server.fleet
        ledger.on_report = lambda worker_id, now_s: None  # type: ignore[method-assign]
        async with running_router(admin=admin, wait=False) as second:
            await until(lambda: second.server.generator.ready)
            call = first.stub.Generate(request(token_ids=[300] * 40))
            await worker.until(lambda one: len(one.submits) == 1)
            near = second.server.fleet
            await until(lambda: near.sent_to(WORKER, time.monotonic()) == Work(1, 3, 40))
            assert far.sent_to(WORKER, time.monotonic()) == Work(1, 3, 40)  # its own, not told back to it
            worker.resume.set()
            await collect(call)
            await until(lambda: near.sent_to(WORKER, time.monotonic()) == NO_WORK)
        await until(lambda: not far.peers._tasks)
    await admin.stop()


@pytest.mark.parametrize("cut", [0, 1, 7, 19])
@pytest.mark.parametrize("stop", [[], ["zzz"]])
async def test_a_stream_goes_on_where_another_router_left_it(cut: int, stop: list[str]) -> None:
    worker = await FakeWorker(pause_at=None).start()
    async with running_router(worker) as first, running_router(worker) as second:
        whole = request(token_ids=[300] * 20, max_tokens=20, seed=5, temperature=1.0, n=2, stop=stop)
        wanted = await collect(first.stub.Generate(whole))
        texts, tokens = ["", ""], [[], []]
        finished = [False, False]
        call = first.stub.Generate(whole)
        while cut and min(len(one) for one in tokens) < cut:
            message = await call.read()
            tokens[message.index] += message.token_ids
            texts[message.index] += message.text
            finished[message.index] |= bool(message.finish_reason)
        call.cancel()
        rest = inference_pb2.GenerateRequest()
        rest.CopyFrom(whole)
        for index in range(2):
            rest.emitted.add(index=index, token_ids=tokens[index], finished=finished[index])
        if all(finished):
            assert isinstance(await failure(second.stub.Generate(rest)), InvalidInput)
            return
        messages = await collect(second.stub.Generate(rest))
        for message in messages:
            tokens[message.index] += message.token_ids
            texts[message.index] += message.text
        for index in range(2):
            mine = [message for message in wanted if message.index == index]
            assert tokens[index] == [token for message in mine for token in message.token_ids]
            assert texts[index] == "".join(message.text for message in mine)
        assert finish_of(messages[-1]) == "length"
        assert messages[-1].usage.completion_tokens == 40


@pytest.mark.parametrize(
    ("emitted", "field"),
    [
        ([(1, [5], False)], "emitted[0].index"),
        ([(0, [5], False), (0, [5], False)], "emitted[1].index"),
        ([(0, [1 << 30], False)], "emitted[0].token_ids"),
        ([(0, [5] * 16, False)], "emitted[0].token_ids"),
        ([(0, [5], True)], "emitted"),
    ],
)
async def test_what_cannot_have_been_emitted_is_refused_by_name(
    emitted: list[tuple[int, list[int], bool]], field: str
) -> None:
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        wrong = request("x", max_tokens=16, seed=1)
        for index, token_ids, finished in emitted:
            wrong.emitted.add(index=index, token_ids=token_ids, finished=finished)
        error = await failure(router.stub.Generate(wrong))
        assert isinstance(error, InvalidInput)
        assert error.field == field
