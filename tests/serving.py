"""Real workers in this process or in their own, driven over gRPC by a minimal caller in the router's place."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decode_worker.server import DecodeServer
from penstock import wire
from penstock.config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig, WorkerConfig
from penstock.errors import PenstockError, from_status
from penstock.grpc_server import make_channel
from penstock.types import Role, SamplingParams
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
    """Small pools, one thread, prompts to the prefill worker unless told otherwise."""
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
    """One request's end as its router sees it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: int = 0
    timing: common_pb2.Timing | None = None
    error: PenstockError | None = None


class Caller:
    """One router's call to one decode worker."""

    def __init__(self, address: str) -> None:
        self._channel = make_channel(address)
        self._commands: asyncio.Queue[worker_pb2.DecodeCommand | None] = asyncio.Queue()
        self._deltas: dict[int, asyncio.Queue[worker_pb2.StepDelta]] = {}
        self._next_id = 1
        self.frames: list[worker_pb2.StepFrame] = []
        self._call = worker_pb2_grpc.DecodeWorkerStub(self._channel).Serve(self._requests())
        self._reader = asyncio.create_task(self._read())

    async def _requests(self) -> AsyncIterator[worker_pb2.DecodeCommand]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _read(self) -> None:
        async for frame in self._call:
            self.frames.append(frame)
            for delta in frame.deltas:
                self._deltas[delta.stream_id].put_nowait(delta)

    def submit(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        prefill: Sequence[PrefillServer | worker_pb2.PrefillCandidate] = (),
        *,
        num_prompt_tokens: int | None = None,
        timeout_s: float = TIMEOUT_S,
        ticket: str = "",
    ) -> int:
        """Returns the stream id."""
        stream_id = self._next_id
        self._next_id += 1
        self._deltas[stream_id] = asyncio.Queue()
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
        )
        self._commands.put_nowait(worker_pb2.DecodeCommand(submit=submit))
        return stream_id

    def cancel(self, stream_id: int) -> None:
        self._commands.put_nowait(worker_pb2.DecodeCommand(cancel=worker_pb2.DecodeCancel(stream_id=stream_id)))

    async def next_delta(self, stream_id: int) -> worker_pb2.StepDelta:
        async with asyncio.timeout(TIMEOUT_S):
            return await self._deltas[stream_id].get()

    async def answer(self, stream_id: int) -> Answer:
        """Everything until the stream's end."""
        answer = Answer()
        while True:
            delta = await self.next_delta(stream_id)
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs
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


@contextlib.asynccontextmanager
async def workers(*configs: WorkerConfig) -> AsyncIterator[list[PrefillServer | DecodeServer]]:
    """Started servers in this process, stopped at the end."""
    servers: list[PrefillServer | DecodeServer] = []
    try:
        for config in configs:
            server = PrefillServer(config) if config.role is Role.PREFILL else DecodeServer(config)
            await server.start()
            servers.append(server)
        yield servers
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


async def wait_until_empty(*servers: PrefillServer | DecodeServer, timeout_s: float = 1.0) -> None:
    """Every page is free or evictable within `timeout_s`, else an assertion that says what is held."""
    deadline_s = time.monotonic() + timeout_s
    pools = [server.worker.scheduler._pool for server in servers]
    while any(pool.num_available < pool.num_pages for pool in pools):
        assert time.monotonic() < deadline_s, [f"{p.num_pages - p.num_available} pages held" for p in pools]
        await asyncio.sleep(0.01)
    for pool in pools:
        pool.check_integrity()
