"""Keeps a step's failure to the sequence that caused it: a batch that fails is computed again one by one.

Between a worker's core and `Engine.step`. Computing a step twice is harmless: it writes the same KV to the same pages.
Only errors that Penstock raises on purpose are isolated (logits that are not finite, say); any other one is a fault of
the process, which must not go on.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class IsolatedOutput:
    """`work` was computed, with one entry of `output` for each; `failed` was not."""

    work: list[ScheduledSequence]
    output: StepOutput
    failed: list[tuple[Sequence, PenstockError]]


def step_isolated(step: Callable[[Seq[ScheduledSequence]], StepOutput], work: Seq[ScheduledSequence]) -> IsolatedOutput:
    """Runs a step; where it fails as a whole, runs each sequence alone and reports those that fail again."""
    try:
        return IsolatedOutput(list(work), step(work), [])
    except PenstockError as error:
        if len(work) == 1:
            return IsolatedOutput([], StepOutput(()), [(work[0].sequence, error)])
    done: list[ScheduledSequence] = []
    tokens: list[SampledToken | None] = []
    failed: list[tuple[Sequence, PenstockError]] = []
    for scheduled in work:
        alone = step_isolated(step, [scheduled])
        done += alone.work
        tokens += alone.output.tokens
        failed += alone.failed
    return IsolatedOutput(done, StepOutput(tuple(tokens)), failed)
