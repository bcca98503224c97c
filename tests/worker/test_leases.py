"""Tests that an otherwise idle worker notices a peer that falls silent while its connection stays open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import grpc.aio
import pytest

from decode_worker.server import DecodeServer
from engine.engine import Engine
from engine.generate import generate
from engine.step.loop import StepLoop
from kv_transfer.session.lease import HEARTBEATS_A_LEASE, Lease, Sweeper, earliest
from penstock import wire
from penstock.config import EngineConfig
from penstock.errors import TransferError, from_status
from penstock.metrics.worker_metrics import OLDEST_FENCE_SECONDS
from penstock.rpc.server import GrpcServer, make_channel
from penstock.types import Epoch, Role, TransferId, TransferKey, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import (
    GREEDY,
    SALT,
    TIMEOUT_S,
    caller,
    until,
    wait_until_empty,
    worker_config,
    workers,
)
from worker import fence_monitor

PROMPT = [(5 * i) % 300 + 2 for i in range(50)]
LEASE_S = 1.0  # several times as long as a busy machine may delay the event loop that sends heartbeats
SHORT = {"timeout_s": LEASE_S}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


class SilentPrefill(worker_pb2_grpc.PrefillWorkerServicer):
    """Requests its destination, then stays silent until the test lets it close."""

    def __init__(self, num_heartbeats: int = 0) -> None:
        self.num_heartbeats = num_heartbeats
        self.heard: list[str] = []
        self.may_close = asyncio.Event()

    async def Prefill(
        self, request_iterator: AsyncIterator[worker_pb2.PrefillCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        reader = asyncio.create_task(self._listen(request_iterator))
        yield worker_pb2.PrefillEvent(reserve=worker_pb2.PrefillReserve(num_pages=4))
        for _ in range(self.num_heartbeats):
            await asyncio.sleep(LEASE_S / HEARTBEATS_A_LEASE)
            yield worker_pb2.PrefillEvent(heartbeat=worker_pb2.Heartbeat())
        async with asyncio.timeout(TIMEOUT_S):
            await self.may_close.wait()
        yield worker_pb2.PrefillEvent(closed=worker_pb2.PrefillClosed())
        reader.cancel()

    async def _listen(self, commands: AsyncIterator[worker_pb2.PrefillCommand]) -> None:
        async for command in commands:
            self.heard.append(command.WhichOneof("command"))


@pytest.mark.parametrize("num_heartbeats", [0, 2 * HEARTBEATS_A_LEASE])
async def test_an_idle_decode_worker_gives_up_a_silent_prefill_worker(model: Path, num_heartbeats: int) -> None:
    engine = Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1))
    wanted = generate(engine, PROMPT, GREEDY, SALT, use_prefix_cache=False)
    silent = SilentPrefill(num_heartbeats)
    server = GrpcServer([worker_pb2.DESCRIPTOR.services_by_name["PrefillWorker"]])
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(silent, server.server)
    port = await server.start("127.0.0.1", 0)
    candidate = worker_pb2.PrefillCandidate(worker_id="silent", epoch=7, address=f"127.0.0.1:{port}")
    try:
        async with workers(worker_config(Role.DECODE, model, transfer=SHORT)) as (decode,):
            assert isinstance(decode, DecodeServer)
            async with caller(decode) as router:
                started_s = time.monotonic()
                answer = await router.answer(router.submit(PROMPT, GREEDY, [candidate]))
                waited_s = time.monotonic() - started_s
            assert answer.token_ids == wanted
            assert waited_s >= LEASE_S * (1 + num_heartbeats / HEARTBEATS_A_LEASE)  # heartbeats extend the lease
            pool = decode.worker.scheduler._pool
            assert pool.num_fenced == 4  # the prefill worker may still write these pages
            await until(lambda: {"heartbeat", "cancel"} <= set(silent.heard))
            silent.may_close.set()
            await wait_until_empty(decode)
    finally:
        await server.stop()


async def test_a_silent_sender_that_never_connected_holds_no_page_forever(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's machine has gone, so nothing answers. Waiting proves nothing, but it cannot write into the pool."""
    monkeypatch.setattr(fence_monitor, "_CALL_TIMEOUT_S", 0.2)
    silent = SilentPrefill()
    server = GrpcServer([worker_pb2.DESCRIPTOR.services_by_name["PrefillWorker"]])
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(silent, server.server)
    port = await server.start("127.0.0.1", 0)
    candidate = worker_pb2.PrefillCandidate(worker_id="silent", epoch=7, address=f"127.0.0.1:{port}")
    async with workers(worker_config(Role.DECODE, model, transfer=SHORT)) as (decode,):
        assert isinstance(decode, DecodeServer)
        pool = decode.worker.scheduler._pool
        async with caller(decode) as router:
            await router.answer(router.submit(PROMPT, GREEDY, [candidate]))
        assert pool.num_fenced == 4
        await until(lambda: decode.shell.service.load.metrics[OLDEST_FENCE_SECONDS.name] > 0.0)
        with black_hole(port, server) as closing:
            await closing
            await wait_until_empty(decode, timeout_s=TIMEOUT_S)
        await until(lambda: decode.shell.service.load.metrics[OLDEST_FENCE_SECONDS.name] == 0.0)
        pool.check_integrity()


@contextlib.contextmanager
def black_hole(port: int, server: GrpcServer) -> Iterator[Awaitable[None]]:
    """Takes over the server's port while it stops: the kernel accepts connections that are never answered."""

    async def close() -> None:
        await server.stop()
        hole.bind(("127.0.0.1", port))
        hole.listen()

    with socket.socket() as hole:
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield close()


async def test_an_idle_prefill_worker_frees_its_pages_when_the_decode_worker_is_silent(model: Path) -> None:
    async with workers(
        worker_config(Role.PREFILL, model, transfer=SHORT), worker_config(Role.DECODE, model, transfer=SHORT)
    ) as (prefill, decode):
        assert isinstance(prefill, PrefillServer)
        assert isinstance(decode, DecodeServer)
        start = worker_pb2.PrefillStart(
            transfer=wire.transfer_key_to_wire(TransferKey(TransferId("t"), prefill.epoch, decode.epoch)),
            request_id="r",
            token_ids=PROMPT,
            num_prompt_tokens=len(PROMPT),
            sampling=wire.sampling_to_wire(GREEDY),
            timeout_ms=int(TIMEOUT_S * 1e3),
            offer=decode.shell.open_receiver().offer(WorkerId("prefill"), Epoch(prefill.epoch)),
        )
        over = asyncio.Event()

        async def commands() -> AsyncIterator[worker_pb2.PrefillCommand]:
            yield worker_pb2.PrefillCommand(start=start)
            for _ in range(2 * HEARTBEATS_A_LEASE):
                await asyncio.sleep(LEASE_S / HEARTBEATS_A_LEASE)
                yield worker_pb2.PrefillCommand(heartbeat=worker_pb2.Heartbeat())
            await over.wait()

        started_s = time.monotonic()
        async with make_channel(prefill.address) as channel:
            call = worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(commands(), timeout=TIMEOUT_S)
            events = [event async for event in call]
            over.set()
        kinds = [event.WhichOneof("event") for event in events]
        assert time.monotonic() - started_s >= 3 * LEASE_S
        assert [kind for kind in kinds if kind != "heartbeat"] == ["reserve", "first_token", "closed"]
        assert kinds.count("heartbeat") >= 2
        error = from_status(events[-1].closed.error)
        assert isinstance(error, TransferError)
        assert f"silent for {LEASE_S:g} s" in error.message
        await wait_until_empty(prefill)


def test_the_step_loop_sweeps_while_it_is_idle_and_steps_after_it() -> None:
    """Nothing is posted: the time that the sweep returns wakes the loop, and a step follows at once."""
    done, log = threading.Event(), list[str]()
    leases = list[Lease]()

    def step() -> bool:
        log.append("step")
        if "lapsed" in log:
            done.set()
        return False

    def sweep(now_s: float) -> float | None:
        if not leases:
            leases.append(Lease(0.02, now_s))
        if leases[0].is_over(now_s) and "lapsed" not in log:
            log.append("lapsed")
        return None if "lapsed" in log else leases[0].deadline_s

    loop = StepLoop("test", step, lambda error: None, sweep)
    loop.start()
    assert done.wait(TIMEOUT_S)
    loop.stop()
    assert log[-2:] == ["lapsed", "step"] or log[-3:] == ["lapsed", "step", "step"]


def test_a_sweeper_is_due_at_the_next_deadline_and_in_time_for_heartbeats() -> None:
    sweeper = Sweeper(every_s=2.0)
    assert not sweeper.is_due(0.0, any_open=False)
    assert sweeper.next_s is None
    assert not sweeper.is_due(1.0, any_open=True)
    assert sweeper.next_s == 3.0
    assert sweeper.is_due(3.0, any_open=True)
    sweeper.looked(3.0, [4.5, 9.0])
    assert sweeper.next_s == 4.5
    sweeper.looked(4.5, [])
    assert sweeper.next_s == 6.5
    assert not sweeper.is_due(9.0, any_open=False)
    assert earliest(None, 3.0, 2.0) == 2.0
    assert earliest(None, None) is None
