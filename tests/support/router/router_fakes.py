"""Provides fakes at the router's edges over real gRPC: workers that invent tokens, and an Admin service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import grpc.aio

from penstock import wire
from penstock.config import RouterConfig
from penstock.errors import PenstockError, to_status
from penstock.kv.events import KvEventLog
from penstock.rpc.server import PING_POLICY, make_channel
from penstock.types import NEW_COHORT, OLD_COHORT, CacheStats, WorkerLoad
from penstock.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.server import RouterServer
from worker.service import WorkerService

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
EOS = 1
PAGE_SIZE = 16

NextToken = Callable[[Sequence[int], common_pb2.SamplingParams], int]


def chained_token(token_ids: Sequence[int], sampling: common_pb2.SamplingParams) -> int:
    """Returns a token that depends on seed, position and the tokens before, so that a lost one changes all later
    ones."""
    state = (sampling.seed, len(token_ids), *token_ids[-4:])
    return 300 + int.from_bytes(blake2b(repr(state).encode(), digest_size=4).digest(), "little") % 1700


def expected_tokens(submit: worker_pb2.DecodeSubmit, count: int, next_token: NextToken = chained_token) -> list[int]:
    token_ids = list(submit.token_ids)
    for _ in range(count):
        token_ids.append(next_token(token_ids, submit.sampling))
    return token_ids[len(submit.token_ids) :]


def spelling(token_ids: Sequence[int]) -> NextToken:
    """Returns a `next_token` that emits exactly these tokens, one at each output position."""
    return lambda context, sampling: token_ids[(len(context) - int(context[0])) % len(token_ids)]


class FakeWorker(worker_pb2_grpc.DecodeWorkerServicer):
    """Serves `Worker` and `DecodeWorker`. After `pause_at` output tokens it waits for `resume`."""

    def __init__(
        self,
        worker_id: str = "decode-0",
        *,
        epoch: int = 1,
        role: str = "decode",
        next_token: NextToken = chained_token,
        step_s: float = 0.0,
        tokens_per_frame: int = 1,
        pause_at: int | None = None,
        refuse_with: PenstockError | None = None,
        context_length: int = 2048,
        revision: str = "r1",
        page_size: int = PAGE_SIZE,
        dies_of: int | None = None,
        metrics_address: str = "",
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.role = role
        self.next_token = next_token
        self.step_s = step_s
        self.tokens_per_frame = tokens_per_frame
        self.pause_at = pause_at
        self.refuse_with = refuse_with
        self.dies_of = dies_of  # a token: a prompt that contains it kills this worker
        # Outcomes to report for first candidates, by worker id.
        self.prefill_faults: dict[str, worker_pb2.PrefillFault] = {}
        self.resume = asyncio.Event()
        self.submits: list[worker_pb2.DecodeSubmit] = []
        self.cancelled: list[int] = []
        self.running: dict[int, asyncio.Task[None]] = {}
        self.log = KvEventLog(window=8)
        self.load = WorkerLoad(free_pages=1000, total_pages=1000, cache=CacheStats(host_hits=7))
        self.address = ""
        self._changed = asyncio.Event()
        self._description = worker_pb2.WorkerDescription(
            worker_id=worker_id,
            epoch=epoch,
            role=role,
            model="penstock-tiny",
            model_revision=revision,
            page_size=page_size,
            num_pages=1000,
            layout_digest=f"layout-{revision}-{page_size}",
            kv_digest=f"kv-{revision}",
            context_length=context_length,
            page_bytes=65536,
            metrics_address=metrics_address,
        )

    async def start(self, port: int = 0) -> FakeWorker:
        self._server = grpc.aio.server(options=PING_POLICY)  # routers ping at a pace that varies with load
        self.service = WorkerService(self._description, self.log, lambda: self.load, lambda key: False)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self._server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        """Stops like a killed process: every call breaks at once."""
        await self._server.stop(None)

    async def until(self, condition: Callable[[FakeWorker], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def Serve(
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StepFrame]:
        frames: asyncio.Queue[worker_pb2.StepFrame] = asyncio.Queue()
        reader = asyncio.create_task(self._follow(request_iterator, frames))
        try:
            while True:
                yield await frames.get()
        finally:
            reader.cancel()
            for task in self.running.values():
                task.cancel()
            self.running.clear()
            self._changed.set()

    async def _follow(
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], frames: asyncio.Queue[worker_pb2.StepFrame]
    ) -> None:
        async for command in commands:
            if command.HasField("submit"):
                submit = worker_pb2.DecodeSubmit()
                submit.CopyFrom(command.submit)
                self.submits.append(submit)
                if self.dies_of in submit.token_ids:
                    self._death = asyncio.create_task(self.stop())
                    return
                self.running[submit.stream_id] = asyncio.create_task(self._generate(submit, frames))
            else:
                self.cancelled.append(command.cancel.stream_id)
                task = self.running.pop(command.cancel.stream_id, None)
                if task is not None:
                    task.cancel()
            self._changed.set()

    async def _generate(self, submit: worker_pb2.DecodeSubmit, frames: asyncio.Queue[worker_pb2.StepFrame]) -> None:
        if self.refuse_with is not None:
            delta = worker_pb2.StepDelta(stream_id=submit.stream_id, error=to_status(self.refuse_with))
            frames.put_nowait(worker_pb2.StepFrame(deltas=[delta]))
            return
        if submit.prefill_candidates:
            first = submit.prefill_candidates[0]
            outcome = worker_pb2.PrefillOutcome(
                worker_id=first.worker_id, epoch=first.epoch, fault=self.prefill_faults.get(first.worker_id)
            )
            delta = worker_pb2.StepDelta(stream_id=submit.stream_id, prefill=outcome)
            frames.put_nowait(worker_pb2.StepFrame(deltas=[delta]))
        token_ids = list(submit.token_ids)
        delta = worker_pb2.StepDelta(stream_id=submit.stream_id)
        while not delta.finish_reason:
            if self.pause_at is not None and len(token_ids) - submit.num_prompt_tokens >= self.pause_at:
                await self.resume.wait()
            await asyncio.sleep(self.step_s)
            delta = worker_pb2.StepDelta(stream_id=submit.stream_id)
            while len(delta.token_ids) < self.tokens_per_frame and not delta.finish_reason:
                self._extend(delta, token_ids, submit)
            frames.put_nowait(worker_pb2.StepFrame(deltas=[delta]))
        self.running.pop(submit.stream_id, None)
        self._changed.set()

    def _extend(self, delta: worker_pb2.StepDelta, token_ids: list[int], submit: worker_pb2.DecodeSubmit) -> None:
        token = self.next_token(token_ids, submit.sampling)
        token_ids.append(token)
        delta.token_ids.append(token)
        if submit.sampling.HasField("logprobs"):
            top = [
                common_pb2.TopLogprob(token_id=300 + rank, logprob=-1.0 - rank)
                for rank in range(submit.sampling.logprobs)
            ]
            delta.logprobs.append(common_pb2.TokenLogprob(token_id=token, logprob=-0.5, top=top))
        if token == EOS and not submit.sampling.ignore_eos:
            delta.finish_reason = common_pb2.FINISH_REASON_STOP
        elif len(token_ids) - submit.num_prompt_tokens == submit.sampling.max_tokens:
            delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
        if delta.finish_reason:
            candidates = submit.prefill_candidates
            prefilled_by = candidates[0].worker_id if candidates else self.worker_id
            timing = common_pb2.Timing(
                queue_ms=1.0, prefill_ms=2.0, prefill_worker=prefilled_by, decode_worker=self.worker_id
            )
            delta.timing.CopyFrom(timing)


class FakeAdmin(admin_pb2_grpc.AdminServicer):
    """Publishes the workers in `set` to all watchers."""

    def __init__(self) -> None:
        self._membership = admin_pb2.Membership()
        self._routers: list[str] = []
        self._changed: set[asyncio.Event] = set()

    async def start(self, port: int = 0) -> FakeAdmin:
        self._server = grpc.aio.server(options=PING_POLICY)  # routers ping at a pace that varies with load
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(None)

    def set(self, *workers: FakeWorker, new: Sequence[FakeWorker] = (), new_share: float | None = None) -> None:
        """Publishes these workers. Those in `new` are an upgrade's cohort, which gets `new_share` of new requests."""
        members = [
            admin_pb2.Member(
                worker_id=worker.worker_id,
                epoch=worker.epoch,
                role=worker.role,
                address=worker.address,
                cohort=NEW_COHORT if worker in new else OLD_COHORT,
            )
            for worker in workers
        ]
        shares = {} if new_share is None else {OLD_COHORT: 1.0 - new_share, NEW_COHORT: new_share}
        self._membership = admin_pb2.Membership(version=self._membership.version + 1, members=members, shares=shares)
        self._notify()

    def _notify(self) -> None:
        for changed in self._changed:
            changed.set()

    async def WatchMembership(
        self, request: admin_pb2.WatchMembershipRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.Membership]:
        changed = asyncio.Event()
        self._changed.add(changed)
        self._routers.append(request.router)
        self._notify()
        try:
            while True:
                changed.clear()
                membership = admin_pb2.Membership(routers=self._routers)
                membership.MergeFrom(self._membership)
                yield membership
                await changed.wait()
        finally:
            self._changed.discard(changed)
            self._routers.remove(request.router)
            self._notify()


class RunningRouter:
    """Holds a router over fake workers, and a stub that calls it."""

    def __init__(self, server: RouterServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.grpc_address = f"127.0.0.1:{server.ports.grpc}"
        self.http_url = f"http://127.0.0.1:{server.ports.http}"


@contextlib.asynccontextmanager
async def running_router(
    *workers: FakeWorker, admin: FakeAdmin | None = None, wait: bool = True, **settings: object
) -> AsyncIterator[RunningRouter]:
    """Runs a router and stops it and the workers afterwards. With `wait`, yields once every worker is followed."""
    source = {"admin": admin.address} if admin else {"workers": tuple(worker.address for worker in workers)}
    config = RouterConfig.model_validate(
        {"model": str(MODEL), "grpc_port": 0, "http_port": 0, "default_timeout_s": 60.0, **source, **settings}
    )
    server = RouterServer(config)
    await server.start()
    try:
        if wait:
            await until(lambda: all_followed(server, len(workers)))
        async with make_channel(f"127.0.0.1:{server.ports.control}") as channel:
            yield RunningRouter(server, channel)
    finally:
        await server.stop()
        for worker in workers:
            await worker.stop()


def all_followed(server: RouterServer, count: int) -> bool:
    return sum(worker.takes_work for worker in server.fleet.followers) >= count


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for state that no event announces. Fails when the time is up."""
    limit_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit_s, "the condition did not come true"
        await asyncio.sleep(0.005)


def finish_of(message: object) -> str:
    reason = wire.finish_reason_from_wire(message.finish_reason)  # type: ignore[attr-defined]
    assert reason is not None
    return reason.value
