"""Changes the rate and the lengths of recorded requests, and drops those that no longer fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.bench.traces.record import TraceRecord
from penstock.errors import InvalidInput


def in_order(records: Iterable[TraceRecord]) -> tuple[TraceRecord, ...]:
    """Sorts by arrival, with the first at 0; requests of equal times keep their order."""
    ordered = sorted(records, key=lambda record: record.arrival_s)
    start_s = ordered[0].arrival_s if ordered else 0.0
    return tuple(replace(record, arrival_s=record.arrival_s - start_s) for record in ordered)


def scale_rate(records: Sequence[TraceRecord], factor: float) -> tuple[TraceRecord, ...]:
    """Multiplies the arrival rate by `factor`, above 0."""
    if not factor > 0:
        raise InvalidInput("rate factor", f"is {factor:g}; give a number above 0")
    return tuple(replace(record, arrival_s=record.arrival_s / factor) for record in records)


def scale_lengths(
    records: Sequence[TraceRecord], input_factor: float, output_factor: float | None = None
) -> tuple[TraceRecord, ...]:
    """Scales prompts and answers, for models with less context than the recorded one. Shared prefixes stay shared.

    Blocks are scaled to whole numbers of tokens, at least one, so that prompts share the same blocks as before. Answers
    scale like prompts unless `output_factor` is given. No length falls below 1.
    """
    output_factor = input_factor if output_factor is None else output_factor
    for name, factor in (("input factor", input_factor), ("output factor", output_factor)):
        if not factor > 0:
            raise InvalidInput(name, f"is {factor:g}; give a number above 0")
    return tuple(_scaled(record, input_factor, output_factor) for record in records)


def _scaled(record: TraceRecord, input_factor: float, output_factor: float) -> TraceRecord:
    block_tokens = max(1, round(record.block_tokens * input_factor))
    full = (record.num_blocks - 1) * block_tokens
    last = record.num_input_tokens - (record.num_blocks - 1) * record.block_tokens  # tokens of the last block
    return replace(
        record,
        num_input_tokens=full + min(block_tokens, max(1, round(last * block_tokens / record.block_tokens))),
        num_output_tokens=max(1, round(record.num_output_tokens * output_factor)),
        block_tokens=block_tokens,
    )


def split_longer(records: Sequence[TraceRecord], max_tokens: int) -> tuple[tuple[TraceRecord, ...], int]:
    """Returns the requests whose prompt and answer fit into `max_tokens`, and the number of those dropped."""
    kept = in_order(record for record in records if record.num_tokens <= max_tokens)
    return kept, len(records) - len(kept)
