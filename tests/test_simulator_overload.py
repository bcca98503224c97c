"""Five times the traffic that a small deployment can serve, in virtual time against the real admission."""

from __future__ import annotations

from dataclasses import replace

from simulator import overload


def test_goodput_stays_and_everyone_refused_is_told_when_to_come_back() -> None:
    peak = overload.run(10.0, duration_s=12.0)
    flood = overload.run(50.0, duration_s=12.0)
    assert peak.good_per_s > 6.0
    assert flood.good_per_s >= 0.8 * peak.good_per_s
    assert flood.interactive_p99_s < 8.0
    assert flood.num_refused > 200
    assert flood.num_without_hint == 0
    assert flood.most_waiting < 1000


def test_without_admission_everybody_waits() -> None:
    """What the figures above are held against."""
    flood = overload.run(50.0, duration_s=8.0, spec=replace(overload.SPEC, admission=None))
    assert flood.num_refused == 0
    assert flood.interactive_p99_s > 15.0
