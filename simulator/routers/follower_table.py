"""Keeps the followers of one router: which of their workers take requests, and whose reports wait to be read."""

from __future__ import annotations

import heapq
import math
from itertools import count

from penstock.types import Role, WorkerId
from simulator.routers.follower_model import FollowerModel
from simulator.world.virtual_time import Simulation


class FollowerTable:
    """Owns the followers of the members. Reports are read only by `read_reports`, which takes all that have arrived."""

    def __init__(self, sim: Simulation) -> None:
        self.followers: list[FollowerModel] = []
        self._sim = sim
        self._ready: dict[Role, list[FollowerModel]] | None = None  # by role; None: not computed yet
        self._by_id: dict[WorkerId, FollowerModel] = {}  # the followers in `_ready`
        self._due: list[tuple[float, int, FollowerModel]] = []  # heap: when to read reports; only newest entries count
        self._due_number = count()

    def retire(self, name: str) -> None:
        for follower in [follower for follower in self.followers if follower.worker_id == name]:
            follower.retired = True
            self.followers.remove(follower)

    # Workers that take requests, kept until one changes.

    def on_change(self) -> None:
        """Forgets which workers take requests, because one was added, removed or lost."""
        self._ready = None

    def ready(self) -> dict[Role, list[FollowerModel]]:
        """Returns the workers that take requests, by role."""
        return self._ready or self._find_ready()

    def _find_ready(self) -> dict[Role, list[FollowerModel]]:
        ready: dict[Role, list[FollowerModel]] = {Role.PREFILL: [], Role.DECODE: []}
        for follower in self.followers:
            if follower.takes_work:
                ready[follower.role].append(follower)
        self._ready, self._by_id = ready, {each.worker_id: each for each in (*ready[Role.PREFILL], *ready[Role.DECODE])}
        return ready

    def ready_one(self, worker_id: WorkerId) -> FollowerModel:
        """Returns the follower of a worker that the last `ready` returned."""
        return self._by_id[worker_id]

    def has_ready(self, role: Role) -> bool:
        return any(follower.takes_work for follower in self.followers if follower.role is role)

    # Reports that wait to be read.

    def read_reports(self) -> None:
        """Takes all reports that have arrived. Call it before reading anything else here."""
        now_s, due = self._sim.now_s, self._due
        while due and due[0][0] <= now_s:
            at_s, _, follower = heapq.heappop(due)
            feed = follower.feed
            if feed is not None and feed.waits and feed.due_s == at_s:
                follower.read(now_s)
                self.read_when_due(follower)

    def read_when_due(self, follower: FollowerModel) -> None:
        """Notes when the follower's next report arrives."""
        assert follower.feed is not None
        follower.feed.due_s = follower.feed.next_s()
        if follower.feed.due_s < math.inf:
            heapq.heappush(self._due, (follower.feed.due_s, next(self._due_number), follower))
