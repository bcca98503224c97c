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
    """The stages of a completion in order, as metrics, traces, logs, waterfalls and decision records name them.

    `decode` begins with the first streamed token, the others about where the previous one ends.
    """

    TOKENIZE = "tokenize"  # from its arrival until it is validated and tokenized
    ADMISSION = "admission"  # until it is admitted
    PLACEMENT = "placement"  # until it is placed and sent to a decode worker
    QUEUE = "queue"  # until its first chunk starts at the worker that computes the prompt
    PREFILL = "prefill"  # until its first token is sampled
    TRANSFER = "transfer"  # until its last page has arrived
    DECODE_QUEUE = "decode queue"  # until it joins the decode worker's batch
    DECODE = "decode"  # from its first streamed token to its last


AT_ROUTER = (Stage.TOKENIZE, Stage.ADMISSION, Stage.PLACEMENT)


class LegCause(StrEnum):
    """Why a completion went to a decode worker."""

    PLACED = "placed"
    REDISPATCHED = "re-dispatched"
    MIGRATED = "migrated"


@dataclass(slots=True)
class WorkerLeg:
    """A leg: the part of a completion that one decode worker computes. Times are monotonic seconds."""

    worker: str
    sent_s: float
    cause: LegCause = LegCause.PLACED
    lost_s: float = 0.0  # 0: the worker was not lost and did not refuse the completion
    error: str = ""  # the reason of the loss or refusal
    weight_version: int = 0  # of the worker


class EndedCompletion(NamedTuple):
    """The router's record of a completion that has ended. Times are monotonic seconds."""

    number: int  # increases by one with every completion of this router
    request_id: str
    index: int  # type: ignore[assignment]  # within the request; hides a method of tuples
    lane: Lane
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_tokens: int
    timing: common_pb2.Timing
    accepted_s: float
    prepared_s: float  # when it was validated and tokenized
    admitted_s: float
    received_unix_s: float  # `accepted_s` as Unix time
    legs: Sequence[WorkerLeg]
    choices: Sequence[PairChoice]
    trace_id: str  # empty if it is not traced
    call_id: str = ""  # the x-request-id of its HTTP call

    def after_ms(self, moment_s: float) -> float:
        """Converts a time to milliseconds since the request was accepted."""
        return max(0.0, (moment_s - self.accepted_s) * 1e3)

    @property
    def end_ms(self) -> float:
        return self.timing.first_token_ms + self.timing.decode_ms

    @property
    def computing_ms(self) -> float:
        """When the completion was sent to the worker whose prefill counts, before any migration."""
        for leg in reversed(self.legs):
            if leg.cause is not LegCause.MIGRATED:
                return self.after_ms(leg.sent_s)
        return self.after_ms(self.admitted_s)

    @property
    def preempted_ms(self) -> list[float]:
        """The times of its preemptions, in milliseconds since the request was accepted."""
        return [self.computing_ms + at_ms for at_ms in self.timing.preempted_ms]


class CompletionStage(NamedTuple):
    """The beginning and end of a stage, in milliseconds since the request was accepted."""

    name: Stage
    start_ms: float
    end_ms: float
    worker: str = ""  # empty: the router


class Arithmetic(NamedTuple):
    """The functions that `lay_out` computes with, for numbers or for arrays with an element for each completion."""

    maximum: Callable[[Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]  # returns the second if the first is true, else the third


_SCALAR = Arithmetic(max, min, lambda condition, chosen, other: chosen if condition else other)


class StageMoments(NamedTuple):
    """The input of `lay_out` for a completion's stages: durations, and times since the request was accepted.

    All are in milliseconds, as numbers or arrays.
    """

    prepared: Any
    admitted: Any
    sent: Any  # when it was sent to its first worker
    computing: Any  # when it was sent to the worker whose prefill counts
    queue: Any
    prefill: Any
    transfer: Any
    decode_queue: Any
    first_token: Any
    decode: Any
    redispatched: Any  # number of re-dispatches


def stage_moments(ended: EndedCompletion, timing: common_pb2.Timing) -> tuple[float, ...]:
    """Returns the fields of `StageMoments` as a plain tuple, which is cheaper. `timing` is the completion's."""
    accepted_s, legs = ended.accepted_s, ended.legs
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
    """Returns the beginning and the end of each `Stage`, in milliseconds since the request was accepted.

    `times` are those of `StageMoments`. `transfer` and `decode queue` apply only to completions whose pages moved.

    Workers report durations, which are laid out from the time when the last placement was sent. A prefill ends with the
    first token at the latest; pages may arrive, and wait for the batch, before or after that token is streamed. Calls
    between processes leave gaps. For a split prompt, `queue`, `prefill` and `transfer` are sums over its parts.
    """
    maximum, minimum, choose = arithmetic
    prepared, admitted, sent, begun, queue, prefill, transfer, decode_queue, first_token, decode, redispatched = times
    end = first_token + decode
    prepared = maximum(prepared, 0.0)
    admitted = maximum(prepared, admitted)
    sent = maximum(admitted, sent)
    begun = maximum(sent, begun)
    waited = choose(redispatched, 0.0, sent)
    # After a re-dispatch, the prompt may be computed again after the first token.
    latest = maximum(begun, choose(first_token > begun, first_token, end))
    queued = minimum(begun + maximum(queue - waited, 0.0), latest)
    computed = minimum(queued + prefill, latest)
    landed = maximum(computed, minimum(computed + transfer, end))
    joined = maximum(landed, minimum(landed + decode_queue, end))
    return (
        (0.0, prepared),
        (prepared, admitted),
        (admitted, sent),
        (begun, queued),
        (queued, computed),
        (computed, landed),
        (landed, joined),
        (first_token, end),
    )


def stage_intervals(ended: EndedCompletion) -> tuple[tuple[float, float] | None, ...]:
    """Returns the beginning and the end of each `Stage`, in milliseconds since the request was accepted.

    They are None for `transfer` and `decode queue` if no pages moved.
    """
    timing = ended.timing
    intervals = lay_out(stage_moments(ended, timing), _SCALAR)
    if has_transfer(timing):
        return intervals
    return (*intervals[:5], None, None, intervals[7])


def stages_of(ended: EndedCompletion) -> list[CompletionStage]:
    """Returns the stages of the completion in order, each with its worker."""
    timing = ended.timing
    computed_by = timing.prefill_worker or timing.decode_worker
    workers = ("", "", "", computed_by, computed_by, computed_by, timing.decode_worker, timing.decode_worker)
    return [
        CompletionStage(stage, *interval, worker)
        for stage, interval, worker in zip(Stage, stage_intervals(ended), workers, strict=True)
        if interval is not None
    ]


def stages_ms(ended: EndedCompletion) -> dict[str, float]:
    """Returns the duration of each stage of the completion, in order."""
    return {stage.name.value: stage.end_ms - stage.start_ms for stage in stages_of(ended)}
