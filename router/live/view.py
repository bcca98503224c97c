"""Describes a deployment, as far as one router knows it, as plain data for the live page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from penstock.config.autoscaler import SloConfig
from penstock.types import Lane
from penstock.v1 import admin_pb2
from router.dispatch.context import DispatchContext
from router.fleet.fleet_worker import FleetWorker
from router.live.controller_reader import ControllerReader
from router.tracing.waterfall import waterfall

_MAX_REQUESTS = 500  # in one answer

Json = dict[str, Any]


class LiveView:
    """Reads the router's state when the page requests it. Owns nothing."""

    def __init__(
        self,
        model: str,
        slo: SloConfig,
        context: DispatchContext,
        controller: ControllerReader,
    ) -> None:
        self._model = model
        self._slo = slo
        self._policy = context.config.policy
        self._fleet = context.fleet
        self._gate = context.gate
        self._running = context.running
        self._recent = context.metrics.recent
        self._controller = controller

    def state(self, router: str, after: int) -> Json:
        """Returns the fleet, the queues, and the ended completions after number `after` of `router`.

        Several routers may share a port: a page whose last answer came from another router gets all completions that
        this one keeps.
        """
        fleet, gate = self._fleet, self._gate
        own = str(fleet.peers.epoch)
        now_s = time.monotonic()
        return {
            "unix_time_s": round(time.time(), 3),
            "router": own,
            "model": self._model,
            "slo": {"ttft_s": self._slo.ttft_s, "ttft_token_s": self._slo.ttft_token_s, "itl_s": self._slo.itl_s},
            "workers": self._workers(now_s),
            "lanes": {lane.value: gate.admission.num_waiting_in(lane) for lane in Lane},
            "in_flight": gate.admission.num_inside,
            "saturation": round(gate.saturation(), 3),
            "spares": dict(fleet.spares),
            "ends": dict(fleet.ends),
            "last_request": self._recent.last_number,
            "requests": self._recent.after(after if router == own else 0, _MAX_REQUESTS),
        }

    def waterfall(self, request_id: str) -> Json | None:
        """Returns the stages and the decision of a request, by its id or its call's `x-request-id`.

        Returns None if it neither runs at this router nor is among its last completions.
        """
        running = self._running.waterfall(request_id, self._policy)
        if running is not None:
            return running
        found = self._recent.find(request_id)
        return waterfall(found, self._policy) if found else None

    async def controller_state(self) -> Json:
        """Returns the controller's newest events and the autoscaler's newest reasons; empty if they cannot be read."""
        events, explained = await self._controller.read()
        return {
            "mode": explained.mode,
            "events": [_event(each) for each in events],
            "scaling": [_record(each) for each in explained.records],
        }

    def _workers(self, now_s: float) -> list[Json]:
        """Describes the members, and former members whose names no member has taken.

        A former member is leaving if its link is open, and lost if its link is closed.
        """
        fleet = self._fleet
        members = [self._worker(worker, now_s) for worker in fleet.followers if worker.worker_id]
        names = {member["id"] for member in members}
        others = [
            self._worker(worker, now_s) | {"leaving": worker.link is None or worker.link.is_open}
            for worker in fleet.leaving
            if worker.worker_id not in names
        ]
        return [*members, *others]

    def _worker(self, worker: FleetWorker, now_s: float) -> Json:
        load, described = worker.load, worker.description
        sent = self._fleet.sent_to(worker.worker_id, now_s)
        return {
            "id": worker.worker_id,
            "role": described.role,
            "epoch": str(described.epoch),  # a string, because JavaScript's numbers are not precise enough
            "host": described.labels.host,
            "cohort": worker.cohort,
            "ready": worker.takes_work,
            "leaving": load.leaving,
            "avoided": self._fleet.health.is_avoided(worker.epoch, now_s),
            "running": load.num_running,
            "waiting": load.num_waiting,
            "sent": sent.num_requests,
            "max_running": described.max_running,
            "pages": load.total_pages,
            "free_pages": load.free_pages,
            "queued_prefill_tokens": load.queued_prefill_tokens + sent.prefill_tokens,
            "prefill_tokens": load.prefill_steps.tokens,
            "decode_tokens": load.decode_steps.tokens,
            "step_ms": round(load.step_s * 1e3, 3),
            "cache_queries": load.cache.queries,
            "cache_hits": load.cache.num_hits,
            "metrics": _known(load.metrics),
        }


def _known(metrics: Mapping[str, float]) -> Json:
    names = ("pages_sent", "transfer_failures", "handoff_mismatches", "preemptions", "oldest_fence_seconds")
    return {name: round(metrics[name], 3) for name in names if metrics.get(name)}


def _event(event: admin_pb2.ClusterEvent) -> Json:
    return {
        "number": event.number,
        "unix_time_s": event.unix_time_s,
        "subject": event.subject,
        "what": event.what,
        "reason": event.reason,
    }


def _record(record: admin_pb2.ScaleRecord) -> Json:
    return {
        "unix_time_s": record.unix_time_s,
        "pool": record.pool,
        "current": record.current,
        "decided": record.decided,
        "verdict": record.verdict,
        "reason": record.failed or record.reason,
    }
