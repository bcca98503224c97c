"""Finds the request that each request continues: conversations and agents, their gaps, and how prompts grow. Pure.

Where a trace names sessions, requests of one session and agent follow each other. Where it has only blocks, a request
continues an earlier one if its prompt begins with all full blocks of that prompt and with at least one block that
appeared first in the earlier request; so a shared system prompt does not make a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.bench.traces.record import Trace, TraceRecord
from simulator.traffic.reuse import ReuseReport
from simulator.traffic.statistics import Distribution, summarize_values


@dataclass(frozen=True, slots=True)
class SessionReport:
    """Sessions of a trace. A chain is the successive requests of one agent of a session."""

    inferred: bool  # whether sessions are inferred from shared blocks, because the trace does not name them
    num_sessions: int
    num_chains: int
    requests_per_session: Distribution
    gap_s: Distribution  # time between the arrivals of a request and of the one that continues it
    growth_tokens: Distribution  # growth of the prompt from a request to the one that continues it
    own_hit_share: float  # share of the hit tokens that the same session had touched last


def describe_sessions(trace: Trace, reuse: ReuseReport) -> SessionReport | None:
    """Describes the sessions, or returns None where the trace neither names them nor has blocks."""
    if trace.has_sessions:
        previous = _named_previous(trace.records)
        sessions = [record.session or f"request {number}" for number, record in enumerate(trace.records)]
    elif trace.has_blocks:
        previous = _inferred_previous(trace.records, reuse)
        sessions = _roots(previous, len(trace.records))
    else:
        return None
    pairs = [(trace.records[before], trace.records[number]) for number, before in previous.items()]
    counts: dict[str, int] = {}
    for session in sessions:
        counts[session] = counts.get(session, 0) + 1
    hits = sum(run.num_tokens for run in reuse.runs)
    own = sum(run.num_tokens for run in reuse.runs if sessions[run.request] == sessions[run.last_request])
    return SessionReport(
        not trace.has_sessions,
        len(counts),
        len(trace.records) - len(previous),
        summarize_values(counts.values()),
        summarize_values(after.arrival_s - before.arrival_s for before, after in pairs),
        summarize_values(after.num_input_tokens - before.num_input_tokens for before, after in pairs),
        own / max(1, hits),
    )


def _named_previous(records: Sequence[TraceRecord]) -> dict[int, int]:
    """Returns the request before each request of the same session and agent."""
    latest: dict[tuple[str, str], int] = {}
    previous = {}
    for number, record in enumerate(records):
        chain = (record.session, record.agent)
        if record.session and chain in latest:
            previous[number] = latest[chain]
        latest[chain] = number
    return previous


def _inferred_previous(records: Sequence[TraceRecord], reuse: ReuseReport) -> dict[int, int]:
    """Returns the request that each request continues, by the deepest run that it reuses."""
    matched = [0] * len(records)
    deepest: dict[int, int] = {}
    for run in reuse.runs:  # the runs of one request are in order of depth
        matched[run.request] += run.num_blocks
        deepest[run.request] = run.last_request
    return {
        number: before
        for number, before in deepest.items()
        if matched[number] >= max(records[before].num_input_tokens // records[before].block_tokens, matched[before] + 1)
    }


def _roots(previous: dict[int, int], num_requests: int) -> list[str]:
    """Returns the first request of each request's chain, as the name of its session."""
    roots: dict[int, int] = {}
    for number in sorted(previous):
        before = previous[number]
        roots[number] = roots.get(before, before)
    return [f"session {roots.get(number, number)}" for number in range(num_requests)]
