"""Where those without a row will stand when the step under way is over, whose tokens nobody knows yet. Pure.

Asked by the decode scheduler for the step after it. A prompt goes on behind its chunk; one that ends, or a sequence
that lost its row meanwhile, has its next token drawn there, and takes it from the device.
"""

from __future__ import annotations

from decode_worker.run_queues import Entry, RunQueues
from decode_worker.steps_under_way import StepsUnderWay
from engine.sequence import ScheduledSequence, Sequence
from engine.step_plan import LaunchedT


def seat_ahead(queues: RunQueues, steps: StepsUnderWay[LaunchedT]) -> list[ScheduledSequence] | None:
    """With one step under way: those who decode after it get their row. What the others have left to compute then is
    returned, or None where somebody's tokens must be known first."""
    plan, places = steps.newest, steps.places([entry.sequence for entry in queues.rowless])
    seated: list[Entry] = []
    awaiting: dict[Sequence, int] = {}
    left: list[ScheduledSequence] = []
    for entry in queues.rowless:
        sequence, place = entry.sequence, places.get(entry.sequence)
        if place is None:
            if sequence.num_uncomputed_tokens == 1:
                seated.append(entry)
            else:
                left.append(ScheduledSequence(sequence, sequence.num_uncomputed_tokens))
            continue
        first = plan[place].start + plan[place].num_tokens
        if plan[place].draws:
            awaiting[sequence] = place
        elif place < len(plan.rows.items):
            return None  # it was to draw its last token, and has got more of them meanwhile
        else:
            left.append(ScheduledSequence(sequence, len(sequence.token_ids) - first, first))
    queues.seat(seated)
    queues.seat_awaiting(awaiting, plan.step)
    return left
