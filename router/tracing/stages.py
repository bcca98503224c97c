"""An ended completion and its stages, in the words that metrics, decision records and traces share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from penstock.types import FinishReason, Lane
from penstock.v1 import common_pb2
from router.routing.policy.interface import PairChoice


class Stage(StrEnum):
    """The stages of a completion in order: the words of metrics, traces, logs, waterfalls and decision records."""

    TOKENIZE = "tokenize"  # received to validated and tokenized
    ADMISSION = "admission"  # to admitted
    PLACEMENT = "placement"  # to placed: sent to a decode worker
    QUEUE = "queue"  # to the first chunk at the worker that computes the prompt
    PREFILL = "prefill"  # to the first token sampled
    TRANSFER = "transfer"  # to the last page landed
    DECODE_QUEUE = "decode queue"  # to the first step of the decode worker's batch
    DECODE = "decode"  # the first token streamed to the last one: finished


AT_ROUTER = (Stage.TOKENIZE, Stage.ADMISSION, Stage.PLACEMENT)


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
    error: str = ""  # the reason


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
        for leg in reversed(self.legs):
            if leg.cause is not LegCause.MIGRATED:
                return self.after_ms(leg.sent_s)
        return self.after_ms(self.admitted_s)

    @property
    def preempted_ms(self) -> list[float]:
        """Returns the moments of its preemptions."""
        return [self.computing_ms + at_ms for at_ms in self.timing.preempted_ms]


class CompletionStage(NamedTuple):
    """A stage, in milliseconds since the request was accepted."""

    name: Stage
    start_ms: float
    end_ms: float
    worker: str = ""  # empty: the router


def stage_intervals(ended: EndedCompletion) -> tuple[tuple[float, float] | None, ...]:
    """Returns the beginning and the end of each `Stage`, in milliseconds since the request was accepted; None for one
    that the completion did not have.

    Workers report durations, which are laid out from the moment at which the last placement was sent. A prefill ends
    with the first token at the latest; pages may land, and wait for the batch, while that is on its way or after it.
    Calls between processes leave gaps. For a split prompt, whose parts take turns, `queue`, `prefill` and `transfer`
    are sums. A prompt that the decode worker computed has neither `transfer` nor `decode queue`.
    """
    timing, accepted_s = ended.timing, ended.accepted_s
    first_token_ms, transfer_ms = timing.first_token_ms, timing.transfer_ms
    end_ms = first_token_ms + timing.decode_ms
    prepared_ms = max(0.0, ((ended.prepared_s or accepted_s) - accepted_s) * 1e3)
    sent_ms = admitted_ms = max(prepared_ms, (ended.admitted_s - accepted_s) * 1e3)
    if ended.legs:
        sent_ms = max(admitted_ms, (ended.legs[0].sent_s - accepted_s) * 1e3)
    at_ms = max(sent_ms, ended.computing_ms)
    waited_ms = 0.0 if timing.num_redispatches else sent_ms
    # A worker that took over computes the prompt again after the first token.
    last_ms = max(at_ms, first_token_ms if first_token_ms > at_ms else end_ms)
    queued_ms = min(at_ms + max(0.0, timing.queue_ms - waited_ms), last_ms)
    computed_ms = min(queued_ms + timing.prefill_ms, last_ms)
    transfer = decode_queue = None
    if transfer_ms or timing.pages_moved:
        landed_ms = max(computed_ms, min(computed_ms + transfer_ms, end_ms))
        transfer = (computed_ms, landed_ms)
        decode_queue = (landed_ms, max(landed_ms, min(landed_ms + timing.decode_queue_ms, end_ms)))
    return (
        (0.0, prepared_ms),
        (prepared_ms, admitted_ms),
        (admitted_ms, sent_ms),
        (at_ms, queued_ms),
        (queued_ms, computed_ms),
        transfer,
        decode_queue,
        (first_token_ms, end_ms),
    )


def stages_of(ended: EndedCompletion) -> list[CompletionStage]:
    """Returns the stages that the completion had, in their order, each with its worker."""
    timing = ended.timing
    computed_by = timing.prefill_worker or timing.decode_worker
    workers = ("", "", "", computed_by, computed_by, computed_by, timing.decode_worker, timing.decode_worker)
    return [
        CompletionStage(stage, *interval, worker)
        for stage, interval, worker in zip(Stage, stage_intervals(ended), workers, strict=True)
        if interval is not None
    ]


def stages_ms(ended: EndedCompletion) -> dict[str, float]:
    """Returns the milliseconds of each stage that the completion had, in their order."""
    return {stage.name.value: stage.end_ms - stage.start_ms for stage in stages_of(ended)}
