"""The decision record: why a request went where it did, what that was expected to take, and what it took. Pure.

Plain data, milliseconds. Bounded, because it travels in trailers: candidates go first, then completions but the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.v1 import common_pb2
from router.views import Choice, Score

MAX_BYTES = 6144  # of its JSON: gRPC peers take 8 KiB of metadata in all
_MAX_COMPLETIONS = 8
_STAGES = ("queue", "prefill", "transfer", "admission", "decode", "harm", "bonus", "total")
_ACTUAL = ("queue_ms", "prefill_ms", "transfer_ms", "first_token_ms", "decode_ms")

Record = dict[str, Any]


def leg_record(index: int, choices: Sequence[Choice], timing: common_pb2.Timing | None) -> Record:
    """Of one completion: where it was sent, in order, and how it went; None where that is not known yet."""
    sent: Record = {"index": index, "attempts": [_attempt(choice) for choice in choices]}
    if timing is None:
        return sent
    actual: Record = {name: round(getattr(timing, name), 3) for name in _ACTUAL}
    for name in ("prefill_worker", "decode_worker", "prefill_cached_tokens", "decode_cached_tokens"):
        actual[name] = getattr(timing, name)
    actual |= {"pages_moved": timing.pages_moved, "migrations": timing.num_migrations}
    return {**sent, "actual": actual}


def record(request_id: str, policy: str, legs: Sequence[Record]) -> Record:
    """Of a whole request, within the bound."""
    kept = list(legs[:_MAX_COMPLETIONS])
    whole: Record = {"request_id": request_id, "policy": policy, "completions": kept}
    if len(kept) < len(legs):
        whole["truncated"] = True
    for limit in (4, 2, 1, 0):
        if len(to_json(whole)) <= MAX_BYTES:
            return whole
        whole["truncated"] = True
        for leg in kept:
            for attempt in leg["attempts"]:
                del attempt["considered"][limit:]
    for items in (kept, kept[0]["attempts"]):
        while len(items) > 1 and len(to_json(whole)) > MAX_BYTES:
            del items[(len(items) + 1) // 2 :]
    return whole


def to_json(whole: Record) -> str:
    """ASCII, as metadata must be."""
    return json.dumps(whole, separators=(",", ":"))


def _attempt(choice: Choice) -> Record:
    return {
        "predicted": _score(choice.score),
        "fallbacks": [one.worker_id for one in choice.prefill[1:]],
        "considered": [_score(one) for one in choice.considered],
    }


def _score(score: Score) -> Record:
    stages: Record = {f"{stage}_ms": round(getattr(score, f"{stage}_s") * 1e3, 3) for stage in _STAGES}
    return {
        "prefill": score.prefill or score.decode,
        "decode": score.decode,
        **stages,
        "prefill_cached_tokens": score.prefill_cached_tokens,
        "decode_cached_tokens": score.decode_cached_tokens,
    }
