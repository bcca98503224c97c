"""An ended completion and its stages, in the words that metrics, decision records and traces share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.types import FinishReason, Lane
from penstock.v1 import common_pb2
from router.routing.policy.interface import PairChoice


class LegCause(StrEnum):
    """The reason why a completion went to a decode worker."""

    PLACED = "placed"
    REDISPATCHED = "re-dispatched"
    MIGRATED = "migrated"


@dataclass(slots=True)
class WorkerLeg:
    """A decode worker's part in a completion. Moments are monotonic seconds."""

    worker: str
    sent_s: float
    cause: LegCause = LegCause.PLACED
    lost_s: float = 0.0  # 0: the worker was not lost and did not refuse the completion
    error: str = ""  # the reason of that


@dataclass(slots=True)
class EndedCompletion:
    """The router's knowledge of a completion that has ended. Moments are monotonic seconds."""

    number: int  # rises by one with every completion
    request_id: str
    index: int  # of the request's completions
    lane: Lane
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_tokens: int
    timing: common_pb2.Timing
    accepted_s: float
    prepared_s: float  # validated and tokenized
    admitted_s: float
    received_unix_s: float  # `accepted_s` by the machine's clock
    legs: Sequence[WorkerLeg]
    choices: Sequence[PairChoice]
    trace_id: str  # of the sampled trace; empty: none

    def after_ms(self, moment_s: float) -> float:
        """Returns a moment in milliseconds since the request was accepted."""
        return max(0.0, (moment_s - self.accepted_s) * 1e3)

    @property
    def end_ms(self) -> float:
        return self.timing.first_token_ms + self.timing.decode_ms

    @property
    def computing_ms(self) -> float:
        """Returns when the completion was sent to the worker whose prefill counted, before any migration."""
        leg = next((leg for leg in reversed(self.legs) if leg.cause is not LegCause.MIGRATED), None)
        return self.after_ms(leg.sent_s if leg is not None else self.admitted_s)

    @property
    def preempted_ms(self) -> list[float]:
        """Returns the moments of its preemptions."""
        return [self.computing_ms + at_ms for at_ms in self.timing.preempted_ms]


@dataclass(frozen=True, slots=True)
class CompletionStage:
    """A stage, in milliseconds since the request was accepted."""

    name: str
    start_ms: float
    end_ms: float
    worker: str = ""  # empty: the router


def stages_of(ended: EndedCompletion) -> list[CompletionStage]:
    """Returns the stages in their order.

    Workers report durations, which are laid out from the moment at which the last placement was sent, and end with the
    first token at the latest; calls between processes leave gaps. Of a split prompt, whose parts take turns, `queue`,
    `prefill` and `transfer` are the sums.
    """
    timing, first = ended.timing, ended.legs[0] if ended.legs else None
    prepared_ms = ended.after_ms(ended.prepared_s or ended.accepted_s)
    admitted_ms = max(prepared_ms, ended.after_ms(ended.admitted_s))
    sent_ms = max(admitted_ms, ended.after_ms(first.sent_s)) if first else admitted_ms
    found = [
        CompletionStage("tokenize", 0.0, prepared_ms),
        CompletionStage("admission", prepared_ms, admitted_ms),
        CompletionStage("placement", admitted_ms, sent_ms),
    ]
    at_ms = max(sent_ms, ended.computing_ms)
    waited_ms = 0.0 if timing.num_redispatches else sent_ms
    computed_by = timing.prefill_worker or timing.decode_worker
    is_first = timing.first_token_ms > at_ms  # a worker that took over computes the prompt again after the first token
    last_ms = max(at_ms, min(timing.first_token_ms, ended.end_ms) if is_first else ended.end_ms)
    for name, duration_ms, worker in (
        ("queue", timing.queue_ms - waited_ms, computed_by),
        ("prefill", timing.prefill_ms, computed_by),
        ("transfer", timing.transfer_ms, computed_by),
    ):
        end_ms = min(at_ms + max(0.0, duration_ms), last_ms)
        if name != "transfer" or end_ms > at_ms:  # a local prefill has none
            found.append(CompletionStage(name, at_ms, end_ms, worker))
        at_ms = end_ms
    found.append(CompletionStage("decode", timing.first_token_ms, ended.end_ms, timing.decode_worker))
    return found
