"""Measures the time of a step by the number of tokens that it verifies. With acceptance, it determines the gain of
speculation.

Steps of all sizes take turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import statistics

from benchmarks.common.report import Row
from benchmarks.common.timing import Stopwatch
from engine.engine import Engine
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.types import RequestId, SamplingParams

BATCHES = (1, 4, 16)
PROPOSED = (0, 1, 3, 7, 8)
_ROUNDS = 12


def step_rows(engine: Engine, model: str, context: int) -> list[Row]:
    """Returns the median step of each batch and number of proposed tokens, with that of one token a sequence as
    baseline.
    """
    sequences = [_sequence(engine, number, context) for number in range(max(BATCHES))]
    work = {
        (batch, count): [
            ScheduledSequence(each, 1, proposed=tuple(range(20, 20 + count))) for each in sequences[:batch]
        ]
        for batch in BATCHES
        for count in PROPOSED
    }
    seconds: dict[tuple[int, int], list[float]] = {key: [] for key in work}
    for turn in range(_ROUNDS):
        for key, items in work.items():
            for _ in range(2):  # the first brings back what others have evicted from the CPU cache
                with Stopwatch() as watch:
                    engine.compute(engine.prepare(items)).wait()
            if turn:
                seconds[key].append(watch.seconds)
    for sequence in sequences:
        engine.pool.release(sequence.pages)
    medians = {key: statistics.median(found) * 1e3 for key, found in seconds.items()}
    return [
        Row(
            f"{model}, step of {batch} that verifies {count} tokens each",
            medians[batch, count],
            "ms",
            "verifying none",
            medians[batch, 0],
        )
        for batch, count in work
        if count
    ]


def _sequence(engine: Engine, number: int, context: int) -> Sequence:
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    pages = engine.pool.allocate(-(-(context + max(PROPOSED)) // engine.layout.page_size))
    token_ids = [20 + (7 * place + number) % 900 for place in range(context)]
    sequence = Sequence(RequestId(str(number)), token_ids, context, sampling, b"bench", pages)
    sequence.num_computed_tokens = context - 1
    return sequence
