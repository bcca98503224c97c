"""Settings of the controller: latency targets, how fast pools change, and when running sequences migrate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.config.base import FrozenConfig


class SloConfig(FrozenConfig):
    """Latency targets of a request. Routers count the requests that meet them."""

    ttft_s: float = Field(5.0, gt=0)
    """Seconds to the first token."""
    ttft_token_s: float = Field(0.0, ge=0)
    """Seconds added to `ttft_s` for each token of the prompt."""
    itl_s: float = Field(0.1, gt=0)
    """Mean seconds between two tokens of a request."""

    def first_token_s(self, num_prompt_tokens: int) -> float:
        return self.ttft_s + self.ttft_token_s * num_prompt_tokens


class AutoscalerConfig(FrozenConfig):
    """Rules by which pools grow and shrink."""

    mode: Literal["off", "dry-run", "on"] = "off"
    """`dry-run` decides and explains, but changes nothing."""
    slo: SloConfig = SloConfig()
    """Latency targets."""
    attainment: float = Field(0.99, gt=0, lt=1)
    """Share of requests within the targets that pools are sized for."""
    interval_s: float = Field(2.0, gt=0)
    """Seconds between two decisions."""
    history_s: float = Field(900.0, gt=0)
    """Seconds of past traffic that a pool must be able to serve as it arrived."""
    up_cooldown_s: float = Field(20.0, ge=0)
    """Seconds after a change of a pool until it may grow."""
    down_cooldown_s: float = Field(60.0, ge=0)
    """Seconds after a change of a pool until it may shrink."""
    down_after_s: float = Field(300.0, ge=0)
    """Seconds for which fewer workers must have sufficed before one is removed."""
    flips: bool = True
    """Lets a worker change its role if one pool lacks workers and the other has some to spare."""
    flip_cooldown_s: float = Field(30.0, ge=0)
    """Seconds between two flips."""
    flip_after_s: float = Field(30.0, ge=0)
    """Seconds for which a pool must have had a worker to spare before it gives one away."""
    start_s: float = Field(30.0, gt=0)
    """Expected seconds until a new worker serves; replaced by the measurement of the first start."""
    stuck_after_s: float = Field(300.0, gt=0)
    """Seconds after which a worker that is still starting no longer counts."""
    stale_s: float = Field(10.0, gt=0)
    """Age in seconds from which a report counts as missing, not as zero."""


class BalanceConfig(FrozenConfig):
    """Rules by which running sequences migrate from the fullest decode worker to the emptiest."""

    enabled: bool = True
    """Turns rebalancing on."""
    interval_s: float = Field(2.0, gt=0)
    """Seconds between two decisions."""
    full: float = Field(0.5, ge=0, le=1)
    """Share of its pages or batch slots that a worker must use before it gives sequences away."""
    gap: float = Field(0.3, gt=0, le=1)
    """Least difference between the shares of the two workers at which sequences migrate."""
    lasting_s: float = Field(10.0, ge=0)
    """Seconds for which the difference must last."""
    cooldown_s: float = Field(15.0, ge=0)
    """Seconds between two rounds of migrations."""
    max_migrations: int = Field(8, ge=1)
    """Sequences that migrate in one round."""
    stale_s: float = Field(10.0, gt=0)
    """Age in seconds from which a worker's report is ignored."""
