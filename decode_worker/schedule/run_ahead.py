"""Predicts the positions of sequences without a row after the step in flight, whose tokens are not known yet. Pure.

The decode scheduler calls it to schedule the step after that one. A prompt continues after its chunk. If a prompt ends,
or a sequence has lost its row, its next token is sampled in the in-flight step and taken from the device.
"""

from __future__ import annotations

from decode_worker.schedule.run_queues import RunQueues, TrackedSequence
from decode_worker.schedule.steps_in_flight import StepsInFlight
from engine.step.sequence import ScheduledSequence, Sequence


def assign_rows_ahead(queues: RunQueues, steps: StepsInFlight) -> list[ScheduledSequence] | None:
    """Assigns rows to the sequences that decode after the in-flight step.

    Returns the remaining work of the others after it; None if a sequence's tokens must be known first.
    """
    plan, places = steps.newest, steps.places([entry.sequence for entry in queues.rowless])
    decoding: list[TrackedSequence] = []
    awaiting: dict[Sequence, int] = {}
    prompts: list[ScheduledSequence] = []
    for entry in queues.rowless:
        sequence, place = entry.sequence, places.get(entry.sequence)
        if place is None:
            if sequence.num_uncomputed_tokens == 1:
                decoding.append(entry)
            else:
                prompts.append(ScheduledSequence(sequence, sequence.num_uncomputed_tokens))
            continue
        first = plan[place].start + plan[place].num_tokens
        if plan[place].is_sampled:
            awaiting[sequence] = place
        elif place < len(plan.rows):
            return None  # it has got more tokens since the step was scheduled
        else:
            prompts.append(ScheduledSequence(sequence, len(sequence.token_ids) - first, first))
    queues.assign_rows(decoding)
    queues.assign_awaiting_rows(awaiting, plan.step)
    return prompts
