"""Describes a request's stages and its decision as plain data, for `penstock trace` and the live page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.v1 import common_pb2
from router.prepared_request import PreparedRequest
from router.routing.decision_record import completion_record, decision_record
from router.routing.policy.interface import PairChoice
from router.tracing.stages import EndedCompletion, LegCause, Stage, WorkerLeg, stages_ms, stages_of

Json = dict[str, Any]

UNTIL_FIRST_TOKEN = "until first token"  # what its workers do meanwhile is known when they report its end


class RunningCompletion(NamedTuple):
    """The progress of a completion that runs. Times are monotonic seconds; 0: not yet."""

    index: int  # type: ignore[assignment]  # within the request; hides a method of tuples
    legs: Sequence[WorkerLeg] = ()
    choices: Sequence[PairChoice] = ()
    num_tokens: int = 0
    first_token_s: float = 0.0
    num_redispatches: int = 0
    timing: common_pb2.Timing | None = None  # set if its last token has arrived, but other completions run


def row(ended: EndedCompletion) -> Json:
    """Describes an ended completion as one row. Times are in milliseconds; `ended_s` is Unix time in seconds."""
    timing = ended.timing
    return {
        "number": ended.number,
        "request_id": ended.request_id,
        "ended_s": round(ended.received_unix_s + ended.end_ms / 1e3, 3),
        "lane": ended.lane.value,
        "finish_reason": ended.finish_reason.value,
        "prompt_tokens": ended.num_prompt_tokens,
        "cached_tokens": timing.cached_tokens,
        "output_tokens": ended.num_tokens,
        "stages_ms": _rounded(stages_ms(ended)),
        "first_token_ms": round(timing.first_token_ms, 3),
        "decode_ms": round(timing.decode_ms, 3),
        "prefill_worker": timing.prefill_worker,
        "decode_worker": timing.decode_worker,
        "pages_moved": timing.pages_moved,
        "preemptions": timing.num_preemptions,
        "migrations": timing.num_migrations,
        "redispatches": timing.num_redispatches,
    }


def waterfall(completions: Sequence[EndedCompletion], policy: str) -> Json:
    """Describes the ended completions of one request (at least one), whose workers `policy` has chosen."""
    first = completions[0]
    records = [completion_record(each.index, each.choices, each.timing, stages_ms(each)) for each in completions]
    return {
        "request_id": first.request_id,
        "trace_id": first.trace_id,
        "received_s": round(first.received_unix_s, 3),
        "completions": [
            {
                "index": each.index,
                **row(each),
                "end_ms": round(each.end_ms, 3),
                "stages": [_rounded(stage._asdict()) for stage in stages_of(each)],
                "legs": [_leg(each, leg) for leg in each.legs],
                "preempted_ms": [round(at_ms, 3) for at_ms in each.preempted_ms],
            }
            for each in completions
        ],
        "decision": decision_record(first.request_id, policy, records),
    }


def running_waterfall(
    request: PreparedRequest, admitted_s: float, completions: Sequence[RunningCompletion], now_s: float, policy: str
) -> Json:
    """Describes a request that has not ended, in the form of `waterfall` and with `running`. Its stages end now.

    `admitted_s` is 0 while it waits for admission. Figures that only workers know are 0.
    """
    records = [
        completion_record(each.index, each.choices, each.timing or common_pb2.Timing(), {}) for each in completions
    ]
    return {
        "request_id": request.request_id,
        "trace_id": request.trace.trace_id if request.trace is not None else "",
        "running": True,
        "completions": [_running(request, admitted_s, each, now_s) for each in completions],
        "decision": decision_record(request.request_id, policy, records),
    }


def _running(request: PreparedRequest, admitted_s: float, each: RunningCompletion, now_s: float) -> Json:
    """Describes a completion up to now, or to its end if only other completions of the request still run."""
    timing = each.timing
    until_s = now_s
    if timing is not None:
        until_s = request.accepted_s + (timing.first_token_ms + timing.decode_ms) / 1e3
    return {
        "index": each.index,
        "lane": request.lane.value,
        "finish_reason": "",
        "prompt_tokens": len(request.token_ids),
        "cached_tokens": 0,
        "output_tokens": each.num_tokens,
        "first_token_ms": _since(request, each.first_token_s) if each.first_token_s else 0.0,
        "end_ms": _since(request, until_s),
        "stages": _stages_so_far(request, admitted_s, each, until_s),
        "legs": [_leg(request, leg) for leg in each.legs],
        "preempted_ms": [],
        "pages_moved": 0,
        "preemptions": 0,
        "migrations": sum(leg.cause is LegCause.MIGRATED for leg in each.legs),
        "redispatches": each.num_redispatches,
    }


def _stages_so_far(request: PreparedRequest, admitted_s: float, each: RunningCompletion, until_s: float) -> list[Json]:
    """Returns the stages that have begun by `until_s`, where the last one ends."""
    sent_s = each.legs[0].sent_s if each.legs else 0.0
    begins = (
        (Stage.TOKENIZE.value, request.accepted_s),
        (Stage.ADMISSION.value, request.prepared_s),
        (Stage.PLACEMENT.value, admitted_s),
        (UNTIL_FIRST_TOKEN, sent_s),
        (Stage.DECODE.value, each.first_token_s),
    )
    begun = [(name, begin_s) for name, begin_s in begins if begin_s]
    ends_s = [*(begin_s for _, begin_s in begun[1:]), until_s]
    worker = each.legs[-1].worker if each.legs else ""
    return [
        {
            "name": name,
            "start_ms": _since(request, begin_s),
            "end_ms": _since(request, end_s),
            "worker": worker if name in (UNTIL_FIRST_TOKEN, Stage.DECODE.value) else "",
        }
        for (name, begin_s), end_s in zip(begun, ends_s, strict=True)
    ]


def _leg(accepted: EndedCompletion | PreparedRequest, leg: WorkerLeg) -> Json:
    lost_ms = {"lost_ms": _since(accepted, leg.lost_s), "error": leg.error} if leg.lost_s else {}
    return {"worker": leg.worker, "cause": leg.cause.value, "sent_ms": _since(accepted, leg.sent_s), **lost_ms}


def _since(accepted: EndedCompletion | PreparedRequest, moment_s: float) -> float:
    """Returns the milliseconds from the request's arrival to a monotonic time."""
    return round(max(0.0, (moment_s - accepted.accepted_s) * 1e3), 3)


def _rounded(fields: Json) -> Json:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
