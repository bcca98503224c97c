"""The decision record: why a request went to its workers, the predicted times, and the actual times. Pure.

Plain data, with times in milliseconds. Bounded, because it travels in trailers: considered pairs are dropped first,
then completions, then attempts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.v1 import common_pb2
from router.routing.policy.interface import PairChoice, PairScore

MAX_BYTES = 6144  # as JSON; gRPC peers accept 8 KiB of metadata in all
_MAX_COMPLETIONS = 8
_STAGES = tuple(name.removesuffix("_s") for name in PairScore._fields if name.endswith("_s"))

DecisionRecord = dict[str, Any]


def completion_record(
    index: int,
    choices: Sequence[PairChoice],
    timing: common_pb2.Timing | None,
    stages_ms: Mapping[str, float] = MappingProxyType({}),
    weight_version: int = 0,
) -> DecisionRecord:
    """Describes one completion: the workers that it was sent to, in order, and its actual times by stage.

    `timing` is None until it is known. `weight_version` is that of the completion's last worker.
    """
    sent: DecisionRecord = {"index": index, "attempts": [_attempt(choice) for choice in choices]}
    if timing is None:
        return sent
    actual: DecisionRecord = {f"{name.replace(' ', '_')}_ms": round(ms, 3) for name, ms in stages_ms.items()}
    actual["first_token_ms"] = round(timing.first_token_ms, 3)
    for name in ("prefill_worker", "decode_worker", "prefill_cached_tokens", "decode_cached_tokens"):
        actual[name] = getattr(timing, name)
    actual |= {"pages_moved": timing.pages_moved, "migrations": timing.num_migrations}
    if weight_version:
        actual["weight_version"] = weight_version
    if timing.HasField("pull"):
        actual["pull"] = {
            "source": timing.pull.source,
            "wanted_tokens": timing.pull.wanted_tokens,
            "pulled_tokens": timing.pull.pulled_tokens,
            "pull_ms": round(timing.pull.pull_ms, 3),
            "problem": timing.pull.problem,
        }
    if timing.prices:
        actual["placement"] = _placement(timing)
    return {**sent, "actual": actual}


def decision_record(request_id: str, policy: str, completions: Sequence[DecisionRecord]) -> DecisionRecord:
    """Describes a whole request in at most `MAX_BYTES`; marks the record as truncated if anything was dropped."""
    kept = list(completions[:_MAX_COMPLETIONS])
    record: DecisionRecord = {"request_id": request_id, "policy": policy, "completions": kept}
    if len(kept) < len(completions):
        record["truncated"] = True
    for limit in (4, 2, 1, 0):
        if len(to_json(record)) <= MAX_BYTES:
            return record
        record["truncated"] = True
        for completion in kept:
            for attempt in completion["attempts"]:
                del attempt["considered"][limit:]
    for items in (kept, kept[0]["attempts"]):
        while len(items) > 1 and len(to_json(record)) > MAX_BYTES:
            del items[(len(items) + 1) // 2 :]
    return record


def to_json(record: DecisionRecord) -> str:
    """Returns JSON in ASCII, which gRPC metadata requires."""
    return json.dumps(record, separators=(",", ":"))


def _placement(timing: common_pb2.Timing) -> DecisionRecord:
    """Describes the decode worker's own decision: its predictions for each place of the prefill, and what happened."""
    return {
        "first_token_ms": round(timing.decode_first_token_ms, 3),
        "predicted": [
            {
                "place": price.place,
                "prefill": price.prefill_worker,
                "remote_tokens": price.remote_tokens,
                "first_token_ms": round(price.first_token_ms, 3),
                "harm_ms": round(price.harm_ms, 3),
            }
            for price in timing.prices
        ],
    }


def _attempt(choice: PairChoice) -> DecisionRecord:
    return {
        "predicted": _score(choice.score),
        "fallbacks": [estimate.worker_id for estimate in choice.prefill[1:]],
        "considered": [_score(score) for score in choice.considered],
    }


def _score(score: PairScore) -> DecisionRecord:
    stages: DecisionRecord = {f"{stage}_ms": round(getattr(score, f"{stage}_s") * 1e3, 3) for stage in _STAGES}
    record: DecisionRecord = {
        "prefill": score.prefill or score.decode,
        "decode": score.decode,
        **stages,
        "prefill_cached_tokens": score.prefill_cached_tokens,
        "decode_cached_tokens": score.decode_cached_tokens,
    }
    if score.pull is not None:
        record["pull"] = {
            "source": score.pull.source,
            "tokens": score.pull.tokens,
            "pull_ms": round(score.pull.pull_s * 1e3, 3),
            "compute_ms": round(score.pull.compute_s * 1e3, 3),
        }
    return record
