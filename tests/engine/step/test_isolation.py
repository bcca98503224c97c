"""Tests that one sequence that cannot be computed gets its error while the others of its batch get their tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.step.isolation import step_isolated
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.errors import InternalError
from penstock.types import RequestId, SamplingParams

POISON = 13


def step(work: Seq[ScheduledSequence]) -> StepOutput:
    if any(POISON in scheduled.sequence.token_ids for scheduled in work):
        raise InternalError("logits are not finite")
    return StepOutput(tuple(SampledToken(sum(scheduled.sequence.token_ids)) for scheduled in work))


def scheduled(*token_ids: int) -> ScheduledSequence:
    sequence = Sequence(RequestId("r"), list(token_ids), len(token_ids), SamplingParams(max_tokens=1), b"")
    return ScheduledSequence(sequence, len(token_ids))


def test_a_good_batch_is_computed_once() -> None:
    calls: list[int] = []

    def counted(work: Seq[ScheduledSequence]) -> StepOutput:
        calls.append(len(work))
        return step(work)

    done = step_isolated(counted, [scheduled(1), scheduled(2, 3)])
    assert calls == [2]
    assert [token.token_id for token in done.output.tokens if token] == [1, 5]
    assert done.failed == []


@pytest.mark.parametrize("bad", [[0], [1], [0, 2], [0, 1, 2]])
def test_only_bad_sequences_fail(bad: list[int]) -> None:
    work = [scheduled(POISON if index in bad else index) for index in range(3)]
    done = step_isolated(step, work)
    assert [item.sequence for item, _ in zip(done.work, done.output.tokens, strict=True)] == [
        item.sequence for index, item in enumerate(work) if index not in bad
    ]
    assert [sequence for sequence, _ in done.failed] == [work[index].sequence for index in bad]
    assert all(str(error) == "logits are not finite" for _, error in done.failed)


def test_an_unexpected_error_is_not_isolated() -> None:
    def broken(work: Seq[ScheduledSequence]) -> StepOutput:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        step_isolated(broken, [scheduled(1), scheduled(2)])
