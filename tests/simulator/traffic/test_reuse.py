"""Tests that stack distances give the hits of a cache of any size, as that cache would have them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.traces.record import TraceRecord, to_runs
from simulator.report import single_cache_hit_rate
from simulator.request import TraceRequest
from simulator.traffic.reuse import measure_reuse

_SIZE = 4  # tokens in a block


def make_record(blocks: Sequence[int], missing: int = 0) -> TraceRecord:
    return TraceRecord(0.0, len(blocks) * _SIZE - missing, 1, to_runs(blocks), _SIZE)


def simulate_cache(records: Sequence[TraceRecord], num_blocks: int) -> int:
    """Returns the hit tokens of a cache that evicts the least recently used leaf, by simulating it."""
    cached: dict[tuple[int, ...], int] = {}  # prefix -> last request
    hits = 0
    for number, record in enumerate(records):
        ids = tuple(record.block_ids())
        prefixes = [ids[: depth + 1] for depth in range(len(ids))]
        for depth, prefix in enumerate(prefixes):
            if prefix not in cached:
                break
            held = min(record.num_input_tokens, records[cached[prefix]].num_input_tokens)
            hits += min(_SIZE, held - depth * _SIZE)
        cached |= dict.fromkeys(prefixes, number)
        while len(cached) > num_blocks:
            oldest = min(cached.values())
            del cached[max((prefix for prefix, last in cached.items() if last == oldest), key=len)]
    return hits


# A block's id follows from its depth and a choice, so that prompts share prefixes, diverge and return.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=8)
prompts = st.tuples(paths, st.integers(0, _SIZE - 1))


@given(st.lists(prompts, max_size=30), st.integers(0, 40))
def test_hits_equal_those_of_a_cache_of_that_size(rows: list[tuple[list[int], int]], num_blocks: int) -> None:
    records = [make_record(blocks, missing) for blocks, missing in rows]
    report = measure_reuse(records)
    assert sum(run.hit_tokens(num_blocks * _SIZE) for run in report.runs) == simulate_cache(records, num_blocks)


@given(st.lists(prompts, min_size=1, max_size=30))
def test_the_ceiling_is_reached_if_nothing_is_evicted(rows: list[tuple[list[int], int]]) -> None:
    records = [make_record(blocks, missing) for blocks, missing in rows]
    report = measure_reuse(records)
    assert report.hit_rate(report.num_distinct_tokens) == report.ceiling
    size = report.cache_tokens_for(1.0)
    assert report.hit_rate(size) == report.ceiling
    assert size == 0 or report.hit_rate(size - 1) < report.ceiling
    rates = [rate for _, rate in report.curve(10)]
    assert rates == sorted(rates), "a larger cache never hits less"


def test_a_chain_of_turns_reuses_all_but_the_new_blocks() -> None:
    records = [make_record(range(turn)) for turn in (10, 20, 30)]
    report = measure_reuse(records)
    assert report.ceiling == (10 + 20) / (10 + 20 + 30)
    assert report.num_distinct_tokens == 30 * _SIZE
    assert report.hits_by_request(3) == [0, 10 * _SIZE, 20 * _SIZE]
    assert report.cache_tokens_for(1.0) == 20 * _SIZE


def test_hits_agree_with_the_real_prefix_cache() -> None:
    turns = [(user, turn) for turn in range(1, 5) for user in range(6)]
    requests = [
        TraceRequest(
            number, float(number), 64 * turn + 16, 1, tuple(100 * user + block for block in range(turn + 1)), 64
        )
        for number, (user, turn) in enumerate(turns)
    ]
    records = [TraceRecord(each.arrival_s, each.num_input_tokens, 1, to_runs(each.block_ids), 64) for each in requests]
    report = measure_reuse(records)
    assert single_cache_hit_rate(requests, 16, 10_000) == report.ceiling
