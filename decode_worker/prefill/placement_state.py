"""Describes prompts and this worker's state to the placement policy, and bounds the steps that compute prompts. Pure.

The simulator's decode workers use it too, so both decide by the same figures.
"""

from __future__ import annotations

from typing import Protocol

from decode_worker.prefill.placement_policy import PromptDemand
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from decode_worker.schedule.step_costs import StepCosts
from engine.step.sequence import Sequence
from penstock.config import DecodeConfig
from penstock.types import ChunkSpeed, Lane


class OpenTransfers(Protocol):
    @property
    def num_open(self) -> int:
        """The number of transfers into this worker's pool."""
        ...


class PlacementState:
    """Reads the scheduler, the transfers and the measured pace of one decode worker."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        transfers: OpenTransfers,
        config: DecodeConfig,
        pace: Pace,
        page_size: int,
        token_bytes: float,
    ) -> None:
        """`token_bytes` are the KV bytes per token."""
        self._scheduler = scheduler
        self._transfers = transfers
        self._config = config
        self._pace = pace
        self._page_size = page_size
        self._token_bytes = token_bytes

    def describe(self, sequence: Sequence, pulled_tokens: int = 0, pull_s: float = 0.0) -> PromptDemand:
        """Returns what the policy needs to know about a prompt that arrives now."""
        scheduler = self._scheduler
        num_running, num_queued = scheduler.num_running, scheduler.num_uncomputed_tokens
        if sequence.lane is not Lane.BULK:  # bulk yields to it
            num_running, num_queued = scheduler.num_running_others, scheduler.num_uncomputed_tokens_of_others
        return PromptDemand(
            num_tokens=len(sequence.token_ids),
            cached_tokens=scheduler.peek_cached_tokens(sequence),
            queued_tokens=num_queued,
            num_running=num_running,
            step_tokens=self._step_tokens(num_running, num_queued),
            page_size=self._page_size,
            token_bytes=self._token_bytes,
            pulled_tokens=pulled_tokens,
            pull_s=pull_s,
        )

    def chunk_tokens(self, waited_s: float) -> int | None:
        """Returns how many prompt tokens the next step may compute within the target between tokens; None: no limit.

        A step that delays no stream is not limited: nothing decodes, and no pages are on their way here. `waited_s` is
        the longest time for which a sequence that the step decodes has waited since its first token.
        """
        if not (self._scheduler.is_decoding or self._transfers.num_open):
            return None
        return self._pace.chunk_tokens_within(self._config.itl_target_s, waited_s)

    def chunk_speed(self, steps: StepCosts) -> ChunkSpeed:
        """Returns what routers need to price a prompt that is computed here; nothing before the first step with a
        chunk.
        """
        if not steps.num_chunk_steps:
            return ChunkSpeed()
        scheduler = self._scheduler
        num_running, num_queued = scheduler.num_running_others, scheduler.num_uncomputed_tokens_of_others
        return steps.chunk_speed(num_running, self._step_tokens(num_running, num_queued))

    def _step_tokens(self, num_running: int, num_queued: int) -> int:
        """Returns how many prompt tokens a step computes at most if a prompt arrives now."""
        if self._config.prompt_sm_share:  # no decode step contains the chunks
            return self._config.max_batch_tokens
        room = self._config.max_batch_tokens - num_running
        is_idle = not (num_running or num_queued or self._transfers.num_open)
        within = None if is_idle else self._pace.chunk_tokens_within(self._config.itl_target_s)
        return max(1, room if within is None else min(room, within))
