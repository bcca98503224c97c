"""Tests overload end to end: five times the capacity, in virtual time and through a real router with fake workers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time

import grpc
import httpx
import pytest

from penstock.client.async_client import AsyncClient
from penstock.client.retry import RetryBudget
from penstock.config.admission import AdmissionConfig, OverloadConfig
from penstock.errors import DeadlineExceeded, InvalidInput, Overloaded, Unavailable, from_rpc_error
from penstock.rpc.secret import digest_of, make_api_key
from penstock.types import Lane, WorkerLoad
from penstock.v1 import common_pb2, inference_pb2
from router.admission.fleet_summary import PeerSequenceEstimate
from router.admission.lane_queue import request_bytes
from tests.router.api.test_grpc_service import collect, failure, request
from tests.support.router.admission_world import Arrival, World, percentile, poisson
from tests.support.router.router_fakes import FakeAdmin, FakeWorker, finish_of, running_router, until

SECONDS = 60.0
SHED = AdmissionConfig(overload=OverloadConfig(shed=True, max_tokens=256))
MIX = ((Lane.INTERACTIVE, 0.3, 20.0), (Lane.STANDARD, 0.5, 60.0), (Lane.BULK, 0.2, 600.0))


def at_load(multiple, seed=1, config=None):
    """Runs a minute of all lanes at a multiple of the fleet's capacity."""
    world = World(seed=seed, config=config or SHED)
    rng = random.Random(seed)
    capacity = world.fleet.capacity_per_s(500, 100)
    arrivals = []
    for lane, share, timeout_s in MIX:
        arrivals += poisson(rng, capacity * multiple * share, SECONDS, Arrival(0.0, lane, timeout_s=timeout_s))
    world.run(arrivals, SECONDS)
    return world


def goodput(world):
    return sum(fate.good for fate in world.fates) / SECONDS


def first_token_waits(world, lane):
    return [
        fate.first_token_s - fate.ask.arrived_s
        for fate in world.fates
        if fate.ask.lane is lane and fate.first_token_s is not None
    ]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_at_five_times_the_capacity_goodput_holds_and_queues_are_bounded(seed):
    peak = max(goodput(at_load(multiple, seed)) for multiple in (0.9, 1.0, 1.2))
    world = at_load(5.0, seed)
    config = world.config
    assert goodput(world) >= 0.8 * peak
    assert percentile(first_token_waits(world, Lane.INTERACTIVE), 0.99) <= config.interactive.target_wait_s + 1.0
    assert all(world.most_waiting[lane] < 1000 for lane in Lane)
    refused = [fate for fate in world.fates if fate.refused is not None]
    assert len(refused) > 2000
    assert all(fate.refused.retry_after_s > 0 for fate in refused)
    at_once = sum(fate.refused_s == fate.ask.arrived_s for fate in refused)
    assert at_once >= 0.95 * len(refused)
    assert not any(fate.too_late for fate in world.fates)
    assert max(level for _, level in world.levels) == 3
    assert {fate.ask.lane for fate in world.fates if fate.good} == set(Lane)  # no lane starves


@pytest.mark.parametrize("seed", [1, 2])
def test_by_default_a_burst_of_five_times_the_capacity_is_answered_whole(seed):
    """Offers a minute's work in twelve seconds with the default deadline; all of it completes within the next
    minutes."""
    world = World(seed=seed, config=AdmissionConfig())
    rng = random.Random(seed)
    capacity = world.fleet.capacity_per_s(500, 300)
    arrivals = []
    for lane, share, _ in MIX:
        arrivals += poisson(rng, 5 * capacity * share, 12.0, Arrival(0.0, lane, output_tokens=300, timeout_s=600.0))
    world.run(arrivals, 300.0)
    assert max(world.most_waiting.values()) > 50
    assert all(fate.good and fate.max_tokens == 4096 for fate in world.fates)
    assert all(level == 0 for _, level in world.levels)


def test_below_capacity_no_request_waits_or_is_refused():
    world = at_load(0.5)
    assert not any(fate.refused for fate in world.fates)
    assert all(fate.sent_s == fate.ask.arrived_s for fate in world.fates)
    assert all(level == 0 for _, level in world.levels)


def test_the_level_returns_to_normal_after_a_burst():
    world = World(config=SHED)
    burst = [Arrival(1.0 + number / 400) for number in range(2000)]
    calm = [Arrival(100.0 + number, output_tokens=400) for number in range(10)]
    world.run(burst + calm, 120.0)
    assert max(level for _, level in world.levels) == 3
    assert world.levels[-1][1] == 0
    assert all(fate.good and fate.max_tokens == 4096 for fate in world.fates[-10:])
    assert world.admission.num_inside == 0


def test_without_admission_five_times_the_capacity_wastes_work():
    """This is the baseline of the other tests: no limit on outstanding requests, and no refusals."""
    config = AdmissionConfig(slot_headroom=1e6, prefill_queue_s=1e6)
    world = World(seed=1, config=config)
    rng = random.Random(1)
    capacity = world.fleet.capacity_per_s(500, 100)
    world.run(poisson(rng, capacity * 5, SECONDS, Arrival(0.0, timeout_s=10.0)), SECONDS)
    assert goodput(world) < 0.5 * capacity


# A real router.


async def slow_worker(slots=2):
    """Starts a worker with few slots that holds its requests until `resume` is set."""
    worker = FakeWorker(pause_at=1)
    worker._description.max_running = slots
    worker.load = WorkerLoad(free_pages=1000, total_pages=1000, step_s=0.001)
    return await worker.start()


def ask(lane=common_pb2.LANE_UNSPECIFIED, max_tokens=2, **fields):
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, seed=7)
    return inference_pb2.GenerateRequest(token_ids=[5, 6, 7], sampling=sampling, lane=lane, **fields)


async def fill(router, worker):
    """Sends calls until one is queued; returns those at the worker."""
    calls = []
    while router.server.context.gate.admission.num_waiting == 0:
        call = router.stub.Generate(ask())
        calls.append(call)
        await until(lambda: sum(map(len, [worker.submits])) + _waiting(router) >= len(calls))
    calls.pop().cancel()
    await until(lambda: _waiting(router) == 0)
    return calls


def _waiting(router):
    return router.server.context.gate.admission.num_waiting


async def test_requests_queue_in_the_router_and_interactive_ones_are_dispatched_first():
    worker = await slow_worker()
    async with running_router(worker) as router:
        calls = await fill(router, worker)
        assert len(calls) == 4  # two in slots and two on their way
        lanes = (common_pb2.LANE_BULK, common_pb2.LANE_STANDARD, common_pb2.LANE_INTERACTIVE)
        for number, lane in enumerate(lanes):
            calls.append(router.stub.Generate(ask(lane, request_id=f"lane-{lane}")))
            await until(lambda number=number: _waiting(router) == number + 1)
        first = next(iter(worker.submits)).stream_id
        calls[0].cancel()
        await worker.until(lambda fake: first in fake.cancelled)
        await worker.until(lambda fake: fake.submits[-1].request_id == f"lane-{common_pb2.LANE_INTERACTIVE}")
        assert _waiting(router) == 2
        worker.resume.set()
        for call in calls[1:]:
            assert finish_of((await collect(call))[-1]) == "length"
        gate = router.server.context.gate
        await until(lambda: gate.admission.num_inside == 0)
        assert gate.admission.outstanding.num_sequences == 0


async def test_a_request_cancelled_in_the_queue_is_forgotten():
    worker = await slow_worker()
    async with running_router(worker) as router:
        await fill(router, worker)
        call = router.stub.Generate(ask())
        await until(lambda: _waiting(router) == 1)
        num_submits = len(worker.submits)
        call.cancel()
        await until(lambda: _waiting(router) == 0)
        worker.resume.set()
        gate = router.server.context.gate
        await until(lambda: gate.admission.num_inside == 0)
        assert len(worker.submits) == num_submits


async def test_a_deadline_that_passes_in_the_queue_ends_the_call_there():
    worker = await slow_worker()
    async with running_router(worker) as router:
        await fill(router, worker)
        num_submits = len(worker.submits)
        error = await failure(router.stub.Generate(ask(), timeout=1.0))
        assert isinstance(error, DeadlineExceeded)
        await until(lambda: _waiting(router) == 0)
        assert len(worker.submits) == num_submits
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            body = {"prompt": [5, 6], "max_tokens": 2}
            answer = await http.post("/v1/completions", json=body, headers={"x-request-timeout": "1"})
        assert answer.status_code == 504
        assert int(answer.headers["retry-after"]) >= 1
        assert "deadline passed while it was queued" in answer.json()["error"]["message"]


async def test_a_full_lane_refuses_with_retry_info_and_retry_after():
    worker = await slow_worker()
    async with running_router(worker, admission={"standard": {"max_queue": 1}}) as router:
        await fill(router, worker)
        waiting = router.stub.Generate(ask())
        await until(lambda: _waiting(router) == 1)
        error = await failure(router.stub.Generate(ask()))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            answer = await http.post("/v1/completions", json={"prompt": [5, 6], "stream": True})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            metrics = (await http.get("/metrics")).text
        assert 'penstock:admission_queue_depth{lane="standard",model_name="penstock-tiny"} 1.0' in metrics
        refusals = 'penstock:admission_refusals_total{lane="standard",model_name="penstock-tiny",reason="queue_full"}'
        assert f"{refusals} 2.0" in metrics
        assert 'penstock:admission_requests_out{model_name="penstock-tiny"} 4.0' in metrics
        waiting.cancel()


async def test_a_shortened_answer_says_so_in_body_trailers_and_headers():
    worker = await FakeWorker().start()
    overload = {"max_tokens": 3, "hold_s": 1000.0}
    async with running_router(worker, admission={"overload": overload}) as router:
        router.server.context.gate.admission._overload.saturation = 0.75
        router.server.context.gate.admission._overload.level = 1
        call = router.stub.Generate(ask(max_tokens=10))
        messages = await collect(call)
        assert sum(len(message.token_ids) for message in messages) == 3
        assert finish_of(messages[-1]) == "length"
        assert ("penstock-max-tokens", "3") in tuple(await call.trailing_metadata())
        assert messages[-1].granted_max_tokens == 3
        assert not any(message.HasField("granted_max_tokens") for message in messages[:-1])
        short = await collect(router.stub.Generate(ask(max_tokens=2)))
        assert not short[-1].HasField("granted_max_tokens")
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            for path, body in (("completions", {"prompt": [5, 6], "max_tokens": 10}), ("chat/completions", chat)):
                for stream in (False, True):
                    answer = await http.post(f"/v1/{path}", json={**body, "stream": stream})
                    assert answer.headers["x-penstock-max-tokens"] == "3"
                    assert _last_choice(answer)["penstock"] == {"granted_max_tokens": 3}
            short = await http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
        assert "x-penstock-max-tokens" not in short.headers
        assert "penstock" not in _last_choice(short)


def _last_choice(answer):
    """Returns the choice of a whole answer, or that of a stream's last chunk."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return events[-1]["choices"][0]


async def test_a_burst_over_http_is_answered_whole_while_others_leave_after_one_token():
    """Sends 180 streams to two slots, beside 60 clients that read one token and disconnect."""
    worker = FakeWorker(step_s=0.001)
    worker._description.max_running = 2
    worker.load = WorkerLoad(free_pages=1000, total_pages=1000, step_s=0.001)
    await worker.start()
    limits = httpx.Limits(max_connections=None)
    async with (
        running_router(worker, default_timeout_s=300.0) as router,
        httpx.AsyncClient(base_url=router.http_url, timeout=300.0, limits=limits) as http,
    ):

        async def call(number):
            body = {"prompt": [5, 6, number], "max_tokens": 8, "stream": True, "ignore_eos": True}
            headers = {"x-penstock-lane": list(Lane)[number % 3].value}
            async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                if number % 3 == 0 and number < 180:
                    async for _ in answer.aiter_lines():
                        return None  # leaves
                text = (await answer.aread()).decode()
                return answer.status_code, text.count("data: {"), '"finish_reason":"length"' in text

        results = await asyncio.gather(*(call(number) for number in range(240)))
        stayed = [result for result in results if result is not None]
        assert len(stayed) == 180
        assert {(status, is_whole) for status, _, is_whole in stayed} == {(200, True)}
        gate = router.server.context.gate
        await until(lambda: gate.admission.num_inside == 0)
        assert gate.admission.level == 0
        metrics = (await http.get("/metrics")).text
    assert "penstock:admission_refusals_total{" not in metrics


async def test_queued_requests_are_reported_as_waiting_and_as_demand():
    worker = await slow_worker()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        await fill(router, worker)
        waiting = [router.stub.Generate(ask()) for _ in range(3)]
        await until(lambda: _waiting(router) == 3)
        report = router.server._demand()
        assert (report.waiting, report.waiting_tokens) == (3, 9)
        metrics = (await http.get("/metrics")).text
        assert 'vllm:num_requests_waiting{model_name="penstock-tiny"} 3.0' in metrics
        queued_bytes = re.search(r'penstock:admission_queue_bytes\{lane="standard",[^}]*\} (\S+)', metrics)
        assert float(queued_bytes[1]) == 3 * request_bytes(3)
        for call in waiting:
            call.cancel()


async def test_queued_requests_outlast_the_loss_of_the_only_worker():
    admin = await FakeAdmin().start()
    worker = await slow_worker()
    admin.set(worker)
    async with running_router(worker, admin=admin) as router:
        await fill(router, worker)
        call = router.stub.Generate(ask(max_tokens=5))
        await until(lambda: _waiting(router) == 1)
        await worker.stop()
        admin.set()
        await until(lambda: router.server.fleet.every_group() is None)
        gate = router.server.context.gate
        gate._poll(time.monotonic())
        assert _waiting(router) == 1
        successor = await FakeWorker(epoch=2).start()
        admin.set(successor)
        assert sum(len(message.token_ids) for message in await collect(call)) == 5
        await successor.stop()
    await admin.stop()


async def test_a_full_router_refuses_with_a_hint_from_its_rate():
    worker = await slow_worker()
    async with running_router(worker, max_inflight=5) as router:
        await fill(router, worker)
        waiting = router.stub.Generate(ask())
        await until(lambda: _waiting(router) == 1)
        error = await failure(router.stub.Generate(ask()))
        assert isinstance(error, Overloaded)
        assert "limit of 5 requests in flight" in error.message
        assert error.retry_after_s > 0
        waiting.cancel()


async def test_http_selects_a_lane_and_unknown_lanes_are_refused_by_field():
    worker = await FakeWorker().start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:

        async def post(headers=None, **fields):
            body = {"prompt": [5, 6], "max_tokens": 1, **fields}
            return await http.post("/v1/completions", json=body, headers=headers or {})

        for tier, lane in (("priority", 1), ("default", 2), ("flex", 3), ("auto", 2)):
            assert (await post(service_tier=tier)).status_code == 200
            assert worker.submits[-1].lane == lane
        assert (await post({"x-penstock-lane": "bulk"})).status_code == 200
        assert worker.submits[-1].lane == common_pb2.LANE_BULK
        for field, answer in (
            ("service_tier", await post(service_tier="gold")),
            ("x-penstock-lane", await post({"x-penstock-lane": "fast"})),
            ("x-penstock-lane", await post({"x-penstock-lane": "bulk"}, service_tier="priority")),
            ("x-request-timeout", await post({"x-request-timeout": "soon"})),
            ("x-request-timeout", await post({"x-request-timeout": "-1"})),
        ):
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field


async def test_a_stream_resumed_from_another_router_keeps_its_granted_length():
    worker = await FakeWorker().start()
    async with running_router(worker, admission={"overload": {"max_tokens": 3, "hold_s": 1000.0}}) as router:
        router.server.context.gate.admission._overload.saturation = 0.75
        router.server.context.gate.admission._overload.level = 1
        resumed = ask(max_tokens=10)
        resumed.emitted.add(token_ids=[400, 401, 402, 403])
        messages = await collect(router.stub.Generate(resumed))
        assert sum(len(message.token_ids) for message in messages) == 6
        assert finish_of(messages[-1]) == "length"


async def test_a_tenants_limits_apply_to_every_client_with_its_key():
    keys = {name: make_api_key() for name in ("small", "large")}
    tenants = {name: {"keys": [digest_of(key)]} for name, key in keys.items()}
    tenants["small"] |= {"tokens_per_s": 0.5, "burst_tokens": 10}
    worker = await FakeWorker().start()
    async with running_router(worker, tenants=tenants) as router:
        async with AsyncClient(router.grpc_address, api_key=keys["small"]) as small:
            await small.complete([5, 6, 7], max_tokens=5, ignore_eos=True)
            with pytest.raises(Overloaded, match="used up its rate of") as caught:
                await small.complete([5, 6, 7], max_tokens=5, ignore_eos=True)
            assert caught.value.retry_after_s > 1.0
        async with AsyncClient(router.grpc_address, api_key=keys["large"]) as large:
            assert (await large.complete([5, 6, 7], max_tokens=5, ignore_eos=True)).usage.completion_tokens == 5


async def test_a_lane_can_limit_max_tokens():
    worker = await FakeWorker().start()
    async with running_router(worker, admission={"standard": {"max_tokens": 5}}) as router:
        error = await failure(router.stub.Generate(ask(max_tokens=6)))
        assert isinstance(error, InvalidInput)
        assert error.field == "sampling.max_tokens"
        unbounded = inference_pb2.GenerateRequest(token_ids=[5])
        messages = await collect(router.stub.Generate(unbounded))
        assert sum(len(message.token_ids) for message in messages) == 5


async def test_a_burst_beyond_capacity_is_partly_served_and_refused_with_hints():
    """Each call ends, served or refused with a hint. Workers never exceed their room, which bulk leaves to others."""
    worker = FakeWorker(step_s=0.002)
    worker._description.max_running = 4
    most_running = 0
    await worker.start()
    lanes = {lane.value: {"max_queue": 4} for lane in Lane}
    async with running_router(worker, admission=lanes) as router:

        async def call(number):
            nonlocal most_running
            try:
                messages = await collect(router.stub.Generate(ask(1 + number % 3, max_tokens=4)))
            except grpc.RpcError as error:
                return from_rpc_error(error)
            bulk = {submit.stream_id for submit in worker.submits if submit.lane == common_pb2.LANE_BULK}
            most_running = max(most_running, len(worker.running.keys() - bulk))
            return messages

        results = await asyncio.gather(*(call(number) for number in range(90)))
        refused = [result for result in results if isinstance(result, Exception)]
        served = [result for result in results if not isinstance(result, Exception)]
        assert len(served) >= 18  # the slots and the queues
        assert all(isinstance(result, Overloaded) and result.retry_after_s > 0 for result in refused)
        assert all(finish_of(result[-1]) == "length" for result in served)
        assert most_running <= 6
        gate = router.server.context.gate
        await until(lambda: gate.admission.num_inside == 0)


# Retry budgets.


def test_retries_are_a_share_of_recent_successes():
    budget = RetryBudget(share=0.2, reserve=2.0, window_s=10.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(11):
        budget.succeed(0.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert budget.take(10.0)  # most of the reserve is restored
    assert not budget.take(10.0)


async def test_the_retry_budget_bounds_redispatches():
    """Two workers refuse everything; the retry budget, not each request's own limit, ends the retries."""
    workers = [await FakeWorker(f"decode-{n}", epoch=n + 1, refuse_with=Unavailable("busy")).start() for n in range(2)]
    async with running_router(*workers, admission={"retry_reserve": 3, "retry_share": 0.0}) as router:
        for _ in range(6):
            error = await failure(router.stub.Generate(request("hello")))
            assert isinstance(error, Unavailable)
        assert sum(len(worker.submits) for worker in workers) <= 6 + 3 + 1
        assert error.retry_after_s is not None


def test_reported_sequences_beyond_our_own_count_as_other_routers_after_a_second():
    others = PeerSequenceEstimate()
    assert others.observe(10, 10, 0.0) == 0
    assert others.observe(10, 2, 0.5) == 0  # our own sequence has just ended, and reports lag
    assert others.observe(8, 2, 1.2) == 6
    assert others.observe(2, 2, 1.3) == 0
