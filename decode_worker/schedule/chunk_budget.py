"""Counts how many prompt tokens a step may still compute. Pure."""

from __future__ import annotations

from engine.memory.estimates import SCORED_TOKENS
from engine.step.sequence import Sequence
from penstock.types import Lane


class ChunkBudget:
    """The budget of one step. Prompts whose tokens are scored may use `SCORED_TOKENS` of it together."""

    def __init__(self, tokens: int, bulk_tokens: int | None = None) -> None:
        """Prompts of the bulk lane may use `bulk_tokens` of the budget together, by default all."""
        self._tokens = tokens
        self._bulk_tokens = tokens if bulk_tokens is None else bulk_tokens
        self._scored_tokens = SCORED_TOKENS

    @property
    def is_spent(self) -> bool:
        return self._tokens <= 0

    @property
    def has_bulk_tokens(self) -> bool:
        return self._bulk_tokens > 0 and not self.is_spent

    def take(self, sequence: Sequence, num_tokens: int) -> int:
        """Counts and returns how many of the sequence's next `num_tokens` the step computes; 0 if none."""
        count = max(0, min(num_tokens, self._tokens))
        if sequence.lane is Lane.BULK:
            count = min(count, self._bulk_tokens)
        if sequence.scores_prompt:
            count = min(count, self._scored_tokens)
            self._scored_tokens -= count
        if sequence.lane is Lane.BULK:
            self._bulk_tokens -= count
        self._tokens -= count
        return count
