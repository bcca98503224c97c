"""What the autoscaler is told and what it says. Plain data.

`None` where something is not known: a worker that has told nothing is not an idle one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types import Role, WorkerId, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerSignal:
    """A worker that is ready."""

    worker_id: WorkerId
    load: WorkerLoad | None
    age_s: float = 0.0  # of the load
    epoch: int = 0  # of the incarnation: totals begin anew with it


@dataclass(frozen=True, slots=True)
class PoolSignal:
    desired: int
    ready: tuple[WorkerSignal, ...] = ()
    starting_s: tuple[float, ...] = ()  # of each worker that is starting: since when
    unplaceable: str = ""  # why workers of this pool cannot be placed, where that is so


@dataclass(frozen=True, slots=True)
class DemandSignal:
    """What all routers have counted since they started, and who waits at their doors now."""

    requests: int = 0
    prompt_tokens: int = 0
    squared_prompt_tokens: int = 0  # each prompt's tokens squared
    cached_tokens: int = 0  # of prompts of ended requests
    ended_prompt_tokens: int = 0
    first_tokens: int = 0  # requests that got one
    first_tokens_in_time: int = 0
    ended: int = 0  # completions with more than one token
    ended_in_time: int = 0  # of these, with their tokens as quick as they should be
    waiting: int = 0  # requests
    waiting_tokens: int = 0  # of their prompts


@dataclass(frozen=True, slots=True)
class Signals:
    pools: Mapping[Role, PoolSignal]
    demand: DemandSignal | None  # None: a router is silent


@dataclass(frozen=True, slots=True)
class Bounds:
    lowest: int
    highest: int

    def clip(self, replicas: int) -> int:
        return min(max(replicas, self.lowest), self.highest)


@dataclass(frozen=True, slots=True)
class Resize:
    role: Role
    replicas: int


@dataclass(frozen=True, slots=True)
class Flip:
    """Some worker of that role takes the other one; each pool's size follows."""

    from_role: Role
    to_role: Role


Change = Resize | Flip


@dataclass(frozen=True, slots=True)
class Record:
    """Why one pool was left alone or changed at one moment."""

    time_s: float
    role: Role
    current: int
    wanted: int  # what the pool would have, cool-downs and bounds left aside
    decided: int
    verdict: str  # hold, up, down, flip, override or missing
    reason: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    changes: tuple[Change, ...]
    records: tuple[Record, ...]
