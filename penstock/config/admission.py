"""Settings of admission: lanes, limits of tenants, and a router's measures against overload."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.config.base import FrozenConfig
from penstock.types import Lane


class LaneConfig(FrozenConfig):
    """A lane of the router's queue, in which requests wait until their own deadlines."""

    weight: float = Field(4.0, gt=0)
    """Share of the capacity, relative to the other lanes that have requests waiting."""
    max_queue: int = Field(8192, ge=1)
    """Requests that may wait; further ones are refused. One tenant may fill half of the queue."""
    max_queue_bytes: int = Field(512 * 1024 * 1024, ge=1)
    """Bytes of memory for waiting requests, estimated as 36 KiB each plus 90 bytes per prompt token; one tenant may use
    half.
    """
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of one completion; by default as many as the context holds."""
    target_wait_s: float = Field(30.0, gt=0)
    """Seconds in the queue at which saturation is 1; with `overload.shed` no request waits longer."""
    shed_from: float = Field(0.7, ge=0, lt=1)
    """Saturation from which `overload.shed` refuses new requests at random, with a rising probability."""


class InteractiveLane(LaneConfig):
    """The lane of requests that a person waits for. Its keys are those of every lane, with other defaults."""

    weight: float = Field(16.0, gt=0)
    target_wait_s: float = Field(5.0, gt=0)
    shed_from: float = Field(0.9, ge=0, lt=1)


class BulkLane(LaneConfig):
    """The lane of requests that may wait for minutes. Its keys are those of every lane, with other defaults."""

    weight: float = Field(1.0, gt=0)
    target_wait_s: float = Field(300.0, gt=0)
    shed_from: float = Field(0.5, ge=0, lt=1)


class TenantLimits(FrozenConfig):
    """The limits of a tenant, or of all callers together if there are no tenants. By default there are no limits."""

    weight: float = Field(1.0, gt=0)
    """Share of a lane, relative to the other tenants that wait in it."""
    tokens_per_s: float | None = Field(None, gt=0)
    """Prompt and output tokens per second."""
    burst_tokens: int | None = Field(None, ge=1)
    """Largest burst of tokens after a pause; by default 60 seconds of `tokens_per_s`."""
    max_inflight_tokens: int | None = Field(None, ge=1)
    """Tokens of KV at the workers: prompts plus `max_tokens`. A request without `max_tokens` counts 4096 output tokens
    at a time.
    """
    max_requests: int | None = Field(None, ge=1)
    """Concurrent requests, including waiting ones."""
    max_unused_tickets: int = Field(64, ge=1)
    """Unused lookaside tickets, in any case at most a quarter of the decode slots; beyond that, `Route` fails."""

    @model_validator(mode="after")
    def _check_burst_has_rate(self) -> TenantLimits:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError(f"burst_tokens = {self.burst_tokens} needs tokens_per_s; set it too")
        return self


class OverloadConfig(FrozenConfig):
    """The router's measures against overload; by default none. Saturation is 0 when idle, and 1 when a new request
    would wait for its lane's `target_wait_s`.
    """

    shed: bool = False
    """Refuses requests early if they would miss `target_wait_s`, so that those admitted wait only briefly."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of one completion while saturation is above `shorten_at`; answers report it. By default unlimited."""
    shorten_at: float = Field(0.6, gt=0)
    """Saturation from which completions end at `max_tokens`, if that is set."""
    pause_bulk_at: float = Field(0.8, gt=0)
    """Saturation from which `shed` refuses new bulk requests."""
    refuse_at: float = Field(0.95, gt=0)
    """Saturation from which `shed` lets only interactive requests queue."""
    margin: float = Field(0.2, gt=0)
    """How far saturation must fall below the value that started a stage to end it."""
    hold_s: float = Field(3.0, ge=0)
    """Seconds that saturation must stay that low before a stage ends."""

    @model_validator(mode="after")
    def _check_order(self) -> OverloadConfig:
        if not self.margin < self.shorten_at <= self.pause_bulk_at <= self.refuse_at:
            raise ValueError(
                f"margin = {self.margin}, shorten_at = {self.shorten_at}, pause_bulk_at = {self.pause_bulk_at}, "
                f"refuse_at = {self.refuse_at}: give them in this order, each as large as the one before"
            )
        return self


class AdmissionConfig(FrozenConfig):
    """Rules for dispatching requests, queueing them in the router or refusing them."""

    interactive: InteractiveLane = InteractiveLane()
    """The lane `interactive`."""
    standard: LaneConfig = LaneConfig()
    """The lane `standard`."""
    bulk: BulkLane = BulkLane()
    """The lane `bulk`."""
    tenant: TenantLimits = TenantLimits()
    """Limits of all callers together, if there are no tenants."""
    output_weight: float = Field(2.0, gt=0)
    """Cost of an output token, relative to a prompt token."""
    slot_headroom: float = Field(0.25, ge=0)
    """Requests dispatched beyond the number of decode slots, as a share of that number."""
    prefill_queue_s: float = Field(1.0, gt=0)
    """Seconds of prefill work at the workers from which nothing more is dispatched."""
    max_page_use: float = Field(0.95, gt=0, le=1)
    """Share of the decode workers' pages in use above which nothing more is dispatched."""
    overload: OverloadConfig = OverloadConfig()
    """Measures against overload."""
    retry_share: float = Field(0.2, ge=0)
    """Repeated dispatches that are allowed, as a share of recent successes."""
    retry_reserve: int = Field(100, ge=1)
    """Repeated dispatches that are always allowed within 10 seconds."""

    def lane(self, lane: Lane) -> LaneConfig:
        if lane is Lane.INTERACTIVE:
            return self.interactive
        return self.bulk if lane is Lane.BULK else self.standard
