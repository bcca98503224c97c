"""Calls prefill workers: one call per transfer, with its events posted to the step loop.

Runs on the server's event loop. A call ends with the prefill worker's `closed`, which says that the transfer's last
write is over. A broken call leaves that open, so `FenceMonitor` asks the worker until it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from decode_worker.prefill.warm_calls import Commands, WarmCall, WarmCalls, open_call
from engine.step.loop import StepLoop
from engine.step.sequence import SampledToken
from kv_transfer.session.transfer_session import Manifest
from penstock import wire
from penstock.errors import PenstockError, from_rpc_error, from_status
from penstock.kv.adapter_files import AdapterRef
from penstock.kv.kv_hints import NO_KV_HINTS, KvHints
from penstock.process.task_set import TaskSet
from penstock.rpc.measured import MAX_STAGE_MS, drop_false_figures
from penstock.types import Epoch, Lane, PageHash, PageId, SamplingParams, TransferKey, WorkerId
from penstock.v1 import common_pb2, worker_pb2
from worker.channels import Channels
from worker.fence_monitor import FenceMonitor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill worker that the router proposes, with its estimates in seconds."""

    worker_id: str
    epoch: Epoch
    address: str
    queue_s: float
    prefill_s: float
    num_ranks: int = 1  # number of processes that its pages are split between
    cached_tokens: int = 0  # prompt tokens in its cache, as far as the router knows
    prefix_source: worker_pb2.PrefixSource | None = None  # a worker that it may pull from


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """The prefill that a prefill worker is to compute."""

    key: TransferKey
    candidate: PrefillCandidate
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    salt: bytes
    lane: Lane
    timeout_s: float
    adapter: AdapterRef | None = None
    tenant: str = ""
    kv_hints: KvHints = NO_KV_HINTS
    patience_s: float | None = None  # time until `on_slow` if the prefill has not begun by then


@dataclass(frozen=True, slots=True)
class RemoteFirstToken:
    """The first token of a prefill, with the seconds that the prefill waited and took."""

    token: SampledToken
    queue_s: float
    prefill_s: float
    cached_tokens: int
    pull: common_pb2.Pull | None = None  # record of what it pulled first
    hints: tuple[common_pb2.HintAnswer, ...] = ()


class TransferEvents(Protocol):
    """Receives the events of transfers; called on the step loop."""

    def on_slow(self, key: TransferKey) -> None: ...

    def on_heartbeat(self, key: TransferKey) -> None: ...

    def on_reserve(self, key: TransferKey) -> None: ...

    def on_first_token(self, key: TransferKey, first: RemoteFirstToken) -> None: ...

    def on_manifest(self, key: TransferKey, manifest: Manifest) -> None: ...

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None: ...

    def on_lost(self, key: TransferKey, error: PenstockError) -> None: ...


class PrefillClient:
    """Owns one task for each call. Methods may be called from any thread."""

    def __init__(
        self,
        loop: StepLoop,
        make_offer: Callable[[WorkerId, Epoch, int], bytes],
        channels: Channels,
        fences: FenceMonitor,
        window_slots: Callable[[Sequence[PageId]], list[int]],
    ) -> None:
        """`make_offer` and `window_slots` are the receiver's (`KvReceiver`)."""
        self._loop = loop
        self._make_offer = make_offer
        self._window_slots = window_slots
        self._running = asyncio.get_running_loop()
        self._channels = channels
        self._fences = fences
        self._commands: dict[TransferKey, Commands] = {}
        self._warm = WarmCalls(channels)
        self._tasks = TaskSet()

    def start(self, prefill: RemotePrefill, events: TransferEvents) -> None:
        """Opens the call; `events` receives the prefill worker's answers."""
        self._running.call_soon_threadsafe(self._start, prefill, events)

    def send_destination(self, key: TransferKey, num_pages_held: int, pages: Sequence[PageId]) -> None:
        destination = worker_pb2.PrefillDestination(
            num_pages_held=num_pages_held, pages=pages, window_slots=self._window_slots(pages)
        )
        self._running.call_soon_threadsafe(self._send, key, worker_pb2.PrefillCommand(destination=destination))

    def cancel(self, key: TransferKey) -> None:
        command = worker_pb2.PrefillCommand(cancel=worker_pb2.PrefillCancel())
        self._running.call_soon_threadsafe(self._send, key, command)

    def heartbeat(self, key: TransferKey) -> None:
        command = worker_pb2.PrefillCommand(heartbeat=worker_pb2.Heartbeat())
        self._running.call_soon_threadsafe(self._send, key, command)

    async def close(self) -> None:
        await self._warm.close()
        await self._tasks.close()

    def _start(self, prefill: RemotePrefill, events: TransferEvents) -> None:
        candidate = prefill.candidate
        try:
            offer = self._make_offer(WorkerId(candidate.worker_id), candidate.epoch, candidate.num_ranks)
        except PenstockError as error:
            self._lose(prefill, events, error)
            return
        warm = self._warm.take(candidate.address)
        commands: Commands = warm.commands if warm is not None else asyncio.Queue()
        commands.put_nowait(_start_message(prefill, offer))
        self._commands[prefill.key] = commands
        self._tasks.start(self._follow(prefill, events, commands, warm))

    def _send(self, key: TransferKey, command: worker_pb2.PrefillCommand) -> None:
        if key in self._commands:
            self._commands[key].put_nowait(command)

    async def _follow(
        self, prefill: RemotePrefill, events: TransferEvents, commands: Commands, warm: WarmCall | None
    ) -> None:
        """Makes one call or continues an opened one. Any end other than `closed` counts as a loss."""
        key, candidate = prefill.key, prefill.candidate
        slow = self._watch_start(prefill, events)
        try:
            async with self._channels.use(candidate.address) as channel:
                call = warm.take_over() if warm is not None else open_call(channel, commands)
                async for event in call:
                    if event.WhichOneof("event") != "heartbeat":
                        slow.cancel()  # any other event shows that the prefill has begun
                    self._deliver(key, event, events)
                    if event.WhichOneof("event") == "closed":
                        self._warm.keep(candidate.address)
                        return
            self._lose(prefill, events, PenstockError(f"prefill worker {candidate.worker_id} ended the call early"))
        except grpc.aio.AioRpcError as error:
            self._lose(prefill, events, from_rpc_error(error))
        except PenstockError as error:
            self._lose(prefill, events, error)
        finally:
            slow.cancel()
            del self._commands[key]
            commands.put_nowait(None)

    def _watch_start(self, prefill: RemotePrefill, events: TransferEvents) -> asyncio.TimerHandle:
        key = prefill.key
        wait_s = prefill.timeout_s if prefill.patience_s is None else prefill.patience_s
        return self._running.call_later(wait_s, self._loop.post, lambda: events.on_slow(key))

    def _deliver(self, key: TransferKey, event: worker_pb2.PrefillEvent, events: TransferEvents) -> None:
        match event.WhichOneof("event"):
            case "heartbeat":
                self._loop.post(lambda: events.on_heartbeat(key))
            case "reserve":
                self._loop.post(lambda: events.on_reserve(key))
            case "first_token":
                first = _first_token(event.first_token)
                self._loop.post(lambda: events.on_first_token(key, first))
            case "pushed":
                manifest = _manifest(event.pushed)
                self._loop.post(lambda: events.on_manifest(key, manifest))
            case "closed":
                error = from_status(event.closed.error) if event.closed.HasField("error") else None
                self._loop.post(lambda: events.on_closed(key, error))

    def _lose(self, prefill: RemotePrefill, events: TransferEvents, error: PenstockError) -> None:
        log.warning("%s: lost prefill worker %s: %s", prefill.request_id, prefill.candidate.worker_id, error)
        self._loop.post(lambda: events.on_lost(prefill.key, error))
        self._fences.watch(prefill.key, prefill.candidate.address)


def _first_token(event: worker_pb2.PrefillFirstToken) -> RemoteFirstToken:
    drop_false_figures(event, MAX_STAGE_MS)
    logprob = wire.logprob_from_wire(event.logprob) if event.HasField("logprob") else None
    token = SampledToken(event.token_id, logprob)
    pull = event.pull if event.HasField("pull") else None
    return RemoteFirstToken(
        token, event.queue_ms / 1e3, event.prefill_ms / 1e3, event.cached_tokens, pull, tuple(event.hints)
    )


def _manifest(event: worker_pb2.PrefillPushed) -> Manifest:
    hashes = tuple(PageHash(page) for page in event.page_hashes)
    return Manifest(event.num_tokens, event.num_pages, hashes, tuple(event.checksums))


def _start_message(prefill: RemotePrefill, offer: bytes) -> worker_pb2.PrefillCommand:
    return worker_pb2.PrefillCommand(
        start=worker_pb2.PrefillStart(
            transfer=wire.transfer_key_to_wire(prefill.key),
            request_id=prefill.request_id,
            token_ids=prefill.token_ids,
            num_prompt_tokens=prefill.num_prompt_tokens,
            sampling=wire.sampling_to_wire(prefill.sampling),
            salt=prefill.salt,
            timeout_ms=max(1, int(prefill.timeout_s * 1e3)),
            offer=offer,
            lane=wire.lane_to_wire(prefill.lane),
            prefix_source=prefill.candidate.prefix_source,
            adapter=wire.adapter_to_wire(prefill.adapter),
            tenant=prefill.tenant,
            kv_hints=wire.kv_hints_to_wire(prefill.kv_hints),
        )
    )
