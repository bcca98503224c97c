"""Prices a prompt that a decode worker computes in chunks beside its decoding. Pure.

Decode workers price a prompt in this way to decide whether to keep it, and routers do so with the speeds that decode
workers report. `costs_of_chunks` and `ChunkCosts` work with columns of many workers as well as with single figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from penstock.scheduling.prompt_harm import WITHIN_TARGET

# A figure of one worker, or a numpy column of them. Their operators are the same, which types cannot express.
Figure = Any


class ChunkCosts(NamedTuple):
    """The predicted costs of computing a part of a prompt beside the present decoding, in seconds."""

    queue_s: Figure  # until its first chunk begins: the rest of the step in flight, and the chunks queued before it
    num_steps: Figure  # steps that compute its chunks
    step_s: Figure  # time of a step without them
    added_s: Figure  # time by which its chunks delay each decoding sequence

    @property
    def busy_s(self) -> Figure:
        """The time of the steps that compute its chunks, for which the prompts behind it wait."""
        return self.num_steps * self.step_s + self.added_s

    @property
    def total_s(self) -> Figure:
        """The time until its last token is computed."""
        return self.queue_s + self.busy_s

    def harm_s(
        self,
        num_running: Figure,
        num_behind: Figure,
        target_s: Figure,
        least: Callable[..., Figure] = min,
        most: Callable[..., Figure] = max,
    ) -> Figure:
        """Returns the summed delay of the sequences that decode and of the prompts that wait behind it.

        A delay of sequences within the target between tokens counts less; without a target, `target_s` is 0. Columns
        need numpy's `minimum` and `maximum`.
        """
        beyond_s = least(self.added_s, most(0.0, self.num_steps * (self.step_s - target_s) + self.added_s))
        delay_s = beyond_s + WITHIN_TARGET * (self.added_s - beyond_s)
        return num_running * delay_s + num_behind * self.busy_s


class ChunkSpeeds(Protocol):
    """The fields of `penstock.types.ChunkSpeed`, of one worker or as columns."""

    @property
    def step_tokens(self) -> Figure: ...

    @property
    def step_s(self) -> Figure: ...

    @property
    def chunked_s(self) -> Figure: ...

    @property
    def token_s(self) -> Figure: ...

    @property
    def pair_s(self) -> Figure: ...


def costs_of_chunks(
    speed: ChunkSpeeds, num_tokens: Figure, num_before: Figure, num_queued: Figure, is_busy: Figure
) -> ChunkCosts:
    """Predicts the costs of computing `num_tokens`, at least one, that follow `num_before` tokens of the same prompt.

    `num_queued` tokens of other prompts are computed first. A busy worker has a step in flight.
    """
    step_tokens, step_s, chunked_s = speed.step_tokens, speed.step_s, speed.chunked_s
    first, last = num_queued // step_tokens, -(-(num_queued + num_tokens) // step_tokens)
    num_steps = last - first
    own_s = num_tokens * (speed.token_s + (num_before + num_tokens / 2) * speed.pair_s)
    queued_s = num_queued * (speed.token_s + step_tokens / 2 * speed.pair_s)
    queue_s = is_busy * step_s / 2 + first * (step_s + chunked_s) + queued_s
    return ChunkCosts(queue_s, num_steps, step_s, num_steps * chunked_s + own_s)
