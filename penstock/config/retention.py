"""Settings of retention: how long cached pages stay, and how many of them each tenant may hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.config.base import FrozenConfig


class RetentionConfig(FrozenConfig):
    """Limits of what KV hints may do to a worker's page pool. Shares are shares of its pages."""

    eviction: Literal["reuse", "lru"] = "reuse"
    """Whether the gaps between a session's turns decide how early its pages are evicted, or their last use alone; both
    are the same without named sessions."""
    held_share: float = Field(0.25, ge=0, le=1)
    """Share of the pages that hints of one tenant may hold against eviction."""
    total_held_share: float = Field(0.5, ge=0, le=1)
    """Share of the pages that hints of all tenants together may hold."""
    cached_share: float = Field(1.0, gt=0, le=1)
    """Share of the pages that one tenant may have cached; beyond that, its own pages are evicted first."""
    max_hold_s: float = Field(3600.0, gt=0)
    """Longest time in seconds that a hint holds pages."""
    default_hold_s: float = Field(300.0, gt=0)
    """Seconds that a hint holds pages if it names no time."""
    max_sessions: int = Field(4096, ge=1)
    """Sessions that a worker remembers."""
    max_tenant_sessions: int = Field(1024, ge=1)
    """Sessions of one tenant that a worker remembers."""
    max_prefetches: int = Field(64, ge=0)
    """Prefetches that may wait for their time; further ones are refused, and one tenant may have half of them."""

    @model_validator(mode="after")
    def _check_hold(self) -> RetentionConfig:
        if self.default_hold_s > self.max_hold_s:
            raise ValueError(
                f"retention.default_hold_s = {self.default_hold_s} is above retention.max_hold_s = {self.max_hold_s}; "
                "give at most that"
            )
        return self
