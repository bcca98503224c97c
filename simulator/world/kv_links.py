"""Models KV transfers between workers: bandwidth, queues, and losses when a link is cut.

Writes are one-sided: what a sender has posted lands even if it freezes meanwhile. Two pushes over one worker's network
adapter take turns.
"""

from __future__ import annotations

from simulator.costs.step_costs import LinkCosts
from simulator.world.network import Network, Node, State
from simulator.world.virtual_time import Callback, Simulation

_FAILURE_S = 1.0  # time after which a push over a broken link fails


class KvLinks:
    """All links of a deployment."""

    def __init__(self, sim: Simulation, network: Network, costs: LinkCosts) -> None:
        self._sim = sim
        self._network = network
        self._costs = costs
        self._busy_until_s: dict[str, float] = {}  # by adapter: into or out of one worker
        self._slowness: dict[frozenset[str], float] = {}
        self.bytes_in_flight = 0
        self.bytes_moved = 0

    @property
    def token_bytes(self) -> int:
        return self._costs.token_bytes

    def set_slowness(self, first: str, second: str, factor: float) -> None:
        """Multiplies the time of pushes between two workers; 1 is full speed."""
        self._slowness[frozenset((first, second))] = factor

    def push(self, sender: Node, receiver: Node, num_tokens: int, on_landed: Callback, on_failed: Callback) -> None:
        """Pushes KV. `on_landed` runs when the last byte is in the receiver's memory, even if its process does not."""
        num_bytes = num_tokens * self._costs.token_bytes
        slowness = self._slowness.get(frozenset((sender.name, receiver.name)), 1.0)
        adapters = (f"{sender.name} out", f"{receiver.name} in")
        start_s = max(self._sim.now_s, *(self._busy_until_s.get(adapter, 0.0) for adapter in adapters))
        end_s = start_s + slowness * num_bytes / self._costs.bytes_per_s
        for adapter in adapters:
            self._busy_until_s[adapter] = end_s
        self.bytes_in_flight += num_bytes

        def arrive() -> None:
            self.bytes_in_flight -= num_bytes
            if self._network.is_cut(sender.name, receiver.name) or receiver.state is State.DEAD:
                self._sim.after(_FAILURE_S, on_failed)
            elif sender.state is not State.DEAD:
                self.bytes_moved += num_bytes
                on_landed()

        self._sim.at(end_s + self._costs.latency_s, arrive)
