"""Takes requests from recorded traces, scaled to a model's context."""

from __future__ import annotations

from pathlib import Path

from penstock.bench.traces.read import read_trace
from penstock.bench.traces.shape import scale_lengths, split_longer
from penstock.bench.workloads.plan import Source, draft_of
from penstock.errors import InvalidInput


def trace_source(
    file: str | Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    input_factor: float = 1.0,
    output_factor: float | None = None,
    max_context: int | None = None,
) -> Source:
    """Returns the requests of a trace that fit into `max_context` tokens once scaled. Raises InvalidInput if none does.

    The notes say how many were dropped, and whether times were spread.
    """
    trace = read_trace(file, seed, limit)
    records, notes = trace.records, []
    if trace.tick_s:
        notes.append(f"recorded in ticks of {trace.tick_s:g} s, over which arrivals are spread by the seed")
    if not trace.has_blocks:
        notes.append("the trace does not describe shared prefixes, so no prompts share any")
    if input_factor != 1.0 or output_factor not in (None, 1.0):
        records = scale_lengths(records, input_factor, output_factor)
        of_outputs = input_factor if output_factor is None else output_factor
        notes.append(f"prompts scaled by {input_factor:g}, answers by {of_outputs:g}")
    if max_context is not None:
        records, num_dropped = split_longer(records, max_context)
        if num_dropped:
            share = num_dropped / len(trace.records)
            notes.append(
                f"{num_dropped} of {len(trace.records)} requests ({share:.1%}) need more than {max_context} tokens "
                "and were dropped"
            )
        if not records:
            raise InvalidInput(
                "max context", f"= {max_context} tokens holds no request of {trace.name}; scale lengths down"
            )
    return Source(trace.name, tuple(map(draft_of, records)), notes=tuple(notes))
