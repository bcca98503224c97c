"""Overload end to end: five times the capacity, in virtual time and through a real router over fake workers."""

from __future__ import annotations

import asyncio
import random

import grpc
import httpx
import pytest

from penstock.admission_config import AdmissionConfig
from penstock.async_client import AsyncClient
from penstock.errors import DeadlineExceeded, InvalidInput, Overloaded, Unavailable, from_rpc_error
from penstock.retry import RetryBudget
from penstock.secret import digest_of, make_api_key
from penstock.types import Lane, WorkerLoad
from penstock.v1 import common_pb2, inference_pb2
from router.fleet_state import OthersOut
from tests.admission_world import Arrival, World, percentile, poisson
from tests.router_fakes import FakeWorker, finish_of, running_router, until
from tests.test_router_grpc import collect, failure, request

SECONDS = 60.0
MIX = ((Lane.INTERACTIVE, 0.3, 20.0), (Lane.STANDARD, 0.5, 60.0), (Lane.BULK, 0.2, 600.0))


def at_load(multiple, seed=1, config=None):
    """A minute of all lanes at so many times what the fleet can do."""
    world = World(seed=seed, config=config or AdmissionConfig())
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
    assert percentile(first_token_waits(world, Lane.INTERACTIVE), 0.99) <= config.interactive.max_wait_s + 1.0
    assert all(world.most_waiting[lane] <= config.lane(lane).max_queue for lane in Lane)
    refused = [fate for fate in world.fates if fate.refused is not None]
    assert len(refused) > 2000
    assert all(fate.refused.retry_after_s > 0 for fate in refused)
    at_once = sum(fate.refused_s == fate.ask.arrived_s for fate in refused)
    assert at_once >= 0.95 * len(refused)
    assert not any(fate.too_late for fate in world.fates)
    assert max(level for _, level in world.levels) == 3
    assert {fate.ask.lane for fate in world.fates if fate.good} == set(Lane)  # nobody starves


def test_below_capacity_nothing_waits_and_nobody_is_refused():
    world = at_load(0.5)
    assert not any(fate.refused for fate in world.fates)
    assert all(fate.sent_s == fate.ask.arrived_s for fate in world.fates)
    assert all(level == 0 for _, level in world.levels)


def test_after_a_burst_everything_is_as_before():
    world = World()
    burst = [Arrival(1.0 + number / 400) for number in range(2000)]
    calm = [Arrival(100.0 + number, output_tokens=400) for number in range(10)]
    world.run(burst + calm, 120.0)
    assert max(level for _, level in world.levels) == 3
    assert world.levels[-1][1] == 0
    assert all(fate.good and fate.max_tokens == 4096 for fate in world.fates[-10:])
    assert world.admission.num_inside == 0


def test_without_admission_five_times_the_capacity_would_waste_the_work():
    """What the others are measured against: no limit on what is out, no refusal."""
    everything = {"max_queue": 10**6, "max_wait_s": 1e6, "shed_from": 0.99}
    config = AdmissionConfig.model_validate(
        {
            "interactive": everything,
            "standard": everything,
            "bulk": everything,
            "slot_headroom": 1e6,
            "prefill_queue_s": 1e6,
            "overload": {"shorten_at": 9, "pause_bulk_at": 9, "refuse_at": 9},
        }
    )
    world = World(seed=1, config=config)
    rng = random.Random(1)
    capacity = world.fleet.capacity_per_s(500, 100)
    world.run(poisson(rng, capacity * 5, SECONDS, Arrival(0.0, timeout_s=10.0)), SECONDS)
    assert goodput(world) < 0.5 * capacity


# A real router.


async def crowded(slots=2):
    """A worker of few slots that keeps what it gets until `resume`."""
    worker = FakeWorker(pause_at=1)
    worker._description.max_running = slots
    worker.load = WorkerLoad(free_pages=1000, total_pages=1000, step_s=0.001)
    return await worker.start()


def ask(lane=common_pb2.LANE_UNSPECIFIED, max_tokens=2, **fields):
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, seed=7)
    return inference_pb2.GenerateRequest(token_ids=[5, 6, 7], sampling=sampling, lane=lane, **fields)


async def fill(router, worker):
    """Calls that are out at the worker, as many as go out."""
    calls = []
    while router.server.generator.gate.admission.num_waiting == 0:
        call = router.stub.Generate(ask())
        calls.append(call)
        await until(lambda: sum(map(len, [worker.submits])) + _waiting(router) >= len(calls))
    calls.pop().cancel()
    await until(lambda: _waiting(router) == 0)
    return calls


def _waiting(router):
    return router.server.generator.gate.admission.num_waiting


async def test_the_queue_stands_in_the_router_and_interactive_requests_leave_it_first():
    worker = await crowded()
    async with running_router(worker) as router:
        calls = await fill(router, worker)
        assert len(calls) == 4  # two slots, two on their way
        lanes = (common_pb2.LANE_BULK, common_pb2.LANE_STANDARD, common_pb2.LANE_INTERACTIVE)
        for number, lane in enumerate(lanes):
            calls.append(router.stub.Generate(ask(lane, request_id=f"lane-{lane}")))
            await until(lambda number=number: _waiting(router) == number + 1)
        first = next(iter(worker.submits)).stream_id
        calls[0].cancel()
        await worker.until(lambda one: first in one.cancelled)
        await worker.until(lambda one: one.submits[-1].request_id == f"lane-{common_pb2.LANE_INTERACTIVE}")
        assert _waiting(router) == 2
        worker.resume.set()
        for call in calls[1:]:
            assert finish_of((await collect(call))[-1]) == "length"
        gate = router.server.generator.gate
        await until(lambda: gate.admission.num_inside == 0)
        assert gate.admission.out.num_sequences == 0


async def test_whoever_leaves_the_queue_is_forgotten():
    worker = await crowded()
    async with running_router(worker) as router:
        await fill(router, worker)
        call = router.stub.Generate(ask())
        await until(lambda: _waiting(router) == 1)
        num_submits = len(worker.submits)
        call.cancel()
        await until(lambda: _waiting(router) == 0)
        worker.resume.set()
        gate = router.server.generator.gate
        await until(lambda: gate.admission.num_inside == 0)
        assert len(worker.submits) == num_submits


async def test_a_deadline_that_passes_in_the_queue_ends_the_call_there():
    worker = await crowded()
    async with running_router(worker) as router:
        await fill(router, worker)
        num_submits = len(worker.submits)
        error = await failure(router.stub.Generate(ask(), timeout=0.3))
        assert isinstance(error, DeadlineExceeded)
        await until(lambda: _waiting(router) == 0)
        assert len(worker.submits) == num_submits
        async with httpx.AsyncClient(base_url=router.http_url) as http:
            body = {"prompt": [5, 6], "max_tokens": 2}
            answer = await http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.2"})
        assert answer.status_code == 504
        assert int(answer.headers["retry-after"]) >= 1
        assert "deadline has passed in the queue" in answer.json()["error"]["message"]


async def test_a_full_lane_refuses_with_retry_info_and_retry_after():
    worker = await crowded()
    async with running_router(worker, admission={"standard": {"max_queue": 1}}) as router:
        await fill(router, worker)
        waiting = router.stub.Generate(ask())
        await until(lambda: _waiting(router) == 1)
        error = await failure(router.stub.Generate(ask()))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        async with httpx.AsyncClient(base_url=router.http_url) as http:
            answer = await http.post("/v1/completions", json={"prompt": [5, 6], "stream": True})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            metrics = (await http.get("/metrics")).text
        assert 'penstock:admission_queue_depth{lane="standard",model_name="penstock-tiny"} 1.0' in metrics
        refusals = 'penstock:admission_refusals_total{lane="standard",model_name="penstock-tiny",reason="queue_full"}'
        assert f"{refusals} 2.0" in metrics
        assert 'penstock:admission_requests_out{model_name="penstock-tiny"} 4.0' in metrics
        waiting.cancel()


async def test_shortened_answers_are_told_in_trailers_and_headers():
    worker = await FakeWorker().start()
    overload = {"max_tokens": 3, "hold_s": 1000.0}
    async with running_router(worker, admission={"overload": overload}) as router:
        router.server.generator.gate.admission._overload.saturation = 0.75
        router.server.generator.gate.admission._overload.level = 1
        call = router.stub.Generate(ask(max_tokens=10))
        messages = await collect(call)
        assert sum(len(message.token_ids) for message in messages) == 3
        assert finish_of(messages[-1]) == "length"
        assert ("penstock-max-tokens", "3") in tuple(await call.trailing_metadata())
        async with httpx.AsyncClient(base_url=router.http_url) as http:
            for stream in (False, True):
                body = {"prompt": [5, 6], "max_tokens": 10, "stream": stream}
                answer = await http.post("/v1/completions", json=body)
                assert answer.headers["x-penstock-max-tokens"] == "3"
            short = await http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
        assert "x-penstock-max-tokens" not in short.headers


async def test_a_lane_is_named_over_http_and_bad_names_are_refused_by_field():
    worker = await FakeWorker().start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url) as http:

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


async def test_a_stream_that_goes_on_from_another_router_keeps_the_length_it_was_promised():
    worker = await FakeWorker().start()
    async with running_router(worker, admission={"overload": {"max_tokens": 3, "hold_s": 1000.0}}) as router:
        router.server.generator.gate.admission._overload.saturation = 0.75
        router.server.generator.gate.admission._overload.level = 1
        resumed = ask(max_tokens=10)
        resumed.emitted.add(token_ids=[400, 401, 402, 403])
        messages = await collect(router.stub.Generate(resumed))
        assert sum(len(message.token_ids) for message in messages) == 6
        assert finish_of(messages[-1]) == "length"


async def test_a_tenants_limits_hold_for_whoever_has_its_key():
    keys = {name: make_api_key() for name in ("small", "large")}
    tenants = {name: {"keys": [digest_of(key)]} for name, key in keys.items()}
    tenants["small"] |= {"tokens_per_s": 0.5, "burst_tokens": 10}
    worker = await FakeWorker().start()
    async with running_router(worker, tenants=tenants) as router:
        async with AsyncClient(router.grpc_address, api_key=keys["small"]) as small:
            await small.complete([5, 6, 7], max_tokens=5, ignore_eos=True)
            with pytest.raises(Overloaded, match="tokens/s are used up") as caught:
                await small.complete([5, 6, 7], max_tokens=5, ignore_eos=True)
            assert caught.value.retry_after_s > 1.0
        async with AsyncClient(router.grpc_address, api_key=keys["large"]) as large:
            assert (await large.complete([5, 6, 7], max_tokens=5, ignore_eos=True)).usage.completion_tokens == 5


async def test_a_lane_may_bound_its_answers():
    worker = await FakeWorker().start()
    async with running_router(worker, admission={"standard": {"max_tokens": 5}}) as router:
        error = await failure(router.stub.Generate(ask(max_tokens=6)))
        assert isinstance(error, InvalidInput)
        assert error.field == "sampling.max_tokens"
        unbounded = inference_pb2.GenerateRequest(token_ids=[5])
        messages = await collect(router.stub.Generate(unbounded))
        assert sum(len(message.token_ids) for message in messages) == 5


async def test_a_burst_of_five_times_the_room_is_served_in_part_and_refused_with_hints():
    """Real calls: every one ends, served or refused at once with a hint, and the workers never hold more than room."""
    worker = FakeWorker(step_s=0.002)
    worker._description.max_running = 4
    most_running = 0
    await worker.start()
    lanes = {lane.value: {"max_queue": 4} for lane in Lane}
    async with running_router(worker, admission=lanes) as router:

        async def one(number):
            nonlocal most_running
            try:
                messages = await collect(router.stub.Generate(ask(1 + number % 3, max_tokens=4)))
            except grpc.RpcError as error:
                return from_rpc_error(error)
            most_running = max(most_running, len(worker.running))
            return messages

        results = await asyncio.gather(*(one(number) for number in range(90)))
        refused = [one for one in results if isinstance(one, Exception)]
        served = [one for one in results if not isinstance(one, Exception)]
        assert len(served) >= 18  # the room, and the queues
        assert all(isinstance(one, Overloaded) and one.retry_after_s > 0 for one in refused)
        assert all(finish_of(one[-1]) == "length" for one in served)
        assert most_running <= 6
        gate = router.server.generator.gate
        await until(lambda: gate.admission.num_inside == 0)


# Retry budgets.


def test_retries_are_a_share_of_recent_successes():
    budget = RetryBudget(share=0.2, reserve=2.0, window_s=10.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(11):
        budget.succeed(0.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert budget.take(10.0)  # most of the reserve has come back
    assert not budget.take(10.0)


async def test_moves_to_other_workers_are_bounded_by_the_budget():
    """Two workers that refuse everything: the budget ends the amplification, not each request's own limit."""
    workers = [await FakeWorker(f"decode-{n}", epoch=n + 1, refuse_with=Unavailable("busy")).start() for n in range(2)]
    async with running_router(*workers, admission={"retry_reserve": 3, "retry_share": 0.0}) as router:
        for _ in range(6):
            error = await failure(router.stub.Generate(request("hello")))
            assert isinstance(error, Unavailable)
        assert sum(len(worker.submits) for worker in workers) <= 6 + 3 + 1
        assert error.retry_after_s is not None


def test_what_others_have_out_is_what_reports_show_for_a_second():
    others = OthersOut()
    assert others.observe(10, 10, 0.0) == 0
    assert others.observe(10, 2, 0.5) == 0  # our own ended a moment ago, and reports lag
    assert others.observe(8, 2, 1.2) == 6
    assert others.observe(2, 2, 1.3) == 0
