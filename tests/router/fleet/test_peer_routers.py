"""Tests several routers: each knows what all have in flight, and a dead router's stream continues at another."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput, Overloaded
from penstock.types import Epoch, WorkerId
from penstock.v1 import inference_pb2
from router.admission import shared_quotas
from router.admission.shared_quotas import SharedQuotas
from router.fleet.tenant_use import TenantUse
from router.routing.costs.inflight import NO_WORK, STALE_S, InflightWork, PeerInflight
from tests.router.api.test_grpc_service import collect, failure, finish_of, request
from tests.support.router.router_fakes import FakeAdmin, FakeWorker, running_router, until

WORKER = WorkerId("decode-0")
REPORTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(1, 5)), max_size=30)


@given(reports=REPORTS)
def test_each_peers_newest_report_counts_in_any_order_of_arrival(reports: list[tuple[str, int, int]]) -> None:
    """Numbers order the reports of an epoch; among epochs, the one that appeared last counts, whatever its value."""
    load = PeerInflight()
    seen: dict[str, dict[int, int]] = {}  # the highest number of each epoch, in the order of their appearance
    for peer, epoch, number in reports:
        load.apply(peer, Epoch(epoch), number, {WORKER: InflightWork(num_requests=10 * epoch + number)}, now_s=1.0)
        epochs = seen.setdefault(peer, {})
        epochs[epoch] = max(epochs.get(epoch, 0), number)
    newest = [list(epochs.items())[-1] for epochs in seen.values()]
    wanted = sum(10 * epoch + number for epoch, number in newest)
    assert load.sent_to(WORKER, 1.0).num_requests == wanted
    own, workers = [InflightWork(2, 3, 4), NO_WORK], [WORKER, WorkerId("other")]
    assert load.added_to(own, workers, 1.0) == [own[0] + load.sent_to(WORKER, 1.0), NO_WORK]
    assert load.added_to(own, workers, 1.0 + STALE_S) == own
    assert load.sent_to(WorkerId("other"), 1.0) == NO_WORK
    assert load.sent_to(WORKER, 1.0 + STALE_S) == NO_WORK
    for peer in "ab":
        load.drop(peer)
    assert load.sent_to(WORKER, 1.0) == NO_WORK


async def test_routers_know_what_the_others_have_sent() -> None:
    """The fake worker always reports the same load, so only ledgers show what was sent."""
    admin = await FakeAdmin().start()
    worker = await FakeWorker(pause_at=0).start()
    admin.set(worker)
    async with running_router(worker, admin=admin) as first:
        ledger, far = first.server.fleet.ledger, first.server.fleet
        ledger.on_report = lambda worker_id, now_s: None  # type: ignore[method-assign]
        async with running_router(admin=admin, wait=False) as second:
            await until(lambda: second.server.preparer.ready)
            call = first.stub.Generate(request(token_ids=[300] * 40))
            await worker.until(lambda fake: len(fake.submits) == 1)
            near = second.server.fleet
            await until(lambda: near.sent_to(WORKER, time.monotonic()) == InflightWork(1, 3, 40))
            assert far.sent_to(WORKER, time.monotonic()) == InflightWork(
                1, 3, 40
            )  # its own work is not reported back to it
            worker.resume.set()
            await collect(call)
            await until(lambda: near.sent_to(WORKER, time.monotonic()) == NO_WORK)
        await until(lambda: not far.peers._tasks)
    await admin.stop()


async def test_a_tenants_limits_hold_across_routers() -> None:
    """A tenant sends its first request to one router and its second to the other, which must count both."""
    admin = await FakeAdmin().start()
    worker = await FakeWorker(pause_at=0).start()
    admin.set(worker)
    limits = {"tenant": {"max_requests": 1, "max_inflight_tokens": 100, "tokens_per_s": 0.001, "burst_tokens": 1000}}
    async with running_router(worker, admin=admin, admission=limits) as first:
        async with running_router(admin=admin, wait=False, admission=limits) as second:
            await until(lambda: second.server.preparer.ready)
            far = second.server.context.gate.admission.accounts
            await until(lambda: first.server.fleet.peers._tasks and second.server.fleet.peers._tasks)
            await until(lambda: len(far._shared._peers) == 1)  # its first report has arrived
            call = first.stub.Generate(request(token_ids=[300] * 40, max_tokens=20))
            await worker.until(lambda fake: len(fake.submits) == 1)
            await until(lambda: far.num_requests("") == 1)
            error = await failure(second.stub.Generate(request(token_ids=[300], max_tokens=1)))
            assert isinstance(error, Overloaded)
            assert "this tenant has reached its limit of 1 requests in flight" in error.message
            assert not far.fits("", 41)
            assert far.fits("", 40)
            worker.resume.set()
            await collect(call)
            await until(lambda: far.num_requests("") == 0)
            await until(lambda: far.rate_wait_s("", 1000, time.monotonic()) > 59_000)  # 60 tokens are spent
            assert far.rate_wait_s("", 940, time.monotonic()) == 0
            worker.resume.clear()
            held = first.stub.Generate(request(token_ids=[300] * 40, max_tokens=20))
            await until(lambda: far.num_requests("") == 1)
            await first.server.stop()  # a router that has ended holds nothing
            await until(lambda: far.num_requests("") == 0)
            held.cancel()
    await admin.stop()


def test_quotas_count_each_reachable_routers_newest_report() -> None:
    shared = SharedQuotas()
    assert shared.apply("a", Epoch(1), {"t": TenantUse(2, 100, 500)}) == {}  # its past is not charged
    assert shared.apply("b", Epoch(1), {"t": TenantUse(1, 10, 0), "u": TenantUse(1)}) == {}
    assert shared.elsewhere("t") == TenantUse(3, 110)
    assert shared.apply("a", Epoch(1), {"t": TenantUse(0, 0, 480)}) == {"t": -20}  # a refund
    assert shared.elsewhere("t") == TenantUse(1, 10)
    shared.away("b")
    assert shared.elsewhere("t") == TenantUse()
    assert shared.apply("b", Epoch(1), {"t": TenantUse(1, 10, 70)}) == {"t": 70}  # spent while it was unreachable
    assert shared.apply("b", Epoch(2), {"t": TenantUse(5, 5, 9000)}) == {}  # it has restarted
    assert shared.elsewhere("t") == TenantUse(5, 5)
    assert shared.apply("b", Epoch(2), {"t": TenantUse(5, 5, 9100)}) == {"t": 100}
    shared.away("unknown")


def test_quotas_remember_a_bounded_number_of_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_quotas, "_MAX_PEERS", 3)
    shared = SharedQuotas()
    for number in range(3):
        shared.apply(f"router {number}", Epoch(1), {"t": TenantUse(1)})
    assert shared.elsewhere("t") == TenantUse(3)
    shared.apply("router 3", Epoch(1), {"t": TenantUse(4)})
    assert shared.elsewhere("t") == TenantUse(6)


@pytest.mark.parametrize("cut", [0, 1, 7, 19])
@pytest.mark.parametrize("stop", [[], ["zzz"]])
async def test_a_stream_continues_where_another_router_left_it(cut: int, stop: list[str]) -> None:
    worker = await FakeWorker(pause_at=None).start()
    async with running_router(worker) as first, running_router(worker) as second:
        whole = request(token_ids=[300] * 20, max_tokens=20, seed=5, temperature=1.0, n=2, stop=stop)
        wanted = await collect(first.stub.Generate(whole))
        texts, tokens = ["", ""], [[], []]
        finished = [False, False]
        call = first.stub.Generate(whole)
        while cut and min(len(token_ids) for token_ids in tokens) < cut:
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
async def test_impossible_emitted_tokens_are_refused_by_field(
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
