"""Models processes and calls between them: which are alive or frozen, which links are cut, and when calls break.

A call behaves like one over gRPC: messages arrive in order or not at all; a killed peer is noticed at once, a frozen or
unreachable one only when keepalive gives up. Until then messages wait, as they do in a socket.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from penstock.types import Epoch
from simulator.world.virtual_time import Callback, Simulation, Timer

KEEPALIVE_S = 2.0  # time after which a silent peer is given up; about `penstock.rpc.server`'s keepalive
_RESET_S = 0.001  # time after which the kernel reports a killed peer


class State(Enum):
    ALIVE = "alive"
    FROZEN = "frozen"
    DEAD = "dead"


@dataclass(eq=False)
class Node:
    """An incarnation of a process. Callbacks wait while it is frozen and are dropped when it is dead."""

    sim: Simulation
    name: str
    epoch: Epoch
    state: State = State.ALIVE
    state_since_s: float = 0.0
    _waiting: list[Callback] = field(default_factory=list)

    def post(self, callback: Callback) -> None:
        if self.state is State.ALIVE:
            callback()
        elif self.state is State.FROZEN:
            self._waiting.append(callback)

    def after(self, delay_s: float, callback: Callback) -> Timer:
        return self.sim.after(delay_s, lambda: self.post(callback))

    def at(self, time_s: float, callback: Callback) -> Timer:
        return self.sim.at(time_s, lambda: self.post(callback))

    def set_state(self, state: State) -> None:
        self.state, self.state_since_s = state, self.sim.now_s
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            self.post(callback)


@dataclass(eq=False)
class Call:
    """A bidirectional stream of messages between two incarnations. Breaking and closing are final."""

    network: Network
    ends: tuple[Node, Node]
    on_break: tuple[Callback, Callback]
    is_open: bool = True
    _arrival_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # arrival of the latest message to each end
    _held: list[tuple[int, Callback]] = field(default_factory=list)  # messages held while the link is cut

    def send(self, sender: Node, deliver: Callback) -> None:
        """Sends a message; `deliver` runs at the other end."""
        if not self.is_open or sender.state is State.DEAD:
            return
        to = 1 if sender is self.ends[0] else 0
        if self.network.is_cut(self.ends[0].name, self.ends[1].name):
            self._held.append((to, deliver))
        else:
            self._dispatch(to, deliver)

    def arrival_s(self, sent_s: float, rng: random.Random) -> float:
        """Returns the arrival time of a message that is sent at `sent_s`; the sender's random stream decides it."""
        return self.network.arrival_s(sent_s, rng)

    def send_at(self, sender: Node, arrival_s: float, deliver: Callback) -> None:
        """Sends a message that arrives at a known time, unless the link is cut now or earlier ones arrive later."""
        if not self.is_open or sender.state is State.DEAD:
            return
        to = 1 if sender is self.ends[0] else 0
        if self.network.is_cut(self.ends[0].name, self.ends[1].name):
            self._held.append((to, deliver))
        else:
            self._dispatch_at(to, deliver, arrival_s)

    def _dispatch(self, to: int, deliver: Callback) -> None:
        self._dispatch_at(to, deliver, self.network.arrival_s(self.network.sim.now_s, self.network.rng))

    def _dispatch_at(self, to: int, deliver: Callback, arrival_s: float) -> None:
        arrival_s = self._arrival_s[to] = max(self._arrival_s[to], arrival_s)
        self.network.sim.at(arrival_s, partial(self._arrive, self.ends[to], deliver))

    def _arrive(self, node: Node, deliver: Callback) -> None:
        if node.state is not State.ALIVE:
            node.post(lambda: self._arrive(node, deliver))
        elif self.is_open:
            deliver()

    def resume(self) -> None:
        held, self._held = self._held, []
        for to, deliver in held:
            self._dispatch(to, deliver)

    def close(self) -> None:
        """Closes the call: messages in flight are lost, and `on_break` is not called."""
        self.is_open = False
        self.network.forget(self)

    def break_off(self) -> None:
        if not self.is_open:
            return
        self.close()
        for node, on_break in zip(self.ends, self.on_break, strict=True):
            node.post(on_break)


class Network:
    """Owns the processes by name and the open calls."""

    def __init__(self, sim: Simulation, latency_s: float, jitter_s: float) -> None:
        self.sim = sim
        self._latency_s = latency_s
        self._jitter_s = jitter_s
        self.rng = sim.rng("network")
        self._nodes: dict[str, Node] = {}
        self._calls: dict[Call, None] = {}
        self.before_fault: list[Callback] = []  # lets processes that run ahead of their messages send due ones
        self._disturbed_s: dict[str, float] = {}  # by process: when a fault of it or a link last began or ended
        self._cut_since_s: dict[frozenset[str], float] = {}

    @property
    def longest_s(self) -> float:
        """The longest time that a message takes without faults."""
        return self._latency_s + self._jitter_s

    def arrival_s(self, sent_s: float, rng: random.Random) -> float:
        return sent_s + self._latency_s + self._jitter_s * rng.random()

    def add(self, name: str, epoch: Epoch) -> Node:
        """Starts a process under a name whose previous process, if any, is dead."""
        assert name not in self._nodes or self._nodes[name].state is State.DEAD, name
        node = self._nodes[name] = Node(self.sim, name, epoch)
        return node

    def node(self, name: str) -> Node | None:
        """Returns the latest process of that name, dead or alive."""
        return self._nodes.get(name)

    def call(
        self, caller: Node, callee: Node | None, on_break: Callback, on_break_there: Callback = lambda: None
    ) -> Call | None:
        """Opens a call to a process. Returns None if it is refused; `on_break` then runs too."""
        if callee is None or callee.state is State.DEAD:
            caller.after(_RESET_S, on_break)
            return None
        call = Call(self, (caller, callee), (on_break, on_break_there))
        self._calls[call] = None
        if callee.state is State.FROZEN or self.is_cut(caller.name, callee.name):
            self.sim.after(KEEPALIVE_S, lambda: self._give_up(call))
        return call

    def forget(self, call: Call) -> None:
        self._calls.pop(call, None)

    # Faults.

    def _announce_fault(self) -> None:
        for callback in self.before_fault:
            callback()

    def undisturbed_since_s(self, name: str) -> float:
        """Returns the time at which the last fault that could delay a process's messages began or ended."""
        return self._disturbed_s.get(name, 0.0)

    def _note_fault(self, *names: str) -> None:
        self._disturbed_s.update(dict.fromkeys(names, self.sim.now_s))

    def kill(self, node: Node) -> None:
        self._announce_fault()
        self._note_fault(node.name)
        node.set_state(State.DEAD)
        for call in self._calls_of(lambda call: node in call.ends):
            self.sim.after(_RESET_S, call.break_off)

    def freeze(self, node: Node) -> None:
        if node.state is not State.ALIVE:
            return
        self._announce_fault()
        self._note_fault(node.name)
        node.set_state(State.FROZEN)
        for call in self._calls_of(lambda call: node in call.ends):
            self.sim.after(KEEPALIVE_S, lambda call=call: self._give_up(call))  # type: ignore[misc]

    def thaw(self, node: Node) -> None:
        if node.state is State.FROZEN:
            self._note_fault(node.name)
            node.set_state(State.ALIVE)

    def cut(self, first: str, second: str) -> None:
        pair = frozenset((first, second))
        if pair in self._cut_since_s:
            return
        self._announce_fault()
        self._note_fault(first, second)
        self._cut_since_s[pair] = self.sim.now_s
        for call in self._calls_between(pair):
            self.sim.after(KEEPALIVE_S, lambda call=call: self._give_up(call))  # type: ignore[misc]

    def heal(self, first: str, second: str) -> None:
        pair = frozenset((first, second))
        if self._cut_since_s.pop(pair, None) is not None:
            self._note_fault(first, second)
            for call in self._calls_between(pair):
                call.resume()

    def is_cut(self, first: str, second: str) -> bool:
        return bool(self._cut_since_s) and frozenset((first, second)) in self._cut_since_s

    def _give_up(self, call: Call) -> None:
        """Breaks the call when keepalive's time ends, if its peer was silent throughout."""
        since_s = self.sim.now_s - KEEPALIVE_S + 1e-9
        cut_s = self._cut_since_s.get(frozenset(node.name for node in call.ends))
        frozen = any(node.state is State.FROZEN and node.state_since_s <= since_s for node in call.ends)
        if frozen or (cut_s is not None and cut_s <= since_s):
            call.break_off()
        elif cut_s is not None or any(node.state is State.FROZEN for node in call.ends):
            self.sim.after(KEEPALIVE_S, lambda: self._give_up(call))

    def _calls_between(self, pair: frozenset[str]) -> list[Call]:
        return self._calls_of(lambda call: frozenset(node.name for node in call.ends) == pair)

    def _calls_of(self, wanted: Callable[[Call], bool]) -> list[Call]:
        return [call for call in self._calls if wanted(call)]
