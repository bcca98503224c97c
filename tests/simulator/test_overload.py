"""Tests the real admission in virtual time under five times the traffic that a small deployment can serve."""

from __future__ import annotations

from dataclasses import replace

from penstock.config.admission import AdmissionConfig
from simulator import overload


def test_goodput_holds_under_overload_and_every_refusal_has_a_retry_hint() -> None:
    peak = overload.run(10.0, duration_s=12.0)
    flood = overload.run(50.0, duration_s=12.0)
    assert peak.good_per_s > 6.0
    assert flood.good_per_s >= 0.8 * peak.good_per_s
    assert flood.interactive_p99_s < 8.0
    assert flood.num_refused > 200
    assert flood.num_without_hint == 0
    assert flood.most_waiting < 1000


def test_without_admission_every_request_waits() -> None:
    """This is the baseline for the figures above."""
    flood = overload.run(50.0, duration_s=8.0, spec=replace(overload.SPEC, admission=None))
    assert flood.num_refused == 0
    assert flood.interactive_p99_s > 15.0


def test_by_default_a_burst_waits_and_is_answered_whole() -> None:
    burst = overload.run(40.0, duration_s=10.0, spec=replace(overload.SPEC, admission=AdmissionConfig()))
    assert burst.num_refused == 0
    assert burst.num_complete > 300
    assert burst.most_waiting > 100
