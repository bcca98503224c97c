"""Tests the report of a trace: bursts, sessions, and its formats as JSON and as a page."""

from __future__ import annotations

import json
import random

import pytest

from penstock.bench.traces.record import Trace, TraceRecord, to_runs
from penstock.charts.html import render_html
from simulator.traffic.arrivals import count_by_window, describe_arrivals, most_within
from simulator.traffic.describe import as_json, describe_trace
from simulator.traffic.html_report import traffic_report
from simulator.traffic.statistics import nearest_rank, summarize_values, weighted_percentile


def make_record(arrival_s: float, blocks: range | list[int], session: str = "", agent: str = "") -> TraceRecord:
    return TraceRecord(arrival_s, 10 * len(blocks), 5, to_runs(blocks), 10, session, agent)


def test_a_poisson_process_is_recognized() -> None:
    rng, times_s = random.Random(7), [0.0]
    while times_s[-1] < 4000:
        times_s.append(times_s[-1] + rng.expovariate(2.0))
    report = describe_arrivals(times_s)
    assert report.requests_per_s == pytest.approx(2.0, rel=0.05)
    assert report.gap_cv == pytest.approx(1.0, rel=0.05)
    assert all(each.dispersion == pytest.approx(1.0, abs=0.5) for each in report.windows if each.window_s <= 60)


def test_bursts_show_in_every_figure() -> None:
    times_s = [burst * 100.0 + index * 0.01 for burst in range(10) for index in range(50)]
    report = describe_arrivals(times_s)
    assert report.gap_cv > 5
    one_second = report.windows[0]
    assert one_second.peak_per_s == 50
    assert one_second.peak_to_mean > 50
    assert one_second.dispersion > 40


def test_peaks_are_found_wherever_their_window_starts() -> None:
    assert most_within([0.0, 0.9, 1.1, 1.8, 5.0], 1.0) == 3
    assert count_by_window([0.0, 0.9, 1.1, 1.8, 5.0], 1.0) == [2, 2, 0, 0, 0]
    assert describe_arrivals([3.0]).windows == ()


def test_percentiles_are_nearest_ranks_or_weighted() -> None:
    assert nearest_rank([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert nearest_rank([], 0.5) == 0.0
    assert weighted_percentile([(1.0, 1.0), (2.0, 8.0), (3.0, 1.0)], 0.5) == 2.0
    assert weighted_percentile([], 0.5) == 0.0
    assert summarize_values([2.0, 2.0]).cv == 0.0


def test_sessions_are_taken_from_the_trace() -> None:
    records = (
        make_record(0.0, range(2), "a", "main"),
        make_record(1.0, range(100, 102), "a", "helper"),
        make_record(4.0, range(3), "a", "main"),
        make_record(5.0, range(200, 203), "b", "main"),
        make_record(9.0, range(2), "b", "main"),
    )
    sessions = describe_trace(Trace("named", records, True)).sessions
    assert sessions is not None
    assert not sessions.inferred
    assert (sessions.num_sessions, sessions.num_chains) == (2, 3)
    assert sessions.gap_s.count == 2
    assert sessions.gap_s.largest == 4.0
    assert sessions.growth_tokens.largest == 10
    assert sessions.own_hit_share == 0.5  # the last request hits what the other session has computed


def test_sessions_are_inferred_from_shared_blocks() -> None:
    system = [0]
    records = (
        make_record(0.0, [*system, 1, 2]),
        make_record(1.0, [*system, 5]),  # shares only the system prompt
        make_record(2.0, [*system, 1, 2, 3]),  # continues the first request
        make_record(3.0, system),
        make_record(4.0, [*system, 7]),  # starts with the whole previous request, which has no blocks of its own
    )
    sessions = describe_trace(Trace("blocks", records, True)).sessions
    assert sessions is not None
    assert sessions.inferred
    assert sessions.num_sessions == 4
    assert sessions.gap_s.largest == 2.0


def test_a_trace_without_blocks_is_reported_as_such() -> None:
    records = tuple(TraceRecord(float(number), 20, 5, ((number, 1),), 20) for number in range(10))
    report = describe_trace(Trace("lengths", records, False))
    assert report.reuse is None
    assert report.sessions is None
    data = json.loads(json.dumps(as_json(report)))
    assert data["reuse"] is None
    assert data["input_tokens_per_s"] == pytest.approx(20.0)


def test_a_report_is_plain_data_and_a_page() -> None:
    records = tuple(make_record(float(number), range(number % 4, 40)) for number in range(40))
    trace = Trace("<mix>", records, True)
    report = describe_trace(trace)
    data = json.loads(json.dumps(as_json(report, 128)))
    assert data["reuse"]["curve"][-1]["hit_rate"] == data["reuse"]["ceiling"]
    page = render_html(traffic_report(trace, report, [("rate", "1 request/s")], 128))
    assert "&lt;mix&gt;" in page
    assert "<mix>" not in page
    assert page.count("<svg") == 3
