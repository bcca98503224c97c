"""Picks an engine for a proxied call: identifies the caller, and tokenizes, admits and places the prompt.

A call without a prompt, or with one that this router cannot read, goes to the engine with the fewest requests, which
decides about it. If tenants are configured, such a call is refused, since it could not be charged to its tenant.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput, ModelNotFound, PenstockError, Unavailable
from penstock.rpc.hints import read_hints
from penstock.types import WorkerId
from penstock.v1 import inference_pb2
from router.admission.gate import AdmissionSlot
from router.api.dialect import DialectBody
from router.api.identity import Tenant, read_authorization
from router.api.openai.json_bodies import SMALL_BODY_BYTES
from router.api.openai.requests import read_lane, read_timeout_s
from router.api.picker.call_reading import READERS, ProxiedCall, salted_body
from router.api.picker.endpoints import EngineAddresses, allowed, by_load
from router.api.picker.held_pick import HeldPick
from router.api.picker.messages import DESTINATION, PREFILLER
from router.api.prepare import RequestPreparer
from router.dispatch.context import DispatchContext
from router.dispatch.placement import PromptPages
from router.fleet.fleet_worker import FleetWorker
from router.prepared_request import PreparedRequest
from router.text.fair_threads import FairThreads

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Pick:
    """Says where a call goes."""

    headers: Mapping[str, str]  # headers that the gateway sets on the call
    body: bytes | None = None  # replaces the call's body; None keeps it
    held: HeldPick | None = None  # None if nothing is held for the call


class EndpointPicker(Protocol):
    """Picks endpoints. All calls of all gateways share one instance."""

    def check(self, call: ProxiedCall) -> None:
        """Checks a call's headers before its body arrives. Raises an error if it is refused whatever its body."""
        ...

    async def pick(self, call: ProxiedCall) -> Pick:
        """Returns where the call goes; the caller releases what the pick holds.

        Raises Unavailable if no endpoint may take the call, or the error that refuses it.
        """
        ...


class RouterPicker:
    """Picks this router and, as fallbacks, other routers of the gateway's subset. Any router can serve any request."""

    def __init__(self, endpoint: str, num_fallbacks: int, is_ready: Callable[[], bool]) -> None:
        """`endpoint` is this router's, which is picked only while `is_ready` returns True."""
        self._endpoint = endpoint
        self._num_fallbacks = num_fallbacks
        self._is_ready = is_ready

    def check(self, call: ProxiedCall) -> None:
        """Accepts every call: the picked router itself refuses calls."""

    async def pick(self, call: ProxiedCall) -> Pick:
        others = sorted((call.subset or frozenset()) - {self._endpoint})
        is_allowed = call.subset is None or self._endpoint in call.subset
        endpoints = [*([self._endpoint] if is_allowed and self._is_ready() else []), *others]
        if not endpoints:
            problem = "no router that the gateway allows is ready"
            raise Unavailable(f"{problem}; try again in {_RETRY_AFTER_S:g} s", _RETRY_AFTER_S)
        return Pick({DESTINATION: ",".join(endpoints[: 1 + self._num_fallbacks])})


class EnginePicker:
    """Picks engines by cost, cached pages included, as the router does for its own requests."""

    def __init__(
        self,
        preparer: RequestPreparer,
        context: DispatchContext,
        threads: FairThreads,
        addresses: EngineAddresses,
    ) -> None:
        """`threads` parse large bodies."""
        self._preparer = preparer
        self._context = context
        self._fleet = context.fleet
        self._threads = threads
        self._addresses = addresses

    def check(self, call: ProxiedCall) -> None:
        """Raises Unauthenticated, PermissionDenied or Unavailable, so that such a caller's body is never held."""
        try:
            self._identify(call)
        except PenstockError:
            self._context.metrics.picked("refused")
            raise

    async def pick(self, call: ProxiedCall) -> Pick:
        """Waits for the call's turn, for as long as its own deadline allows. The caller releases what the pick holds.

        Raises Unauthenticated, PermissionDenied, Quarantined, Overloaded, DeadlineExceeded, or Unavailable if no engine
        may take the call. If tenants are configured, raises InvalidInput for a call that cannot be read.
        """
        try:
            tenant = self._identify(call)
            request = await self._read(call, tenant)
            if request is None:
                return self._by_load(call)
            return await self._place(call, tenant, request)
        except PenstockError:
            self._context.metrics.picked("refused")
            raise

    def _identify(self, call: ProxiedCall) -> Tenant:
        if self._preparer.leaving:
            raise Unavailable("this router is shutting down; call another one", _RETRY_AFTER_S)
        return self._preparer.tenants.identify(read_authorization(call.headers))

    async def _read(self, call: ProxiedCall, tenant: Tenant) -> PreparedRequest | None:
        """Returns the call's request; None if it cannot be read and an engine must decide about it."""
        is_charged = self._preparer.tenants.are_configured
        reader = READERS.get(call.path) if call.method == "POST" else None
        if reader is None:
            if is_charged and call.method == "POST":
                problem = f"{call.path[:200]!r} cannot be charged to a tenant; call {', '.join(READERS)}"
                raise InvalidInput("path", problem)
            return None
        try:
            return await self._prepare(call, tenant, functools.partial(reader, call.body))
        except (InvalidInput, ModelNotFound):
            if is_charged:
                raise
            return None

    async def _prepare(
        self, call: ProxiedCall, tenant: Tenant, reader: functools.partial[DialectBody]
    ) -> PreparedRequest:
        preparer, accepted_s = self._preparer, time.monotonic()
        timeout_s = read_timeout_s(call.headers)
        deadline_s = preparer.deadline_s(timeout_s)

        def read(limits: LimitsConfig) -> tuple[DialectBody, inference_pb2.GenerateRequest]:
            body = reader(limits)
            # Only the first of several prompts is placed, because one engine gets the whole call.
            return body, body.requests(f"pick-{secrets.token_hex(12)}")[0]

        async with preparer.until(deadline_s):
            if len(call.body) <= SMALL_BODY_BYTES:
                body, wire = read(preparer.limits)
            else:
                body, wire = await self._threads.run(tenant.name, len(call.body), read, preparer.limits_within(1))
        wire.lane = read_lane(call.headers, body.lane)
        wire.ClearField("kv_hints")  # engines support no hints
        hints = read_hints(call.headers, body.session)
        sampled = preparer.begin_trace(call.headers)
        return await preparer.prepare(
            wire, tenant, timeout_s, body.default_max_tokens, hints, accepted_s, sampled=sampled
        )

    # Placement.

    def _by_load(self, call: ProxiedCall) -> Pick:
        group = self._fleet.group()
        workers = self._allowed(call, group.decode if group is not None else ())
        self._context.metrics.picked("by load")
        return Pick(self._headers(by_load(workers, self._num_sent)))

    async def _place(self, call: ProxiedCall, tenant: Tenant, request: PreparedRequest) -> Pick:
        with self._context.counting_errors(request.trace):
            self._context.demand.arrive(len(request.token_ids))
            body = None
            if request.cache_scope:
                salted = functools.partial(salted_body, call.body, request.salt.hex(), self._preparer.limits)
                body = await self._threads.run(tenant.name, len(call.body), salted)
            slot = self._context.gate.pass_through(request)
            await slot.enter()
            try:
                held, headers = self._choose(call, slot)
            except BaseException:
                slot.leave()
                raise
        self._context.metrics.picked("placed")
        return Pick(headers, body, held)

    def _choose(self, call: ProxiedCall, slot: AdmissionSlot) -> tuple[HeldPick, dict[str, str]]:
        request = slot.request
        group = self._fleet.group_for(request.model_revision, request.cohort)
        workers = self._allowed(call, group.decode if group is not None else ())
        assert group is not None  # else `_allowed` has raised Unavailable
        pages = PromptPages(request.token_ids, request.salt)
        placed = self._context.placer.place(request, pages, 0, group, workers)
        others = [worker for worker in by_load(workers, self._num_sent) if worker is not placed.decode]
        headers = self._headers([placed.decode, *others])
        if placed.candidates:
            headers[PREFILLER] = self._addresses.of(WorkerId(placed.candidates[0].worker_id))
        endpoint = self._addresses.of(placed.decode.worker_id)
        return HeldPick(slot, placed, endpoint, self._context), headers

    def _allowed(self, call: ProxiedCall, workers: Sequence[FleetWorker]) -> list[FleetWorker]:
        """Returns the workers that may get the call. Raises Unavailable if there is none."""
        found = allowed(workers, self._addresses.of, call.subset)
        if not found:
            where = "" if call.subset is None else f" among the {len(call.subset)} endpoints that the gateway allows"
            raise Unavailable(f"no engine takes requests now{where}; try again in {_RETRY_AFTER_S:g} s", _RETRY_AFTER_S)
        return found

    def _headers(self, workers: Sequence[FleetWorker]) -> dict[str, str]:
        """Returns the headers that name the first worker and, as fallbacks for the gateway's retries, the next ones."""
        count = 1 + self._context.config.endpoint_picker.fallbacks
        return {DESTINATION: ",".join(self._addresses.of(worker.worker_id) for worker in workers[:count])}

    def _num_sent(self, worker_id: WorkerId) -> int:
        return self._fleet.ledger.sent_to(worker_id).num_requests
