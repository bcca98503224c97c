"""Tests workers that die, refuse, return or are replaced: a stream never shows it, or ends with a clear error."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.config import RouterConfig
from penstock.errors import ConfigError, InternalError, Overloaded, Unavailable
from penstock.kv.page_hash import hash_pages, make_salt
from penstock.v1 import inference_pb2
from router.server import RouterServer
from tests.router.api.test_grpc_service import collect, failure, finish_of, read_tokens, request
from tests.support.router.router_fakes import (
    MODEL,
    PAGE_SIZE,
    FakeAdmin,
    FakeWorker,
    all_followed,
    expected_tokens,
    running_router,
    until,
)


def tokens_of(messages, index=0):
    return [token for message in messages if message.index == index for token in message.token_ids]


async def two_workers(**settings):
    return await FakeWorker("decode-0", epoch=1, **settings).start(), await FakeWorker(
        "decode-1", epoch=2, **settings
    ).start()


async def test_a_lost_worker_leaves_no_gap_in_the_stream():
    workers = await two_workers(pause_at=5)
    async with running_router(*workers) as router:
        call = router.stub.Generate(request("tell me", max_tokens=12, n=2))
        messages = await read_tokens(call, 10)
        victim, survivor = workers if workers[0].submits else workers[::-1]
        before = len(survivor.submits)
        lost = len(victim.submits)
        for worker in workers:
            worker.pause_at = None
        await victim.stop()
        survivor.resume.set()
        messages += await collect(call)
        assert len(survivor.submits) == before + lost
        moved = survivor.submits[before]
        assert moved.num_prompt_tokens == victim.submits[0].num_prompt_tokens
        assert len(moved.token_ids) == moved.num_prompt_tokens + 5
        submits = [submit for worker in workers for submit in worker.submits]
        first = {
            submit.sampling.seed: submit for submit in submits if len(submit.token_ids) == submit.num_prompt_tokens
        }
        for index in range(2):
            assert tokens_of(messages, index) == expected_tokens(first[7 + index], 12)
        redispatches = [message.timing.num_redispatches for message in messages if message.finish_reason]
        assert sum(redispatches) == lost


async def test_a_stream_waits_for_the_successor_of_the_only_worker():
    worker = await FakeWorker(pause_at=3).start()
    port = int(worker.address.rsplit(":", 1)[1])
    async with running_router(worker) as router:
        call = router.stub.Generate(request("go on", max_tokens=9))
        messages = await read_tokens(call, 3)
        await worker.stop()
        successor = await FakeWorker(epoch=99).start(port)
        messages += await collect(call)
        assert tokens_of(messages) == expected_tokens(worker.submits[0], 9)
        assert finish_of(messages[-1]) == "length"
        await successor.stop()


async def test_a_request_that_keeps_losing_workers_fails():
    workers = await two_workers(pause_at=1)
    async with running_router(*workers, max_redispatches=0) as router:
        reading = asyncio.create_task(failure(router.stub.Generate(request("poor"))))
        await until(lambda: sum(len(worker.submits) for worker in workers) == 1)
        await next(worker for worker in workers if worker.submits).stop()
        error = await reading
        assert isinstance(error, Unavailable)
        assert "gave up after 0 re-dispatches" in error.message
        assert error.retry_after_s == 1.0


async def test_a_worker_that_is_full_passes_the_request_on():
    full, free = await two_workers()
    full.refuse_with = Overloaded("full", 1.0)
    async with running_router(full, free, policy="round-robin") as router:
        for _ in range(2):
            messages = await collect(router.stub.Generate(request("where")))
            assert messages[-1].timing.decode_worker == "decode-1"
        free.refuse_with = Overloaded("full too", 2.0)
        error = await failure(router.stub.Generate(request("where")))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s is not None


async def test_a_workers_error_reaches_the_client():
    worker = await FakeWorker(refuse_with=InternalError("the step failed")).start()
    async with running_router(worker) as router:
        error = await failure(router.stub.Generate(request("x")))
        assert isinstance(error, InternalError)
        assert error.message == "the step failed"


async def test_prefill_candidates_have_the_same_layout_and_the_best_comes_first():
    decode = await FakeWorker("decode-0", epoch=1).start()
    prefills = [await FakeWorker(f"prefill-{rank}", epoch=10 + rank, role="prefill").start() for rank in range(4)]
    alien = await FakeWorker("prefill-x", epoch=20, role="prefill", revision="r2").start()
    prompt = list(range(300, 364))
    hashes = hash_pages(prompt, PAGE_SIZE, make_salt("r1"))
    prefills[2].log.stored(hashes[:3])
    async with running_router(decode, *prefills, alien) as router:
        await collect(router.stub.Generate(request(token_ids=prompt)))
        submit = decode.submits[0]
        assert submit.salt == make_salt("r1")
        candidates = submit.prefill_candidates
        assert len(candidates) == 3
        best = candidates[0]
        assert (best.worker_id, best.epoch, best.address) == ("prefill-2", 12, prefills[2].address)
        assert best.prefill_s < candidates[1].prefill_s
        assert "prefill-x" not in {candidate.worker_id for candidate in candidates}


async def test_a_decode_worker_that_the_router_chose_to_compute_a_prompt_gets_no_prefill_workers():
    decode = await FakeWorker("decode-0", epoch=1).start()
    prefill = await FakeWorker("prefill-0", epoch=10, role="prefill").start()
    prefill.load = replace(prefill.load, queued_prefill_tokens=100_000)
    async with running_router(decode, prefill) as router:
        await collect(router.stub.Generate(request(token_ids=list(range(300, 364)))))
    assert not decode.submits[0].prefill_candidates


async def test_prefill_workers_of_other_page_sizes_are_matched_by_their_own_hashes():
    """Caches are matched in pages of their own size and priced in tokens: 80 at page size 16, 120 at page size 24."""
    decode = await FakeWorker("decode-0", epoch=1).start()
    sizes = {"prefill-16": 16, "prefill-24": 24, "prefill-64": 64}
    prefills = {
        name: await FakeWorker(name, epoch=size, role="prefill", page_size=size).start() for name, size in sizes.items()
    }
    prompt = list(range(300, 300 + 130))
    for name, num_pages in (("prefill-16", 5), ("prefill-24", 5), ("prefill-64", 1)):
        prefills[name].load = replace(prefills[name].load, prefill_tokens_per_s=1000.0)
        prefills[name].log.stored(hash_pages(prompt, sizes[name], make_salt("r1"))[:num_pages])
    async with running_router(decode, *prefills.values()) as router:
        await collect(router.stub.Generate(request(token_ids=prompt)))
    found = {candidate.worker_id: candidate.prefill_s * 1000 for candidate in decode.submits[0].prefill_candidates}
    assert list(found) == ["prefill-24", "prefill-16", "prefill-64"]
    assert found["prefill-16"] - found["prefill-24"] == pytest.approx(120 - 80, rel=0.2)  # a millisecond for each token
    assert found["prefill-64"] - found["prefill-24"] == pytest.approx(120 - 64, rel=0.2)
    assert list(found) == ["prefill-24", "prefill-16", "prefill-64"]


async def test_decode_workers_of_two_page_sizes_serve_side_by_side():
    small = await FakeWorker("decode-16", epoch=1, page_size=16).start()
    large = await FakeWorker("decode-64", epoch=2, page_size=64).start()
    prompts = {"decode-16": list(range(300, 430)), "decode-64": list(range(500, 630))}
    small.log.stored(hash_pages(prompts["decode-16"], 16, make_salt("r1"))[:4])
    large.log.stored(hash_pages(prompts["decode-64"], 64, make_salt("r1"))[:1])
    async with running_router(small, large) as router:
        for prompt in prompts.values():
            await collect(router.stub.Generate(request(token_ids=prompt)))
    for worker in (small, large):
        assert [list(submit.token_ids) for submit in worker.submits] == [prompts[worker.worker_id]]


async def test_cache_events_steer_requests_until_the_pages_are_gone():
    workers = await two_workers()
    prompt = list(range(300, 364))
    hashes = hash_pages(prompt, PAGE_SIZE, make_salt("r1"))
    async with running_router(*workers) as router:
        index = router.server.fleet.index
        for number in range(30):  # more than the fake's window of 8, so a snapshot is read
            workers[1].log.stored([bytes([number]) * 16])
        workers[1].log.stored(hashes)
        workers[1].service.notify()
        await until(lambda: index.match(hashes) == {"decode-1": (4, 4, 0)})
        for _ in range(4):
            await collect(router.stub.Generate(request(token_ids=prompt)))
        assert [len(worker.submits) for worker in workers] == [0, 4]
        workers[1].log.removed(hashes[1:2])
        workers[1].service.notify()
        await until(lambda: index.match(hashes) == {"decode-1": (1, 1, 0)})


async def test_a_prefix_longer_than_the_first_lookup_is_found_completely():
    decode = await FakeWorker("decode-0", epoch=1).start()
    prefill = await FakeWorker("prefill-0", epoch=2, role="prefill").start()
    prompt = [300 + number % 1000 for number in range(100 * PAGE_SIZE + 5)]
    prefill.load = replace(prefill.load, prefill_tokens_per_s=1000.0)
    prefill.log.stored(hash_pages(prompt, PAGE_SIZE, make_salt("r1"))[:90])
    async with running_router(decode, prefill) as router:
        await collect(router.stub.Generate(request(token_ids=prompt)))
        seconds = decode.submits[0].prefill_candidates[0].prefill_s
        assert seconds == pytest.approx((len(prompt) - 90 * PAGE_SIZE) / 1000.0, rel=0.15)  # 1.6 s without cached pages


async def test_the_membership_is_followed_and_outlives_the_admin_service():
    admin = await FakeAdmin().start()
    first = await FakeWorker("decode-0", epoch=1, pause_at=2).start()
    second = await FakeWorker("decode-0", epoch=2).start()
    admin.set(first)
    async with running_router(first, second, admin=admin, wait=False) as router:
        await until(lambda: router.server.preparer.ready)
        reading = asyncio.create_task(collect(router.stub.Generate(request("stay", max_tokens=6))))
        await first.until(lambda fake: len(fake.submits) == 1)
        admin.set(second)  # a new epoch replaces the old worker, which may finish its requests
        await until(
            lambda: [follower.epoch for follower in router.server.fleet.followers if follower.takes_work] == [2]
        )
        await collect(router.stub.Generate(request("new")))
        assert len(second.submits) == 1
        first.resume.set()
        assert tokens_of(await reading) == expected_tokens(first.submits[0], 6)
        await admin.stop()
        await collect(router.stub.Generate(request("without an admin")))
        reborn = FakeAdmin()
        reborn.set(first)
        await reborn.start(admin.port)
        await until(lambda: [follower.address for follower in router.server.fleet.followers] == [first.address])
        await reborn.stop()


async def test_a_worker_at_another_workers_address_gets_no_requests():
    admin = await FakeAdmin().start()
    worker = await FakeWorker("decode-0", epoch=5).start()
    admin.set(worker)
    worker.epoch = 6  # the membership says 5, but the process has another epoch
    worker._description.epoch = 6
    async with running_router(worker, admin=admin, wait=False) as router:
        error = await failure(router.stub.Generate(request("x"), timeout=0.5))
        assert error.code.name in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
        assert worker.submits == []
        await admin.stop()


async def test_tokens_are_counted_as_they_stream():
    worker = await FakeWorker(pause_at=3).start()
    async with running_router(worker) as router:
        call = router.stub.Generate(request("count me at once", max_tokens=5))
        received = 0
        while received < 3:
            received += len((await call.read()).token_ids)
        assert (
            'vllm:generation_tokens_total{model_name="penstock-tiny"} 3.0' in router.server._metrics.render().decode()
        )
        call.cancel()


async def test_metrics_count_requests_and_tokens():
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        await collect(router.stub.Generate(request("count me", max_tokens=5)))
        await failure(router.stub.Generate(inference_pb2.GenerateRequest()))
        text = router.server._metrics.render().decode()
        label = 'model_name="penstock-tiny"'
        assert f'vllm:request_success_total{{finished_reason="length",{label}}} 1.0' in text
        assert f"vllm:generation_tokens_total{{{label}}} 5.0" in text
        assert f"vllm:time_to_first_token_seconds_count{{{label}}} 1.0" in text
        assert f"vllm:inter_token_latency_seconds_count{{{label}}} 4.0" in text
        assert f'vllm:request_errors_total{{{label},reason="INVALID_INPUT"}} 1.0' in text
        assert f"vllm:kv_cache_usage_perc{{{label}}} 0.0" in text
        assert f'penstock:prefix_cache_tier_hits{{{label},tier="host"}} 7.0' in text


@pytest.mark.parametrize("which", ["grpc_port", "http_port"])
async def test_a_port_in_use_is_reported_with_the_fix(which):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {"grpc_port": 0, "http_port": 0, which: port}
        server = RouterServer(RouterConfig(model=str(MODEL), workers=("127.0.0.1:1",), **settings))
        with pytest.raises(ConfigError, match=rf"{which} = {port}: cannot listen on 127.0.0.1:{port}.*choose another"):
            await server.start()


def test_a_router_without_workers_is_refused():
    with pytest.raises(ConfigError, match="give exactly one of them"):
        RouterServer(RouterConfig(model=str(MODEL)))


def _spawn(tmp_path, text):
    path = tmp_path / "router.toml"
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "router", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.processes
async def test_the_process_reports_readiness_and_stops_on_sigterm(tmp_path):
    worker = await FakeWorker().start()
    process = _spawn(tmp_path, f'model = "{MODEL}"\nworkers = ["{worker.address}"]\ngrpc_port = 0\nhttp_port = 0\n')
    try:
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 300)
        assert '"grpc"' in line
        assert f'"pid": {process.pid}' in line
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(asyncio.to_thread(process.wait), 300) == 0
    finally:
        process.kill()
        process.communicate()
        await worker.stop()


@pytest.mark.processes
def test_the_process_explains_a_port_in_use_without_a_traceback(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = _spawn(tmp_path, f'model = "{MODEL}"\nworkers = ["127.0.0.1:1"]\ngrpc_port = 0\nhttp_port = {port}\n')
        try:
            _, problem = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 2
    assert problem.startswith(f"http_port = {port}: cannot listen")
    assert "Traceback" not in problem


async def test_a_stopping_router_leaves_every_worker():
    workers = await two_workers(pause_at=1)
    async with running_router(*workers) as router:
        assert all_followed(router.server, 2)
        reading = asyncio.create_task(failure(router.stub.Generate(request("cut off"))))
        await until(lambda: sum(len(worker.running) for worker in workers) == 1)
        await router.server.stop()
        assert await reading is not None
        await until(lambda: not any(worker.running for worker in workers))
