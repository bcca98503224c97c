"""Describes a request's stages and its decision as plain data, for `penstock trace` and the live page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.routing.decision_record import completion_record, decision_record
from router.tracing.stages import EndedCompletion, WorkerLeg, stages_ms, stages_of

Json = dict[str, Any]


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


def _leg(ended: EndedCompletion, leg: WorkerLeg) -> Json:
    lost_ms = {"lost_ms": round(ended.after_ms(leg.lost_s), 3), "error": leg.error} if leg.lost_s else {}
    return {
        "worker": leg.worker,
        "cause": leg.cause.value,
        "sent_ms": round(ended.after_ms(leg.sent_s), 3),
        **lost_ms,
    }


def _rounded(fields: Json) -> Json:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
