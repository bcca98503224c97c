"""Follows one engine's model, load and KV events, as a `WorkerFollower` follows one of our own workers.

It reads the engine's metrics every second, as a scraper would, since the engine reports its load in no other way. An
engine that does not answer gets no new requests; its running requests go on until their own connections break.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from penstock.config import EngineEndpointConfig
from penstock.errors import PenstockError, Unavailable
from penstock.kv.block_events import BlockEvent
from penstock.metrics.worker_metrics import KV_EVENT_LOSSES, KV_EVENT_UNPLACED_BLOCKS
from penstock.types import Role, WorkerId, new_epoch
from penstock.v1 import worker_pb2
from router.fleet.backoff import Backoff
from router.fleet.engines.block_names import BlockNames
from router.fleet.engines.engine_http import EngineHttp
from router.fleet.engines.engine_link import EngineLink, PrefillEnd
from router.fleet.engines.event_subscription import EventSubscription
from router.fleet.engines.metrics_text import MAX_TEXT_BYTES, EngineMetrics, LoadReader, read_metrics
from router.fleet.fleet_worker import FleetWorker, WorkerRecords
from router.routing.policy.interface import WorkerLimits

log = logging.getLogger(__name__)

_POLL_S = 1.0
_SILENCE_S = 10.0  # an engine that does not answer for this long counts as lost
_MAX_MODELS_BYTES = 1 << 20
_DEFAULT_BLOCK_SIZE = 16


class EngineFollower(FleetWorker):
    """Owns the connections to one engine."""

    def __init__(
        self,
        name: str,
        config: EngineEndpointConfig,
        model: str,
        records: WorkerRecords,
        *,
        api_key: str,
        root_salt: Callable[[str], bytes],
        find_prefill: Callable[[str], PrefillEnd | None],
        on_change: Callable[[], None],
        on_load: Callable[[], None],
    ) -> None:
        """`model` is the name that clients use. `root_salt` takes a model revision and returns the salt of requests
        without a tenant.
        """
        address = urlsplit(config.url).netloc
        super().__init__(address, WorkerId(name), "", records, on_change=on_change, on_load=on_load)
        self._link: EngineLink | None = None
        self.http = EngineHttp(name, config.url, api_key)
        self._silent = asyncio.Event()
        self.prefill_end = PrefillEnd(self.http, self._silent)
        self._answered_s = time.monotonic()
        self._config, self._model = config, model
        self._revision = f"engine:{model}"
        self._root_salt = root_salt
        self._find_prefill = find_prefill
        self._blocks = BlockNames(_DEFAULT_BLOCK_SIZE, self._root)
        self._num_losses = 0
        self._started_s = 0.0  # start time of the engine's process, by its own clock
        self._needs_events = asyncio.Event()  # set to restart the subscription from the first event

    @property
    def link(self) -> EngineLink | None:
        return self._link

    def request_snapshot(self) -> None:
        """Forgets the engine's blocks and requests all events that it keeps.

        Does nothing unless the engine reports cached tokens, since only these can prove the index wrong.
        """
        if self._link is not None and self._link.reports_cached_tokens and self._config.events:
            log.warning("engine %s lacks blocks that its events announced; requesting all events again", self.worker_id)
            self._lose_events("its answers contradict its events")
            self._needs_events.set()

    async def stop(self) -> None:
        """Stops at once and cancels the requests at the engine."""
        await super().stop()
        if self._link is not None:
            await self._link.close()
        await self.http.close()

    async def _run(self) -> None:
        backoff = Backoff(random.Random())
        while not self._retired:
            try:
                await self._describe()
                backoff.reset()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._follow_events(), name=f"events of {self.worker_id}")
                    await self._poll()
            except* PenstockError as group:
                log.info("engine %s is unreachable: %s", self.worker_id, group.exceptions[0])
            except* Exception:
                # A single bad answer must not end this task, which would exclude a healthy engine for good.
                log.exception("following engine %s failed", self.worker_id)
            self._set_reported(False)
            self._check_silence()
            await asyncio.sleep(min(backoff.next_s(), _SILENCE_S / 2))

    async def _describe(self) -> None:
        metrics = await self._metrics()
        model, context_length = _served(await self.http.get("/v1/models", _MAX_MODELS_BYTES), self._model)
        restarted = bool(self.epoch) and metrics.started_s != self._started_s
        if restarted:
            self._forget()
        if restarted or not self.epoch:
            self._begin(metrics)
        self.description.context_length = context_length
        if self._link is not None:
            self._link.model = model

    def _begin(self, metrics: EngineMetrics) -> None:
        """Begins a new epoch of the engine."""
        config, size = self._config, metrics.block_size or _DEFAULT_BLOCK_SIZE
        is_prefill = config.role == "prefill"
        self._started_s = metrics.started_s
        self._loads = LoadReader()
        self._blocks = BlockNames(size, self._root)
        # Engines that exchange KV form one group; their connectors check that layouts match.
        group = "engine" if config.role == "both" else "engine pair"
        self.description = worker_pb2.WorkerDescription(
            worker_id=self.worker_id,
            epoch=new_epoch(),
            role=Role.PREFILL.value if is_prefill else Role.DECODE.value,
            model=self._model,
            model_revision=self._revision,
            page_size=size,
            num_pages=metrics.num_blocks or 0,
            layout_digest=f"engine:{self.worker_id}",
            kv_digest=group,
            silent_cache=not config.events,
            max_running=config.max_running,
            num_ranks=1,
        )
        max_local = max(0, config.remote_from_tokens - 1)
        self.limits = WorkerLimits(max_running=config.max_running, max_local_tokens=max_local)
        if not is_prefill and self._link is None:
            self._link = EngineLink(
                self.worker_id,
                self.http,
                self._cache_salt,
                self._find_prefill,
                config.remote_from_tokens,
                self._suspend,
            )
        log.info("engine %s: %s, blocks of %d tokens, %s", self.worker_id, self._model, size, config.role)

    def _root(self) -> bytes:
        return self._root_salt(self._revision)

    def _cache_salt(self, salt: bytes) -> str:
        return "" if salt == self._root() else salt.hex()

    def _check_silence(self) -> None:
        """Gives up the requests at a frozen engine: its connections stay open, but nothing arrives."""
        since_s = time.monotonic() - _SILENCE_S
        if self._answered_s > since_s:
            return
        self._silent.set()
        if self._link is not None:
            self._link.lose_silent(since_s)

    async def _metrics(self) -> EngineMetrics:
        text = await self.http.get("/metrics", MAX_TEXT_BYTES)
        self._answered_s = time.monotonic()
        self._silent.clear()
        return read_metrics(text.decode(errors="replace"))

    async def _poll(self) -> None:
        """Reports load until the engine is lost, restarts or is retired. Then raises Unavailable."""
        while not self._retired:
            metrics = await self._metrics()
            if metrics.started_s != self._started_s:
                raise Unavailable(f"engine {self.worker_id} has restarted")
            self._report(metrics)
            await asyncio.sleep(_POLL_S)
        raise Unavailable(f"engine {self.worker_id} is retired")

    def _report(self, metrics: EngineMetrics) -> None:
        link = self._link
        queued, open_calls = (link.queued_tokens, link.num_streams) if link is not None else (0, 0)
        load = self._loads.load(metrics, queued, open_calls)
        events = {
            KV_EVENT_LOSSES.name: float(self._num_losses),
            KV_EVENT_UNPLACED_BLOCKS.name: float(self._blocks.num_unplaced),
        }
        self._take_load(replace(load, metrics=events))
        self._set_reported(True)

    def _suspend(self) -> None:
        """Sends the engine no new requests until it answers again."""
        self._set_reported(False)

    def _set_reported(self, reported: bool) -> None:
        if reported != self._has_reported:
            self._has_reported = reported
            if self._link is not None:
                self._link.is_open = reported
            self._on_change()

    # KV events.

    async def _follow_events(self) -> None:
        config = self._config
        if not config.events:
            return
        while True:
            self._needs_events.clear()
            with EventSubscription(
                config.events, config.replay, config.topic, self._take_events, self._lose_events
            ) as subscription:
                running = asyncio.create_task(subscription.run(), name=f"subscription to {self.worker_id}")
                waiting = asyncio.create_task(self._needs_events.wait())
                try:
                    done, _ = await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
                    if running in done:
                        running.result()
                finally:
                    for task in (running, waiting):
                        task.cancel()
                    await asyncio.wait([running, waiting])

    def _take_events(self, events: Sequence[BlockEvent]) -> None:
        if not self._retired:
            for batch in self._blocks.translate(events):
                self._records.index.apply(self.worker_id, batch)

    def _lose_events(self, reason: str) -> None:
        level = logging.WARNING if len(self._blocks) else logging.DEBUG  # a loss matters only if blocks are known
        log.log(level, "the cache of engine %s counts as empty: %s", self.worker_id, reason)
        self._num_losses += 1
        if not self._retired:
            self._records.index.apply(self.worker_id, self._blocks.clear())


def _served(answer: bytes, model: str) -> tuple[str, int]:
    """Returns the engine's name for the model and its context length.

    If the engine serves a single model, its name does not matter. Raises Unavailable if the engine does not serve
    `model`.
    """
    try:
        found = json.loads(answer)["data"]
        models = {str(each["id"]): int(each.get("max_model_len") or 0) for each in found}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Unavailable("its /v1/models is not a list of models") from error
    name = model if model in models else next(iter(models), "")
    if not name or (name != model and len(models) > 1):
        served = ", ".join(map(repr, list(models)[:5])) or "no model"
        raise Unavailable(f"it serves {served}, not {model!r}; set router.served_model to a model that it serves")
    if models[name] <= 0:
        raise Unavailable(f"its /v1/models has no max_model_len for {name!r}")
    return name, min(models[name], 1 << 31)
