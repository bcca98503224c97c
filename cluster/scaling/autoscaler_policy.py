"""Decides how many workers each pool has and which ones change their role. Pure: takes signals and the time, and
returns changes with their reasons.

Sizes come from `sizing_policy`; this module has the rules for acting on them. A pool grows at once and shrinks late,
and flips a worker where that is faster than starting one. Nothing is decided on missing data, an operator's override
holds for its time, and workers that never become ready neither count nor block other changes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.scaling.profiles import WorkerProfiles
from cluster.scaling.signals import (
    Change,
    DemandSignal,
    Flip,
    PoolBounds,
    PoolSignal,
    Resize,
    ScalingDecision,
    ScalingRecord,
    Signals,
)
from cluster.scaling.sizing_policy import DecodeSizer, PoolNeed, PrefillSizer, PromptMix, bin_of, num_waiting_for_decode
from cluster.scaling.traffic import TrafficHistory
from penstock.config.autoscaler import AutoscalerConfig
from penstock.types import Role

_IN_TIME_OVER_S = 60.0
_MIN_GROWTH = 0.1  # share of a pool's size; growing one worker at a time takes too many changes
_MIN_SHRINKAGE = 0.25
_AGAIN_S = 300.0  # a pool that grew this recently grows by more, so that a rising load takes few steps
_MIN_GROWTH_AGAIN = 0.25
_TYPICAL_PROMPT = 2.0  # multiple of the mean prompt length, used while squared lengths are unknown
_START_SMOOTHING = 0.3  # weight of the newest start's time


@dataclass(frozen=True, slots=True)
class Override:
    """A pool's size as an operator set it, and how long it holds."""

    replicas: int
    until_s: float


@dataclass(slots=True)
class _PoolState:
    """The state of one pool between decisions."""

    changed_s: float = float("-inf")
    grew_s: float = float("-inf")
    sufficient: deque[tuple[float, int]] = field(default_factory=deque)  # (time, size that would have sufficed)
    override: Override | None = None


class AutoscalerPolicy:
    """Decides once per interval; remembers traffic, costs and recent changes."""

    def __init__(self, config: AutoscalerConfig, bounds: Mapping[Role, PoolBounds], max_batch: int) -> None:
        """`max_batch` is the most sequences that a decode worker runs at once."""
        self.config = config
        self._bounds = bounds
        self._profiles = WorkerProfiles()
        self._history = TrafficHistory(config.history_s, config.interval_s)
        self._prefill = PrefillSizer(config)
        self._decode = DecodeSizer(config, max_batch)
        self._max_batch = max_batch
        self._num_for_decode = 0  # requests waiting in routers for decode workers
        self._pools = {role: _PoolState() for role in Role}
        self._demands: deque[tuple[float, DemandSignal]] = deque()
        self._last_s: float | None = None
        self._flipped_s = float("-inf")
        self._start_s = config.start_s

    def override(self, role: Role, replicas: int, until_s: float) -> None:
        """Holds a pool at the size that an operator set, until `until_s`."""
        self._pools[role].override = Override(self._bounds[role].clip(replicas), until_s)

    def release(self, role: Role) -> None:
        """Ends an override."""
        self._pools[role].override = None

    def on_started(self, after_s: float) -> None:
        """Records how long a new worker took from its request to being ready."""
        self._start_s += _START_SMOOTHING * (after_s - self._start_s)

    def decide(self, signals: Signals, now_s: float) -> ScalingDecision:
        """Returns the changes to make now, which the next signals are expected to show."""
        missing = _find_missing(signals, self.config.stale_s)
        if missing:
            self._last_s = None  # the length of the gap is unknown, so the next bin starts after it
            return ScalingDecision((), tuple(self._hold(role, signals, now_s, missing) for role in Role))
        if not self._observe(signals, now_s):
            reason = "first observation: traffic is counted from now on"
            return ScalingDecision((), tuple(self._hold(role, signals, now_s, reason) for role in Role))
        needs = self._needs(signals, now_s)
        records = {role: self._judge(role, signals.pools[role], needs[role], now_s) for role in Role}
        flip = self._find_flip(signals, needs, records, now_s)
        if flip is not None:
            return self._flip(flip, signals, records, now_s)
        changes: list[Change] = []
        for role, record in records.items():
            if record.decided != record.current:
                changes.append(Resize(role, record.decided))
                self._pools[role].changed_s = now_s
        return ScalingDecision(tuple(changes), tuple(records.values()))

    # Observation.

    def _observe(self, signals: Signals, now_s: float) -> bool:
        """Adds the newest interval. Returns False for the first observation after a gap."""
        demand = signals.demand
        assert demand is not None
        after_s, self._last_s = (now_s - self._last_s if self._last_s is not None else 0.0), now_s
        uncached = 1.0 - demand.cached_tokens / demand.ended_prompt_tokens if demand.ended_prompt_tokens else 1.0
        work = self._profiles.observe(signals, demand.waiting_tokens * uncached)
        self._demands.append((now_s, demand))
        while self._demands[0][0] < now_s - self.config.history_s:
            self._demands.popleft()
        if after_s <= 0.0:
            return False
        prefilling = [worker.load for worker in signals.pools[Role.PREFILL].ready if worker.load is not None]
        num_prefilling = sum(load.num_running + load.num_waiting for load in prefilling)
        decoding = [worker.load for worker in signals.pools[Role.DECODE].ready if worker.load is not None]
        self._num_for_decode = num_waiting_for_decode(work, num_prefilling, decoding, self._max_batch, demand.waiting)
        newest = bin_of(work, num_prefilling, after_s, self._num_for_decode)
        self._history.add(newest)
        first, ended = self._shares_in_time(now_s)
        self._prefill.learn(newest, after_s, first)
        self._decode.learn(newest, after_s, ended)
        return True

    def _shares_in_time(self, now_s: float) -> tuple[float | None, float | None]:
        """Returns the shares of first tokens and of completions that met the SLO over the last minute."""
        newest_first = (demand for at_s, demand in reversed(self._demands) if at_s <= now_s - _IN_TIME_OVER_S)
        before, now = next(newest_first, self._demands[0][1]), self._demands[-1][1]
        first, ended = now.first_tokens - before.first_tokens, now.ended - before.ended
        return (
            (now.first_tokens_in_time - before.first_tokens_in_time) / first if first > 0 else None,
            (now.ended_in_time - before.ended_in_time) / ended if ended > 0 else None,
        )

    def _needs(self, signals: Signals, now_s: float) -> dict[Role, PoolNeed]:
        demand = signals.demand
        assert demand is not None
        profile = self._profiles.profile(signals)
        ready = signals.pools[Role.PREFILL].ready or signals.pools[Role.DECODE].ready
        queued = sum(worker.load.queued_prefill_tokens for worker in ready if worker.load is not None)
        backlog = queued + (0 if self._num_for_decode else demand.waiting_tokens)
        coming = _num_coming(signals.pools[Role.PREFILL], now_s, self.config)
        serving = len(signals.pools[Role.PREFILL].ready) + coming
        return {
            Role.PREFILL: self._prefill.need(self._history, profile, self._prompts(), backlog, serving, self._start_s),
            Role.DECODE: self._decode.need(self._history, profile, self._start_s),
        }

    def _prompts(self) -> PromptMix:
        before, now = self._demands[0][1], self._demands[-1][1]
        tokens, squared = now.prompt_tokens - before.prompt_tokens, now.squared_prompt_tokens
        squared -= before.squared_prompt_tokens
        ended, cached = now.ended_prompt_tokens - before.ended_prompt_tokens, now.cached_tokens - before.cached_tokens
        # Older routers do not report squares.
        typical = squared / tokens if squared else _TYPICAL_PROMPT * now.prompt_tokens / max(1, now.requests)
        return PromptMix(typical, max(0.0, 1.0 - cached / ended) if ended else 1.0)

    # Rules.

    def _hold(self, role: Role, signals: Signals, now_s: float, reason: str, verdict: str = "missing") -> ScalingRecord:
        current = signals.pools[role].desired
        return ScalingRecord(now_s, role, current, current, current, verdict, reason)

    def _judge(self, role: Role, pool: PoolSignal, need: PoolNeed, now_s: float) -> ScalingRecord:
        memory, bounds = self._pools[role], self._bounds[role]
        current = pool.desired
        if memory.override is not None and now_s < memory.override.until_s:
            held = memory.override.replicas
            reason = f"set to {held} by an operator for another {memory.override.until_s - now_s:.0f} s"
            wanted = need.replicas if need.replicas is not None else held
            return ScalingRecord(now_s, role, current, wanted, held, "override", reason, need.figures)
        memory.override = None
        if need.replicas is None:
            decided = bounds.clip(current)
            return ScalingRecord(now_s, role, current, current, decided, "hold", need.reason)
        wanted, fewer = bounds.clip(need.replicas), bounds.clip(need.fewer)
        memory.sufficient.append((now_s, fewer))
        while memory.sufficient[0][0] < now_s - self.config.down_after_s:
            memory.sufficient.popleft()
        record = ScalingRecord(now_s, role, current, need.replicas, current, "hold", need.reason, need.figures)
        if bounds.clip(current) != current:
            reason, decided = f"bounds are {bounds.lowest} to {bounds.highest}", bounds.clip(current)
            return replace(record, decided=decided, verdict="up" if decided > current else "down", reason=reason)
        if wanted > current:
            return self._grow(record, pool, wanted, now_s)
        return self._shrink(record, memory, now_s)

    def _grow(self, record: ScalingRecord, pool: PoolSignal, wanted: int, now_s: float) -> ScalingRecord:
        num_stuck = len(pool.starting_s) - _num_coming(pool, now_s, self.config)
        if num_stuck:
            why = pool.unplaceable or f"starting for more than {self.config.stuck_after_s:g} s"
            reason = f"{num_stuck} requested workers never became ready ({why}); {record.reason}"
            return replace(record, reason=reason)
        wait_s = self._pools[record.role].changed_s + self.config.up_cooldown_s - now_s
        if wait_s > 0:
            return replace(record, reason=f"{record.reason}; the pool may change again in {wait_s:.0f} s")
        most = self._bounds[record.role].highest if pool.fitting is None else pool.fitting
        if most < wanted:
            record = replace(record, reason=f"{record.reason}; the machines hold {most} workers of this pool")
        if most <= record.current:
            return record
        memory = self._pools[record.role]
        step = _MIN_GROWTH if now_s - memory.grew_s > _AGAIN_S else _MIN_GROWTH_AGAIN
        memory.grew_s = now_s
        least = math.ceil(record.current * (1 + step))
        return replace(record, decided=min(most, self._bounds[record.role].clip(max(wanted, least))), verdict="up")

    def _shrink(self, record: ScalingRecord, memory: _PoolState, now_s: float) -> ScalingRecord:
        """Shrinks to the size that has sufficed, with headroom, for long enough."""
        most = max(count for _, count in memory.sufficient)
        if record.current - most < max(1.0, _MIN_SHRINKAGE * record.current):
            return record
        seen_s = now_s - memory.sufficient[0][0]
        if self._history.length_s < self.config.down_after_s or seen_s < 0.9 * self.config.down_after_s:
            return replace(
                record, reason=f"{record.reason}; fewer must suffice for {self.config.down_after_s:g} s first"
            )
        until_s = max(memory.changed_s + self.config.down_cooldown_s, memory.grew_s + self.config.down_after_s)
        wait_s = until_s - now_s
        if wait_s > 0:
            return replace(record, reason=f"{record.reason}; the pool may shrink in {wait_s:.0f} s")
        return replace(record, decided=most, verdict="down")

    # Flips.

    def _find_flip(
        self, signals: Signals, needs: Mapping[Role, PoolNeed], records: Mapping[Role, ScalingRecord], now_s: float
    ) -> Flip | None:
        """Finds a flip where one pool lacks serving workers and the other would still suffice with one fewer."""
        if not self.config.flips or now_s - self._flipped_s < self.config.flip_cooldown_s:
            return None
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            need, spare = needs[role].replicas, needs[other].replicas
            pool, giving = signals.pools[role], signals.pools[other]
            if need is None or spare is None or "override" in (records[role].verdict, records[other].verdict):
                continue
            num_stuck = len(pool.starting_s) - _num_coming(pool, now_s, self.config)
            lacks = min(need, self._bounds[role].highest) > max(len(pool.ready), pool.desired - num_stuck)
            left, least = len(giving.ready) - 1, max(self._sufficient_size(other, now_s), self._bounds[other].lowest, 1)
            if lacks and left >= least and giving.desired == len(giving.ready):
                return Flip(other, role)
        return None

    def _sufficient_size(self, role: Role, now_s: float) -> float:
        """Returns the largest size that would have sufficed, with headroom, over the last `flip_after_s`."""
        since_s = now_s - self.config.flip_after_s
        sizes = self._pools[role].sufficient
        if not sizes or sizes[0][0] > since_s:
            return math.inf
        return max(count for at_s, count in sizes if at_s >= since_s)

    def _flip(self, flip: Flip, signals: Signals, records: dict[Role, ScalingRecord], now_s: float) -> ScalingDecision:
        self._flipped_s = now_s
        for role, by in ((flip.from_role, -1), (flip.to_role, 1)):
            current = signals.pools[role].desired
            verb = "takes a worker from" if by > 0 else "gives a worker to"
            other = flip.from_role if by > 0 else flip.to_role
            reason = f"{records[role].reason}; {verb} the {other} pool, which is faster than starting one"
            records[role] = replace(records[role], decided=current + by, verdict="flip", reason=reason)
            self._pools[role].changed_s = now_s
        return ScalingDecision((flip,), tuple(records.values()))


def _find_missing(signals: Signals, stale_s: float) -> str:
    """Returns which signal is missing, or ""."""
    if signals.demand is None:
        return "a router does not report its traffic"
    for pool in signals.pools.values():
        for worker in pool.ready:
            if worker.load is None:
                return f"{worker.worker_id} has not reported yet"
            if worker.age_s > stale_s:
                return f"{worker.worker_id} has not reported for {worker.age_s:.0f} s"
    return ""


def _num_coming(pool: PoolSignal, now_s: float, config: AutoscalerConfig) -> int:
    """Returns how many starting workers can be expected to become ready."""
    if pool.unplaceable:
        return 0
    return sum(now_s - since_s < config.stuck_after_s for since_s in pool.starting_s)
