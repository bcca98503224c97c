"""Tests how the stages of an ended completion follow each other, and what its waterfall shows."""

from __future__ import annotations

import pytest

from penstock.types import FinishReason, Lane
from penstock.v1 import common_pb2
from router.tracing.stages import CompletionStage, EndedCompletion, LegCause, WorkerLeg, stages_of
from router.tracing.waterfall import waterfall

BEGAN_S = 1000.0


def ended(timing: common_pb2.Timing, *legs: WorkerLeg) -> EndedCompletion:
    """Returns a completion that was tokenized after 2 ms, admitted after 5 and sent after 6."""
    return EndedCompletion(
        1,
        "r",
        0,
        Lane.STANDARD,
        FinishReason.LENGTH,
        100,
        11,
        timing,
        BEGAN_S,
        BEGAN_S + 0.002,
        BEGAN_S + 0.005,
        1_700_000_000.0,
        legs or (WorkerLeg("decode-0", BEGAN_S + 0.006),),
        (),
        "",
    )


def timing(**fields: object) -> common_pb2.Timing:
    """Returns the times of a prompt that a prefill worker computed."""
    defaults = {
        "queue_ms": 16.0,  # 6 of them at the router
        "prefill_ms": 40.0,
        "transfer_ms": 3.0,
        "decode_queue_ms": 2.0,
        "first_token_ms": 60.0,
        "decode_ms": 100.0,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
    }
    return common_pb2.Timing(**{**defaults, **fields})  # type: ignore[arg-type]


def spans(found: list[CompletionStage]) -> dict[str, tuple[float, float]]:
    return {stage.name: (pytest.approx(stage.start_ms), pytest.approx(stage.end_ms)) for stage in found}


def test_the_stages_of_a_remote_prefill_follow_each_other() -> None:
    found = stages_of(ended(timing()))
    assert spans(found) == {
        "tokenize": (0, 2),
        "admission": (2, 5),
        "placement": (5, 6),
        "queue": (6, 16),
        "prefill": (16, 56),
        "transfer": (56, 59),
        "decode queue": (59, 61),
        "decode": (60, 160),
    }
    assert [stage.worker for stage in found] == ["", "", "", *["prefill-0"] * 3, "decode-0", "decode-0"]


def test_a_local_prefill_has_no_transfer() -> None:
    found = stages_of(ended(timing(prefill_worker="decode-0", transfer_ms=0.0)))
    assert [stage.name for stage in found] == ["tokenize", "admission", "placement", "queue", "prefill", "decode"]


def test_after_a_failover_the_prefill_is_the_second_workers() -> None:
    """The second worker reports no wait at the router; the lost one did."""
    lost = WorkerLeg("decode-0", BEGAN_S + 0.006, lost_s=BEGAN_S + 0.07, error="UNAVAILABLE")
    second = WorkerLeg("decode-1", BEGAN_S + 0.08, LegCause.REDISPATCHED)
    found = stages_of(ended(timing(num_redispatches=1, queue_ms=4.0, prefill_ms=20.0, transfer_ms=0.0), lost, second))
    assert spans(found)["placement"] == (5, 6)
    assert spans(found)["queue"] == (80, 84)
    assert spans(found)["prefill"] == (84, 104)


def test_a_migration_does_not_change_the_prefill() -> None:
    second = WorkerLeg("decode-1", BEGAN_S + 0.1, LegCause.MIGRATED)
    found = stages_of(ended(timing(num_migrations=1), WorkerLeg("decode-0", BEGAN_S + 0.006), second))
    assert spans(found)["prefill"] == (16, 56)


def test_preemptions_count_from_the_worker_that_computed_the_prompt() -> None:
    completion = ended(timing(preempted_ms=[90.0, 120.0]))
    assert completion.preempted_ms == pytest.approx([96.0, 126.0])


def test_a_prefill_ends_with_the_first_token_whatever_the_workers_clock_says() -> None:
    found = spans(stages_of(ended(timing(queue_ms=30.0, prefill_ms=70.0))))
    assert (found["queue"], found["prefill"], found["decode"]) == ((6, 30), (30, 60), (60, 160))


def test_no_stage_ends_after_the_completion() -> None:
    found = stages_of(ended(timing(prefill_ms=1e6)))
    assert all(stage.start_ms <= stage.end_ms <= 160.001 for stage in found)


def test_the_waterfall_shows_the_legs_and_why_each_worker_was_left() -> None:
    lost = WorkerLeg("decode-0", BEGAN_S + 0.006, lost_s=BEGAN_S + 0.07, error="UNAVAILABLE")
    second = WorkerLeg("decode-1", BEGAN_S + 0.08, LegCause.REDISPATCHED)
    found = waterfall([ended(timing(num_redispatches=1), lost, second)], "kv-aware")
    (completion,) = found["completions"]
    assert completion["legs"] == [
        {"worker": "decode-0", "cause": "placed", "sent_ms": 6.0, "lost_ms": 70.0, "error": "UNAVAILABLE"},
        {"worker": "decode-1", "cause": "re-dispatched", "sent_ms": 80.0},
    ]
    assert [stage["name"] for stage in completion["stages"]][-1] == "decode"
    assert (found["decision"]["policy"], completion["end_ms"]) == ("kv-aware", 160.0)


def test_pages_can_land_and_wait_while_the_first_token_streams() -> None:
    found = spans(stages_of(ended(timing(transfer_ms=20.0, decode_queue_ms=5.0))))
    assert (found["transfer"], found["decode queue"], found["decode"]) == ((56, 76), (76, 81), (60, 160))
