"""Runs real workers in this process or their own, driven over gRPC by a minimal caller in place of a router."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from decode_worker.migrate import client as migration_client
from decode_worker.server import DecodeServer
from penstock import wire
from penstock.config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig, WorkerConfig
from penstock.errors import PenstockError, from_status
from penstock.kv.kv_hints import NO_KV_HINTS, KvHints
from penstock.rpc import server as rpc_server
from penstock.rpc.server import make_channel
from penstock.types import Lane, Role, SamplingParams
from penstock.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer

SALT = b"tests"
TIMEOUT_S = 60.0
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def worker_config(
    role: Role,
    model: Path | str,
    name: str = "",
    *,
    engine: dict[str, object] | None = None,
    prefill: dict[str, object] | None = None,
    decode: dict[str, object] | None = None,
    transfer: dict[str, object] | None = None,
) -> WorkerConfig:
    """Returns a configuration with a small pool and one thread that sends prompts to prefill workers by default."""
    return WorkerConfig(
        worker_id=name or role.value,
        role=role,
        engine=EngineConfig.model_validate({"model": str(model), "num_pages": 128, "num_threads": 1} | (engine or {})),
        prefill=PrefillConfig.model_validate(prefill or {}),
        decode=DecodeConfig.model_validate({"placement": "remote"} | (decode or {})),
        transfer=TransferConfig.model_validate({"timeout_s": 10.0} | (transfer or {})),
    )


@dataclass
class Answer:
    """Holds the outcome of one request as its router sees it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: int = 0
    timing: common_pb2.Timing | None = None
    error: PenstockError | None = None


class Caller:
    """Calls a decode worker as a router does."""

    def __init__(self, address: str) -> None:
        self._channel = make_channel(address)
        self._commands: asyncio.Queue[worker_pb2.DecodeCommand | None] = asyncio.Queue()
        self._deltas: dict[int, asyncio.Queue[worker_pb2.StepDelta | None]] = {}
        self._problem = ""  # the reason that no more deltas come
        self._next_id = 1
        self.frames: list[worker_pb2.StepFrame] = []
        self._call = worker_pb2_grpc.DecodeWorkerStub(self._channel).Serve(self._requests())
        self._reader = asyncio.create_task(self._read())

    async def _requests(self) -> AsyncIterator[worker_pb2.DecodeCommand]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _read(self) -> None:
        problem = "the worker ended the call"
        try:
            async for frame in self._call:
                self.frames.append(frame)
                for delta in frame.deltas:
                    self._deltas[delta.stream_id].put_nowait(delta)
        except grpc.aio.AioRpcError as error:
            problem = f"the call broke: {error.code().name}: {error.details()}"
        finally:
            self._problem = problem
            for deltas in self._deltas.values():
                deltas.put_nowait(None)

    def submit(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        prefill: Sequence[PrefillServer | worker_pb2.PrefillCandidate] = (),
        *,
        num_prompt_tokens: int | None = None,
        timeout_s: float = TIMEOUT_S,
        ticket: str = "",
        source: worker_pb2.PrefixSource | None = None,
        kv_hints: KvHints = NO_KV_HINTS,
        tenant: str = "",
        lane: Lane = Lane.STANDARD,
    ) -> int:
        """Returns the stream id."""
        stream_id = self._next_id
        self._next_id += 1
        self._deltas[stream_id] = asyncio.Queue()
        if self._problem:
            self._deltas[stream_id].put_nowait(None)
        submit = worker_pb2.DecodeSubmit(
            stream_id=stream_id,
            request_id=f"request-{stream_id}",
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens or len(token_ids),
            sampling=wire.sampling_to_wire(sampling),
            salt=SALT,
            timeout_ms=int(timeout_s * 1e3),
            prefill_candidates=[_candidate(server) for server in prefill],
            ticket=ticket,
            prefix_source=source,
            kv_hints=wire.kv_hints_to_wire(kv_hints),
            tenant=tenant,
            lane=wire.lane_to_wire(lane),
        )
        self._commands.put_nowait(worker_pb2.DecodeCommand(submit=submit))
        return stream_id

    def cancel(self, stream_id: int) -> None:
        self._commands.put_nowait(worker_pb2.DecodeCommand(cancel=worker_pb2.DecodeCancel(stream_id=stream_id)))

    async def next_delta(self, stream_id: int) -> worker_pb2.StepDelta:
        """Returns the next delta. Raises ConnectionError once the call has ended, since waiting could only time out."""
        async with asyncio.timeout(TIMEOUT_S):
            delta = await self._deltas[stream_id].get()
        if delta is None:
            raise ConnectionError(self._problem)
        return delta

    async def answer(self, stream_id: int) -> Answer:
        """Reads the stream to its end."""
        answer = Answer()
        while True:
            delta = await self.next_delta(stream_id)
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs
            answer.prompt_logprobs += delta.prompt_logprobs
            if delta.HasField("error"):
                answer.error = from_status(delta.error)
                return answer
            if delta.finish_reason:
                answer.finish_reason, answer.timing = delta.finish_reason, delta.timing
                return answer

    async def close(self) -> None:
        self._commands.put_nowait(None)
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()


def _candidate(server: PrefillServer | worker_pb2.PrefillCandidate) -> worker_pb2.PrefillCandidate:
    if isinstance(server, worker_pb2.PrefillCandidate):
        return server
    assert server.replica is not None
    return worker_pb2.PrefillCandidate(
        worker_id="prefill",
        epoch=server.epoch,
        address=server.address,
        num_ranks=server.replica.engine.num_ranks,
    )


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Keeps servers that share one interpreter lock from giving each other up on a busy machine.

    They do not ping: a ping may wait for its answer longer than a second, and its connection would break with every
    request on it. Their migrations do not time out while the other end is slow.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc_server, "_KEEPALIVE", [])
        for timeout in ("_DESTINATION_TIMEOUT_S", "_CONFIRM_TIMEOUT_S"):
            patch.setattr(migration_client, timeout, TIMEOUT_S)
        yield


@contextlib.asynccontextmanager
async def workers(*configs: WorkerConfig) -> AsyncIterator[list[PrefillServer | DecodeServer]]:
    """Starts patient servers in this process and stops them at the end."""
    servers: list[PrefillServer | DecodeServer] = []
    with patience():
        async with _started(configs, servers):
            yield servers


@contextlib.asynccontextmanager
async def _started(configs: Sequence[WorkerConfig], servers: list[PrefillServer | DecodeServer]) -> AsyncIterator[None]:
    try:
        for config in configs:
            server = PrefillServer(config) if config.role is Role.PREFILL else DecodeServer(config)
            await server.start()
            servers.append(server)
        yield
    finally:
        for server in servers:
            await server.stop()
            if server.replica is not None:
                server.replica.engine.close()


@contextlib.asynccontextmanager
async def caller(server: DecodeServer | str) -> AsyncIterator[Caller]:
    made = Caller(server if isinstance(server, str) else server.address)
    try:
        yield made
    finally:
        await made.close()


async def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Waits for state that no event announces. Raises TimeoutError when time is up."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is not an event to wait for
            await asyncio.sleep(0.005)


async def wait_until_empty(*servers: PrefillServer | DecodeServer, timeout_s: float = TIMEOUT_S) -> None:
    """Waits until every page is free or evictable; fails with the number of held pages after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    pools = [server.worker.scheduler._pool for server in servers]
    while any(pool.num_available < pool.num_pages for pool in pools):
        assert time.monotonic() < deadline_s, [f"{p.num_pages - p.num_available} pages held" for p in pools]
        await asyncio.sleep(0.01)
    for pool in pools:
        pool.check_integrity()
