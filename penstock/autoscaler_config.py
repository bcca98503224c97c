"""Settings of the autoscaler: what requests should get, how quickly pools may change, when running sequences move."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SloConfig(BaseModel):
    """What a request should get. Routers count how many did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: float = Field(5.0, gt=0)  # to the first token
    ttft_token_s: float = Field(0.0, ge=0)  # allowed on top for each token of the prompt
    itl_s: float = Field(0.1, gt=0)  # between two tokens, the mean of a request

    def first_token_s(self, num_prompt_tokens: int) -> float:
        return self.ttft_s + self.ttft_token_s * num_prompt_tokens


class AutoscalerConfig(BaseModel):
    """`dry-run` decides and explains, and changes nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["off", "dry-run", "on"] = "off"
    slo: SloConfig = SloConfig()
    attainment: float = Field(0.99, gt=0, lt=1)  # share of requests within the targets that pools are sized for
    interval_s: float = Field(2.0, gt=0)  # between two decisions
    history_s: float = Field(900.0, gt=0)  # of traffic that a pool must be able to serve as it came
    up_cooldown_s: float = Field(20.0, ge=0)  # after a change of the same pool
    down_cooldown_s: float = Field(60.0, ge=0)
    down_after_s: float = Field(300.0, ge=0)  # so long fewer workers must have sufficed before one goes
    flips: bool = True  # a worker may change its role where one pool lacks what the other has to spare
    flip_cooldown_s: float = Field(30.0, ge=0)
    flip_after_s: float = Field(30.0, ge=0)  # so long a pool must have had a worker to spare before it gives one
    start_s: float = Field(30.0, gt=0)  # until a new worker serves; measured from the first start on
    stuck_after_s: float = Field(300.0, gt=0)  # a worker that is starting for longer counts as one that never comes
    stale_s: float = Field(10.0, gt=0)  # what is older is missing, which is not the same as zero


class BalanceConfig(BaseModel):
    """When running sequences move from the fullest decode worker to the emptiest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    interval_s: float = Field(2.0, gt=0)  # between two looks
    full: float = Field(0.5, ge=0, le=1)  # share of its pages or places that a worker must use to give any away
    gap: float = Field(0.3, gt=0, le=1)  # that must lie between the two shares
    lasting_s: float = Field(10.0, ge=0)  # so long
    cooldown_s: float = Field(15.0, ge=0)  # between two rounds of moves
    max_moves: int = Field(8, ge=1)  # sequences in one round
    stale_s: float = Field(10.0, gt=0)  # a report that is older says nothing
