"""Tests virtual time, processes and calls, on which every simulated run is built."""

from __future__ import annotations

import pytest

from penstock.types import Epoch
from simulator.world.network import KEEPALIVE_S, Network, Node
from simulator.world.virtual_time import Simulation


def test_callbacks_run_by_time_and_equal_times_in_order() -> None:
    sim, ran = Simulation(), []
    for name, at_s in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        sim.at(at_s, lambda name=name: ran.append((name, sim.now_s)))  # type: ignore[misc]
    sim.run()
    assert ran == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_a_cancelled_timer_never_runs_and_does_not_advance_time() -> None:
    sim, ran = Simulation(), []
    timer = sim.after(5.0, lambda: ran.append("cancelled"))
    sim.after(1.0, timer.cancel)
    sim.run()
    assert ran == []
    assert sim.now_s == 1.0


def test_run_stops_at_a_time_and_resumes_from_there() -> None:
    sim, ran = Simulation(), []
    sim.at(3.0, lambda: ran.append(sim.now_s))
    sim.run(until_s=2.0)
    assert (ran, sim.now_s) == ([], 2.0)
    sim.run()
    assert ran == [3.0]


def test_random_streams_are_independent() -> None:
    each, other = Simulation(7), Simulation(7)
    other.rng("network").random()
    assert each.rng("choice").random() == other.rng("choice").random()
    assert each.rng("choice").random() != Simulation(8).rng("choice").random()


class Pair:
    """Connects a caller and a callee with one open call."""

    def __init__(self) -> None:
        self.sim = Simulation(1)
        self.network = Network(self.sim, 0.001, 0.005)
        self.caller: Node = self.network.add("caller", Epoch(1))
        self.callee: Node = self.network.add("callee", Epoch(2))
        self.got: list[object] = []
        call = self.network.call(
            self.caller, self.callee, lambda: self.got.append("broken"), lambda: self.got.append("broken there")
        )
        assert call is not None
        self.call = call

    def send(self, *items: object) -> None:
        for item in items:
            self.call.send(self.caller, lambda item=item: self.got.append(item))  # type: ignore[misc]


def test_messages_of_a_call_arrive_in_order_whatever_the_jitter() -> None:
    pair = Pair()
    pair.send(*range(50))
    pair.sim.run()
    assert pair.got == list(range(50))


def test_a_killed_peer_breaks_the_call_at_once_and_receives_nothing_more() -> None:
    pair = Pair()
    pair.send(1)
    pair.sim.at(0.0001, lambda: pair.network.kill(pair.callee))
    pair.sim.run()
    assert pair.got == ["broken"]
    assert pair.sim.now_s < 0.1


def test_a_frozen_peer_receives_its_messages_late_or_loses_the_call() -> None:
    pair = Pair()
    pair.network.freeze(pair.callee)
    pair.send("in time")
    pair.sim.at(KEEPALIVE_S / 2, lambda: pair.network.thaw(pair.callee))
    pair.sim.run()
    assert pair.got == ["in time"]
    pair.network.freeze(pair.callee)
    pair.send("too late")
    pair.sim.at(pair.sim.now_s + 2 * KEEPALIVE_S, lambda: pair.network.thaw(pair.callee))
    pair.sim.run()
    assert pair.got == ["in time", "broken", "broken there"]


def test_a_cut_link_holds_messages_until_it_heals_or_keepalive_times_out() -> None:
    pair = Pair()
    pair.network.cut("caller", "callee")
    pair.send(1, 2)
    pair.sim.at(1.0, lambda: pair.network.heal("callee", "caller"))
    pair.sim.run()
    assert pair.got == [1, 2]
    pair.network.cut("caller", "callee")
    pair.send(3)
    pair.sim.run()
    assert pair.got == [1, 2, "broken", "broken there"]


@pytest.mark.parametrize("state", ["dead", "nobody"])
def test_a_call_to_a_missing_process_is_refused(state: str) -> None:
    pair = Pair()
    pair.network.kill(pair.callee)
    pair.sim.run()
    callee = pair.callee if state == "dead" else None
    assert pair.network.call(pair.caller, callee, lambda: pair.got.append("refused")) is None
    pair.sim.run()
    assert pair.got[-1] == "refused"
