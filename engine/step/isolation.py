"""Limits a step's failure to the sequence that caused it: a failed batch is recomputed one sequence at a time.

It sits between a worker's core and `Engine.step`. Computing a step twice is harmless: it writes the same KV to the same
pages. Only errors that Penstock raises on purpose are isolated, such as logits that are not finite; any other error is
a fault of the process, which must not continue.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.step.prompt_scores import PromptScores
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class IsolatedOutput:
    """`work` was computed, with one entry of `output` each; `failed` was not."""

    work: list[ScheduledSequence]
    output: StepOutput
    failed: list[tuple[Sequence, PenstockError]]


def step_isolated(step: Callable[[Seq[ScheduledSequence]], StepOutput], work: Seq[ScheduledSequence]) -> IsolatedOutput:
    """Runs a step; if it fails as a whole, runs each sequence by itself and reports those that fail again."""
    try:
        return IsolatedOutput(list(work), step(work), [])
    except PenstockError as error:
        if len(work) == 1:
            return IsolatedOutput([], StepOutput(()), [(work[0].sequence, error)])
    done: list[ScheduledSequence] = []
    tokens: list[SampledToken | None] = []
    failed: list[tuple[Sequence, PenstockError]] = []
    scores: dict[int, PromptScores] = {}
    for scheduled in work:
        alone = step_isolated(step, [scheduled])
        scores.update({len(done) + place: found for place, found in alone.output.scores.items()})
        done += alone.work
        tokens += alone.output.tokens
        failed += alone.failed
    return IsolatedOutput(done, StepOutput(tuple(tokens), scores), failed)
