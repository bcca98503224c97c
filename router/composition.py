"""Makes the parts of a router from its configuration, in the order of their dependencies.

`router.server` owns their lifetimes: nothing made here has started, listens or runs on an event loop yet.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import RouterConfig
from penstock.errors import ConfigError
from penstock.rpc.addresses import is_every_interface
from penstock.rpc.secret import ADMIN
from penstock.rpc.tls import ServerCertificate
from penstock.rpc.trust import Trust
from penstock.types import Role
from router.admission.gate import AdmissionGate
from router.api.http.app import SHAPES
from router.api.http.offline.parts import OfflineParts
from router.api.identity import Tenants
from router.api.key_files import watch_metrics_token, watch_tenants
from router.api.picker.endpoints import EngineAddresses
from router.api.picker.picker import EndpointPicker, EnginePicker, RouterPicker
from router.api.picker.service import PickerServer
from router.api.prepare import RequestPreparer
from router.batches.pacing_policy import PoolUse
from router.dispatch.context import DispatchContext, make_context
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.lookaside import Lookaside
from router.fleet.worker_fleet import WorkerFleet
from router.live.controller_reader import ControllerReader
from router.live.view import LiveView
from router.metrics.metrics import RouterMetrics
from router.text.fair_threads import FairThreads
from router.text.model_card import ModelCard
from router.text.tokenizer import Tokenizer
from router.tracing.start import start_tracer

if TYPE_CHECKING:
    from router.tracing.tracer import RequestTracer

_NUM_PARSING = 1  # threads; parsing holds the interpreter's lock for the most part, so that more would not be faster


@dataclass(frozen=True, slots=True)
class RouterParts:
    trust: Trust
    metrics: RouterMetrics
    tokenizer: Tokenizer
    fleet: WorkerFleet
    tracer: RequestTracer | None  # None: tracing is off
    context: DispatchContext
    preparer: RequestPreparer
    dispatcher: Dispatcher
    parsing: FairThreads  # parses large bodies and messages
    metrics_token: Callable[[], str]  # returns the token for /metrics, "" without one
    certificate: ServerCertificate | None
    live: LiveView
    offline: OfflineParts | None  # None: files and batches are not served
    picker: PickerServer | None  # None: gateways are not served


def make_parts(config: RouterConfig) -> RouterParts:
    """Makes the parts and reads the model's folder.

    Raises CheckpointError, or ConfigError if the configuration does not say where the workers are or at which address
    other routers call this one.
    """
    _check_addresses(config)
    card = ModelCard.load(config)
    tokenizer = Tokenizer.load(config.model, config.limits.text_queue_characters)
    trust = Trust(config.security)
    metrics = RouterMetrics(card.name, config.tenant_labels, config.slo)
    fleet = WorkerFleet(trust, config.index)
    fleet.adapters.follow(config, card.name, trust.watcher)
    tenants = Tenants(watch_tenants(config, trust.watcher), lambda: trust.secrets)
    tracer = start_tracer(config.tracing, card.name, f"router-{fleet.peers.epoch}", metrics.traced)
    context = make_context(config, fleet, metrics, tenants.limits_of(config.admission.tenant), tracer)
    _watch(metrics, fleet, context.gate, trust)
    lookaside = Lookaside(context, card.name, lambda: trust.secrets)
    controller = ControllerReader(config.admin, functools.partial(trust.channel, use=ADMIN))
    preparer = RequestPreparer(card, tokenizer, tenants, context)
    parsing = FairThreads("parser", _NUM_PARSING, config.limits.text_queue_characters)
    certificate = ServerCertificate(config.tls, "tls", trust.watcher) if config.tls else None
    return RouterParts(
        trust=trust,
        metrics=metrics,
        tokenizer=tokenizer,
        fleet=fleet,
        tracer=tracer,
        context=context,
        preparer=preparer,
        dispatcher=Dispatcher(context, lookaside, tokenizer.spelling),
        parsing=parsing,
        metrics_token=watch_metrics_token(config, trust.watcher),
        certificate=certificate,
        offline=OfflineParts(config, functools.partial(_pool_use, fleet, context.gate))
        if config.batches.folder
        else None,
        picker=_make_picker(config, preparer, context, parsing, certificate),
        live=LiveView(card.name, config.slo, context, controller),
    )


def _make_picker(
    config: RouterConfig,
    preparer: RequestPreparer,
    context: DispatchContext,
    parsing: FairThreads,
    certificate: ServerCertificate | None,
) -> PickerServer | None:
    if config.endpoint_picker.port is None:
        return None
    addresses = EngineAddresses({name: engine.url for name, engine in config.engines.items()})
    picker: EndpointPicker = EnginePicker(preparer, context, parsing, addresses)
    if not config.engines:
        settings = config.endpoint_picker
        picker = RouterPicker(settings.router_endpoint, settings.fallbacks, lambda: preparer.ready)
    return PickerServer(config, picker, addresses, context.metrics, certificate, SHAPES)


def _check_addresses(config: RouterConfig) -> None:
    if [bool(config.admin), bool(config.workers), bool(config.engines)].count(True) != 1:
        raise ConfigError(
            f"admin = {config.admin!r}, workers = {config.workers!r}, engines = {list(config.engines)}: give exactly "
            "one of them: the address of the Admin service, those of the workers, or other engines"
        )
    if config.admin and is_every_interface(config.peer_host):
        raise ConfigError(
            f"peer_host = {config.peer_host!r}: the Admin service passes this address on to other routers, which "
            "cannot call it; give the address of this machine (--peer-host)"
        )


def _pool_use(fleet: WorkerFleet, gate: AdmissionGate, num_lines: int) -> PoolUse:
    """Counts the requests of all callers; `num_lines` of those at this router belong to batches.

    Other routers' requests count only once workers report their sequences.
    """
    decoders = [worker for worker in fleet.followers if worker.description.role == Role.DECODE]
    # A prefill worker's requests are at decode workers as well, and counting them twice would take lines for others.
    num_at_workers = sum(worker.load.num_running + worker.load.num_waiting for worker in decoders)
    admission = gate.admission
    return PoolUse(
        num_lines=num_lines,
        num_others=max(0, admission.num_inside - num_lines, num_at_workers - num_lines),
        num_waiting=admission.num_waiting + sum(worker.load.num_waiting for worker in fleet.followers),
        num_decode_workers=sum(worker.takes_work for worker in decoders),
    )


def _watch(metrics: RouterMetrics, fleet: WorkerFleet, gate: AdmissionGate, trust: Trust) -> None:
    """Registers what the metrics read from other parts at each scrape."""

    def cache_usage() -> float:
        loads = [worker.load for worker in fleet.followers if worker.link is not None]
        total = sum(load.total_pages for load in loads)
        return 1.0 - sum(load.free_pages for load in loads) / total if total else 0.0

    metrics.watch(
        num_running=lambda: sum(worker.load.num_running for worker in fleet.followers),
        num_waiting=lambda: gate.admission.num_waiting + sum(worker.load.num_waiting for worker in fleet.followers),
        cache_usage=cache_usage,
        open_circuits=lambda: fleet.health.num_open(time.monotonic()),
        tier_hits=lambda tier: sum(getattr(worker.load.cache, f"{tier}_hits") for worker in fleet.followers),
        num_workers=lambda role: sum(
            worker.takes_work and worker.description.role == role for worker in fleet.followers
        ),
    )
    metrics.watch_workers(lambda: {worker.worker_id: worker.load for worker in fleet.followers})
    metrics.watch_spares(lambda pool: fleet.spares.get(pool, 0))
    metrics.watch_ends(lambda end: fleet.ends.get(end, 0))
    metrics.watch_index(fleet.index, lambda: sum(worker.is_mute for worker in fleet.followers))
    metrics.watch_credentials(lambda: trust.watcher.files)
    metrics.admission.watch(
        num_waiting=gate.admission.num_waiting_in,
        queue_bytes=gate.admission.queue_bytes,
        num_out=lambda: gate.admission.outstanding.num_requests,
        saturation=gate.saturation,
        level=lambda: gate.admission.level,
        retries_left=lambda: gate.retries.balance,
    )
