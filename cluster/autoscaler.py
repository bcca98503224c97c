"""Decides how many workers each pool has, and which change their role. Pure: data and the time go in, changes with
their reasons come out.

Two speeds: a new worker takes as long as starting takes, a role flip seconds. Sizes come from `cluster.sizing`; here
are the rules for acting on them. A pool grows at once and shrinks late. Nothing is decided on missing data, what an
operator has set holds while it holds, and workers that never come neither count nor stop anything else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.profiles import Profiles
from cluster.scaling_signals import (
    Bounds,
    Change,
    Decision,
    DemandSignal,
    Flip,
    PoolSignal,
    Record,
    Resize,
    Signals,
)
from cluster.sizing import DecodeSizer, Need, PrefillSizer, Prompts, bin_of
from cluster.traffic import History
from penstock.autoscaler_config import AutoscalerConfig
from penstock.types import Role

_IN_TIME_OVER_S = 60.0
_WORTH_A_CHANGE = 0.1  # of a pool's size: workers one by one are many changes for little
_WORTH_SHRINKING = 0.25
_AGAIN_S = 300.0  # a pool that grew so lately grows by more: what goes on rising is met in few steps
_WORTH_ANOTHER = 0.25
_BIG_PROMPTS = 2.0  # times the mean
_START_WEIGHT = 0.3  # of the newest start's time


@dataclass(frozen=True, slots=True)
class Override:
    """An operator's word on a pool's size, until then."""

    replicas: int
    until_s: float


@dataclass(slots=True)
class _Pool:
    """What is remembered of one pool between decisions."""

    changed_s: float = float("-inf")
    grew_s: float = float("-inf")
    enough: deque[tuple[float, int]] = field(default_factory=deque)  # when, and how many would have done
    override: Override | None = None


class Autoscaler:
    def __init__(self, config: AutoscalerConfig, bounds: Mapping[Role, Bounds], max_batch: int) -> None:
        """`max_batch` is what a decode worker runs at once at most."""
        self.config = config
        self._bounds = bounds
        self._profiles = Profiles()
        self._history = History(config.history_s, config.interval_s)
        self._prefill = PrefillSizer(config)
        self._decode = DecodeSizer(config, max_batch)
        self._pools = {role: _Pool() for role in Role}
        self._demands: deque[tuple[float, DemandSignal]] = deque()
        self._last_s: float | None = None
        self._flipped_s = float("-inf")
        self._start_s = config.start_s

    def override(self, role: Role, replicas: int, until_s: float) -> None:
        """An operator has set this pool's size; until then it is left alone."""
        self._pools[role].override = Override(self._bounds[role].clip(replicas), until_s)

    def release(self, role: Role) -> None:
        """The operator leaves the pool to us."""
        self._pools[role].override = None

    def on_started(self, after_s: float) -> None:
        """A new worker serves, so long after it was asked for."""
        self._start_s += _START_WEIGHT * (after_s - self._start_s)

    def decide(self, signals: Signals, now_s: float) -> Decision:
        """What to change now. The pools' next signals are expected to show it."""
        missing = _find_missing(signals, self.config.stale_s)
        if missing:
            self._last_s = None  # what happens meanwhile is not known: the next bin begins after it
            return Decision((), tuple(self._hold(role, signals, now_s, missing) for role in Role))
        if not self._observe(signals, now_s):
            reason = "the first look: what comes is counted from now on"
            return Decision((), tuple(self._hold(role, signals, now_s, reason) for role in Role))
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
        return Decision(tuple(changes), tuple(records.values()))

    # What has come.

    def _observe(self, signals: Signals, now_s: float) -> bool:
        """False where this is the first look after a gap."""
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
        prefilling = [one.load for one in signals.pools[Role.PREFILL].ready if one.load is not None]
        num_prefilling = sum(load.num_running + load.num_waiting for load in prefilling)
        one = bin_of(work, num_prefilling, after_s)
        self._history.add(one)
        first, ended = self._shares_in_time(now_s)
        self._prefill.learn(one, after_s, first)
        self._decode.learn(one, after_s, ended)
        return True

    def _shares_in_time(self, now_s: float) -> tuple[float | None, float | None]:
        """Of first tokens and of completions, over the last minute."""
        newest_first = (demand for at_s, demand in reversed(self._demands) if at_s <= now_s - _IN_TIME_OVER_S)
        before, now = next(newest_first, self._demands[0][1]), self._demands[-1][1]
        first, ended = now.first_tokens - before.first_tokens, now.ended - before.ended
        return (
            (now.first_tokens_in_time - before.first_tokens_in_time) / first if first > 0 else None,
            (now.ended_in_time - before.ended_in_time) / ended if ended > 0 else None,
        )

    def _needs(self, signals: Signals, now_s: float) -> dict[Role, Need]:
        demand = signals.demand
        assert demand is not None
        profile = self._profiles.profile(signals)
        ready = signals.pools[Role.PREFILL].ready or signals.pools[Role.DECODE].ready
        backlog = sum(one.load.queued_prefill_tokens for one in ready if one.load is not None) + demand.waiting_tokens
        coming = _num_coming(signals.pools[Role.PREFILL], now_s, self.config)
        serving = len(signals.pools[Role.PREFILL].ready) + coming
        return {
            Role.PREFILL: self._prefill.need(self._history, profile, self._prompts(), backlog, serving, self._start_s),
            Role.DECODE: self._decode.need(self._history, profile, self._start_s),
        }

    def _prompts(self) -> Prompts:
        before, now = self._demands[0][1], self._demands[-1][1]
        tokens, squared = now.prompt_tokens - before.prompt_tokens, now.squared_prompt_tokens
        squared -= before.squared_prompt_tokens
        ended, cached = now.ended_prompt_tokens - before.ended_prompt_tokens, now.cached_tokens - before.cached_tokens
        # A router of another version tells no squares.
        typical = squared / tokens if squared else _BIG_PROMPTS * now.prompt_tokens / max(1, now.requests)
        return Prompts(typical, max(0.0, 1.0 - cached / ended) if ended else 1.0)

    # What follows from it.

    def _hold(self, role: Role, signals: Signals, now_s: float, reason: str, verdict: str = "missing") -> Record:
        current = signals.pools[role].desired
        return Record(now_s, role, current, current, current, verdict, reason)

    def _judge(self, role: Role, pool: PoolSignal, need: Need, now_s: float) -> Record:
        memory, bounds = self._pools[role], self._bounds[role]
        current = pool.desired
        if memory.override is not None and now_s < memory.override.until_s:
            held = memory.override.replicas
            reason = f"set to {held} by an operator for {memory.override.until_s - now_s:.0f} s more"
            wanted = need.replicas if need.replicas is not None else held
            return Record(now_s, role, current, wanted, held, "override", reason, need.figures)
        memory.override = None
        if need.replicas is None:
            decided = bounds.clip(current)
            return Record(now_s, role, current, current, decided, "hold", need.reason)
        wanted, fewer = bounds.clip(need.replicas), bounds.clip(need.fewer)
        memory.enough.append((now_s, fewer))
        while memory.enough[0][0] < now_s - self.config.down_after_s:
            memory.enough.popleft()
        record = Record(now_s, role, current, need.replicas, current, "hold", need.reason, need.figures)
        if bounds.clip(current) != current:
            reason, decided = f"bounds are {bounds.lowest} to {bounds.highest}", bounds.clip(current)
            return replace(record, decided=decided, verdict="up" if decided > current else "down", reason=reason)
        if wanted > current:
            return self._grow(record, pool, wanted, now_s)
        return self._shrink(record, memory, now_s)

    def _grow(self, record: Record, pool: PoolSignal, wanted: int, now_s: float) -> Record:
        num_stuck = len(pool.starting_s) - _num_coming(pool, now_s, self.config)
        if num_stuck:
            why = pool.unplaceable or f"starting for more than {self.config.stuck_after_s:g} s"
            reason = f"{num_stuck} workers that were asked for never came ({why}); {record.reason}"
            return replace(record, reason=reason)
        wait_s = self._pools[record.role].changed_s + self.config.up_cooldown_s - now_s
        if wait_s > 0:
            return replace(record, reason=f"{record.reason}; the pool may change again in {wait_s:.0f} s")
        memory = self._pools[record.role]
        step = _WORTH_A_CHANGE if now_s - memory.grew_s > _AGAIN_S else _WORTH_ANOTHER
        memory.grew_s = now_s
        least = math.ceil(record.current * (1 + step))
        return replace(record, decided=self._bounds[record.role].clip(max(wanted, least)), verdict="up")

    def _shrink(self, record: Record, memory: _Pool, now_s: float) -> Record:
        """To what has sufficed for long enough, room to spare included."""
        most = max(count for _, count in memory.enough)
        if record.current - most < max(1.0, _WORTH_SHRINKING * record.current):
            return record
        seen_s = now_s - memory.enough[0][0]
        if self._history.length_s < self.config.down_after_s or seen_s < 0.9 * self.config.down_after_s:
            return replace(record, reason=f"{record.reason}; fewer must do for {self.config.down_after_s:g} s first")
        until_s = max(memory.changed_s + self.config.down_cooldown_s, memory.grew_s + self.config.down_after_s)
        wait_s = until_s - now_s
        if wait_s > 0:
            return replace(record, reason=f"{record.reason}; the pool may shrink in {wait_s:.0f} s")
        return replace(record, decided=most, verdict="down")

    # Flips.

    def _find_flip(
        self, signals: Signals, needs: Mapping[Role, Need], records: Mapping[Role, Record], now_s: float
    ) -> Flip | None:
        """Where one pool lacks workers that serve now, and the other would still do with one fewer."""
        if not self.config.flips or now_s - self._flipped_s < self.config.flip_cooldown_s:
            return None
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            need, spare = needs[role].replicas, needs[other].replicas
            pool, giving = signals.pools[role], signals.pools[other]
            if need is None or spare is None or "override" in (records[role].verdict, records[other].verdict):
                continue
            num_stuck = len(pool.starting_s) - _num_coming(pool, now_s, self.config)
            lacks = min(need, self._bounds[role].highest) > max(len(pool.ready), pool.desired - num_stuck)
            left, least = len(giving.ready) - 1, max(self._sufficed(other, now_s), self._bounds[other].lowest, 1)
            if lacks and left >= least and giving.desired == len(giving.ready):
                return Flip(other, role)
        return None

    def _sufficed(self, role: Role, now_s: float) -> float:
        """The most that would have done, room to spare included, over as long as a giver is looked at."""
        since_s = now_s - self.config.flip_after_s
        enough = self._pools[role].enough
        if not enough or enough[0][0] > since_s:
            return math.inf
        return max(count for at_s, count in enough if at_s >= since_s)

    def _flip(self, flip: Flip, signals: Signals, records: dict[Role, Record], now_s: float) -> Decision:
        self._flipped_s = now_s
        for role, by in ((flip.from_role, -1), (flip.to_role, 1)):
            current = signals.pools[role].desired
            gaining = "takes one over from" if by > 0 else "gives one to"
            other = flip.from_role if by > 0 else flip.to_role
            reason = f"{records[role].reason}; {gaining} the {other} pool, which is quicker than starting one"
            records[role] = replace(records[role], decided=current + by, verdict="flip", reason=reason)
            self._pools[role].changed_s = now_s
        return Decision((flip,), tuple(records.values()))


def _find_missing(signals: Signals, stale_s: float) -> str:
    """What is not known, in words; empty where all is."""
    if signals.demand is None:
        return "a router tells nothing of its traffic"
    for pool in signals.pools.values():
        for one in pool.ready:
            if one.load is None:
                return f"{one.worker_id} has told nothing yet"
            if one.age_s > stale_s:
                return f"{one.worker_id} has told nothing for {one.age_s:.0f} s"
    return ""


def _num_coming(pool: PoolSignal, now_s: float, config: AutoscalerConfig) -> int:
    """Workers that are starting and may be counted on."""
    if pool.unplaceable:
        return 0
    return sum(now_s - since_s < config.stuck_after_s for since_s in pool.starting_s)
