"""What a router admits, and when it begins to refuse: lanes, tenants' limits, overload. Part of `penstock.config`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.types import Lane


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LaneConfig(_Frozen):
    """One lane of the router's queue."""

    weight: float = Field(4.0, gt=0)  # share of the capacity, against the other lanes that have work
    max_queue: int = Field(1024, ge=1)  # requests waiting; more are refused
    max_wait_s: float = Field(30.0, gt=0)  # in the queue; what would wait longer is refused at once
    max_tokens: int | None = Field(None, ge=1)  # of one answer; default: what the context holds
    shed_from: float = Field(0.7, ge=0, lt=1)  # saturation from which newcomers are refused at random, ever more


class InteractiveLane(LaneConfig):
    weight: float = Field(16.0, gt=0)
    max_queue: int = Field(512, ge=1)
    max_wait_s: float = Field(5.0, gt=0)
    shed_from: float = Field(0.9, ge=0, lt=1)


class BulkLane(LaneConfig):
    weight: float = Field(1.0, gt=0)
    max_queue: int = Field(4096, ge=1)
    max_wait_s: float = Field(300.0, gt=0)
    shed_from: float = Field(0.5, ge=0, lt=1)


class TenantLimits(_Frozen):
    """What callers may use where they are not told apart; a tenant has the same fields. None: no limit."""

    weight: float = Field(1.0, gt=0)  # share of a lane, against the other tenants that wait in it
    tokens_per_s: float | None = Field(None, gt=0)  # prompt and output
    burst_tokens: int | None = Field(None, ge=1)  # at once after a pause; default: 60 s of tokens_per_s
    max_inflight_tokens: int | None = Field(None, ge=1)  # of KV at the workers: prompts, and outputs at their longest
    max_requests: int | None = Field(None, ge=1)  # at once, waiting ones included

    @model_validator(mode="after")
    def _burst_belongs_to_a_rate(self) -> TenantLimits:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError(f"burst_tokens = {self.burst_tokens} needs tokens_per_s; set it too")
        return self


class OverloadConfig(_Frozen):
    """Saturation (0: idle, 1: newcomers would wait as long as they may) at which each step of overload begins."""

    shorten_at: float = Field(0.6, gt=0)  # answers end at max_tokens
    pause_bulk_at: float = Field(0.8, gt=0)  # no new bulk requests
    refuse_at: float = Field(0.95, gt=0)  # and nobody but interactive requests may queue
    max_tokens: int = Field(256, ge=1)  # of one answer, while answers are shortened
    margin: float = Field(0.2, gt=0)  # a step ends this far below its beginning
    hold_s: float = Field(3.0, ge=0)  # and when saturation has stayed there for so long

    @model_validator(mode="after")
    def _steps_in_order(self) -> OverloadConfig:
        if not self.margin < self.shorten_at <= self.pause_bulk_at <= self.refuse_at:
            raise ValueError(
                f"margin = {self.margin}, shorten_at = {self.shorten_at}, pause_bulk_at = {self.pause_bulk_at}, "
                f"refuse_at = {self.refuse_at}: give them in this order, each as large as the one before"
            )
        return self


class AdmissionConfig(_Frozen):
    """Which requests go to the workers, and which wait in the router or are refused."""

    interactive: InteractiveLane = InteractiveLane()
    standard: LaneConfig = LaneConfig()
    bulk: BulkLane = BulkLane()
    tenant: TenantLimits = TenantLimits()  # of all callers together, where there are no `tenants`
    output_weight: float = Field(2.0, gt=0)  # what an output token costs, where a prompt token costs 1
    slot_headroom: float = Field(0.25, ge=0)  # requests out beyond the decode slots, as a share of these
    prefill_queue_s: float = Field(1.0, gt=0)  # of prefill work out at the workers
    max_page_use: float = Field(0.95, gt=0, le=1)  # share of the decode pages in use, above which nothing more goes out
    overload: OverloadConfig = OverloadConfig()
    retry_share: float = Field(0.2, ge=0)  # re-dispatches, as a share of recent successes
    retry_reserve: int = Field(100, ge=1)  # re-dispatches that are always allowed in 10 s

    def lane(self, lane: Lane) -> LaneConfig:
        if lane is Lane.INTERACTIVE:
            return self.interactive
        return self.bulk if lane is Lane.BULK else self.standard
