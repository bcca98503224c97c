"""Describes an ended completion and its stages, by the names that metrics, decision records and traces share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

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
    """Says why a completion went to a decode worker."""

    PLACED = "placed"
    REDISPATCHED = "re-dispatched"
    MIGRATED = "migrated"


@dataclass(slots=True)
class WorkerLeg:
    """A leg: the part of a completion that one decode worker computes. Moments are monotonic seconds."""

    worker: str
    sent_s: float
    cause: LegCause = LegCause.PLACED
    lost_s: float = 0.0  # 0: the worker was not lost and did not refuse the completion
    error: str = ""  # the reason
    weight_version: int = 0  # of the worker


class EndedCompletion(NamedTuple):
    """Holds what the router knows about a completion that has ended. Moments are monotonic seconds."""

    number: int  # rises by one with every completion
    request_id: str
    index: int  # type: ignore[assignment]  # of the request's completions; hides the method of tuples
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


class Arithmetic(NamedTuple):
    """The functions with which `lay_out` computes: on numbers, or on arrays with an element for each completion."""

    maximum: Callable[[Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]  # the second where the first is true, else the third


_SCALAR = Arithmetic(max, min, lambda condition, chosen, other: chosen if condition else other)


class StageMoments(NamedTuple):
    """Durations and moments that lay out a completion's stages, in milliseconds, as numbers or as arrays; moments are
    since it was accepted.
    """

    prepared: Any
    admitted: Any
    sent: Any  # to its first worker
    computing: Any  # sent to the worker whose prefill counted
    queue: Any
    prefill: Any
    transfer: Any
    decode_queue: Any
    first_token: Any
    decode: Any
    redispatched: Any  # 0: the first worker computed it to the end


def stage_moments(ended: EndedCompletion) -> tuple[float, ...]:
    """Returns the fields of `StageMoments`, without the cost of naming them."""
    timing, accepted_s, legs = ended.timing, ended.accepted_s, ended.legs
    sent = admitted = (ended.admitted_s - accepted_s) * 1e3
    if legs:
        sent = (legs[0].sent_s - accepted_s) * 1e3
    return (
        (ended.prepared_s - accepted_s) * 1e3,
        admitted,
        sent,
        sent if len(legs) == 1 and legs[0].cause is LegCause.PLACED else ended.computing_ms,
        timing.queue_ms,
        timing.prefill_ms,
        timing.transfer_ms,
        timing.decode_queue_ms,
        timing.first_token_ms,
        timing.decode_ms,
        timing.num_redispatches,
    )


def has_transfer(timing: common_pb2.Timing) -> bool:
    """Returns whether the completion has the stages `transfer` and `decode queue`."""
    return bool(timing.transfer_ms or timing.pages_moved)


def lay_out(times: Iterable[Any], arithmetic: Arithmetic) -> tuple[tuple[Any, Any], ...]:
    """Returns the beginning and the end of each `Stage`, in milliseconds since the request was accepted, from
    `StageMoments` of numbers or of arrays. `transfer` and `decode queue` apply only where pages moved.

    Workers report durations, which are laid out from the moment at which the last placement was sent. A prefill ends
    with the first token at the latest; pages may land, and wait for the batch, while that is on its way or after it.
    Calls between processes leave gaps. For a split prompt, whose parts take turns, `queue`, `prefill` and `transfer`
    are sums.
    """
    maximum, minimum, choose = arithmetic
    prepared, admitted, sent, at, queue, prefill, transfer, decode_queue, first_token, decode, redispatched = times
    end = first_token + decode
    prepared = maximum(prepared, 0.0)
    admitted = maximum(prepared, admitted)
    sent = maximum(admitted, sent)
    at = maximum(sent, at)
    waited = choose(redispatched, 0.0, sent)
    # A worker that took over computes the prompt again after the first token.
    last = maximum(at, choose(first_token > at, first_token, end))
    queued = minimum(at + maximum(queue - waited, 0.0), last)
    computed = minimum(queued + prefill, last)
    landed = maximum(computed, minimum(computed + transfer, end))
    joined = maximum(landed, minimum(landed + decode_queue, end))
    return (
        (0.0, prepared),
        (prepared, admitted),
        (admitted, sent),
        (at, queued),
        (queued, computed),
        (computed, landed),
        (landed, joined),
        (first_token, end),
    )


def stage_intervals(ended: EndedCompletion) -> tuple[tuple[float, float] | None, ...]:
    """Returns the beginning and the end of each `Stage`, in milliseconds since the request was accepted; None for one
    that the completion did not have. A prompt that the decode worker computed has neither `transfer` nor
    `decode queue`.
    """
    intervals = lay_out(stage_moments(ended), _SCALAR)
    if has_transfer(ended.timing):
        return intervals
    return (*intervals[:5], None, None, intervals[7])


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
