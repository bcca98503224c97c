"""The inputs and outputs of the autoscaler, as plain data.

None stands for unknown: a worker without a report is not an idle worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types import Role, WorkerId, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerSignal:
    """A ready worker and its latest report."""

    worker_id: WorkerId
    load: WorkerLoad | None
    age_s: float = 0.0  # age of the load report
    epoch: int = 0  # identifies the incarnation, whose totals start at zero


@dataclass(frozen=True, slots=True)
class PoolSignal:
    """The workers of one pool."""

    desired: int
    ready: tuple[WorkerSignal, ...] = ()
    starting_s: tuple[float, ...] = ()  # start time of each worker that is starting
    unplaceable: str = ""  # why workers of this pool cannot be placed, or ""
    fitting: int | None = None  # workers that the machines can hold next to the other pools; None: unknown


@dataclass(frozen=True, slots=True)
class DemandSignal:
    """Totals over all routers since they started, and what waits in them now."""

    requests: int = 0
    prompt_tokens: int = 0
    squared_prompt_tokens: int = 0  # sum over prompts of their squared token counts
    cached_tokens: int = 0  # cached prompt tokens of ended requests
    ended_prompt_tokens: int = 0
    first_tokens: int = 0  # requests that received a first token
    first_tokens_in_time: int = 0
    ended: int = 0  # completions with more than one token
    ended_in_time: int = 0  # those of them within the ITL target
    waiting: int = 0  # requests that wait
    waiting_tokens: int = 0  # prompt tokens of these requests


@dataclass(frozen=True, slots=True)
class Signals:
    """All inputs of one decision."""

    pools: Mapping[Role, PoolSignal]
    demand: DemandSignal | None  # None: some router does not report


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """The sizes that a pool may have."""

    lowest: int
    highest: int

    def clip(self, replicas: int) -> int:
        return min(max(replicas, self.lowest), self.highest)


@dataclass(frozen=True, slots=True)
class Resize:
    """Changes a pool's size."""

    role: Role
    replicas: int


@dataclass(frozen=True, slots=True)
class Flip:
    """Changes the role of a worker of `from_role`; both pools' sizes follow."""

    from_role: Role
    to_role: Role


Change = Resize | Flip


@dataclass(frozen=True, slots=True)
class ScalingRecord:
    """Explains why a pool was changed or left as it is at one moment."""

    time_s: float
    role: Role
    current: int
    wanted: int  # size wanted before cool-downs and bounds
    decided: int
    verdict: str  # hold, up, down, flip, override or missing
    reason: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The changes to make, and a record for each pool."""

    changes: tuple[Change, ...]
    records: tuple[ScalingRecord, ...]
