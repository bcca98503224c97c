"""Which requests go to the workers, which wait, and which are refused before work is done. Pure.

Data in, data out: the caller passes the time and the randomness, tells what ends, and asks `poll` who goes next. Lanes
share the capacity by weight, tenants share a lane by weight (`router.fairness`), and within a tenant the earliest due
goes first. Whoever is queued is served within a bound while capacity flows: overload refuses newcomers, never those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.admission_config import AdmissionConfig
from penstock.types import Lane
from router.accounts import Limits, TenantAccounts
from router.capacity import FleetState, Outstanding, has_room
from router.fairness import FairCounters
from router.forecast import Estimator, Forecast
from router.lanes import Entry, LaneQueue
from router.overload import Level, Overload, fleet_pressure, shed_probability, worst
from router.verdicts import Answer, Ask, Dispatched, Queued, Reason, Refused, Used

_GLANCE_S = 0.01  # saturation is looked at no more often, however many requests come and go
_PATIENCE = 0.5  # of a lane's longest wait: whoever comes after that goes behind
_HINT_UNKNOWN_S = 1.0
_SHORTEST_HINT_S = 0.1
_LONGEST_HINT_S = 60.0


@dataclass(slots=True)
class _Case:
    """A request that was admitted and has not left."""

    ask: Ask
    output_tokens: int  # expected, of all sequences
    cost: float  # in weighted tokens, as charged
    num_tokens: int  # of KV at its longest
    entry: Entry | None = None  # while it waits
    sent_s: float = 0.0
    contended: bool = False  # it has waited
    started: bool = False


class Admission:
    """Owns every request from its admission to its end; each leaves exactly once, and every count returns to zero."""

    def __init__(
        self,
        config: AdmissionConfig,
        rng: random.Random,
        *,
        limits_of: Callable[[str], Limits] | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        """`limits_of` knows a tenant's limits, else the configuration does; `estimator` what requests take."""
        self._config = config
        self._rng = rng
        self._lanes = {lane: LaneQueue() for lane in Lane}
        self._turns = FairCounters[Lane]()
        self._cases: dict[int, _Case] = {}
        self._accounts = TenantAccounts(limits_of or (lambda tenant: config.tenant))
        self._forecast = Forecast(config)
        self._estimator: Estimator = estimator or self._forecast
        self._overload = Overload(config.overload)
        self._observed_s = float("-inf")
        self.out = Outstanding()

    @property
    def level(self) -> Level:
        return self._overload.level

    @property
    def saturation(self) -> float:
        return self._overload.saturation

    @property
    def num_waiting(self) -> int:
        return sum(queue.num_waiting for queue in self._lanes.values())

    @property
    def num_inside(self) -> int:
        """Waiting, or at the workers."""
        return len(self._cases)

    def holds(self, key: int) -> bool:
        """Whether that request has been admitted and has not left."""
        return key in self._cases

    def num_waiting_in(self, lane: Lane) -> int:
        return self._lanes[lane].num_waiting

    def inflight_tokens(self, tenant: str) -> int:
        """Of KV, that the tenant's requests at the workers may come to hold."""
        return self._accounts.inflight_tokens(tenant)

    def on_fleet(self, fleet: FleetState | None, now_s: float) -> None:
        """The workers' latest state, None where none takes requests; `poll` afterwards."""
        self._forecast.fleet = fleet
        self._observe(now_s)

    def offer(self, ask: Ask, now_s: float) -> Answer:
        """A request arrives. A queued one comes back from `poll`, unless it leaves before, with `end`."""
        assert ask.key not in self._cases
        self._glance(now_s)
        case = self._case(ask)
        refused = self._over_limits(case, now_s)
        at_once = False
        if refused is None:
            at_once = self._fits(case) and self._has_room(ask.num_sequences, ask.prompt_tokens)
            at_once = at_once and (not self.num_waiting or self._next() is None)
            refused = self._too_late(case, 0.0, now_s) if at_once else self._refuse_to_queue(case, now_s)
        if refused is not None:
            return refused
        self._cases[ask.key] = case
        self._accounts.enter(ask.tenant)
        self._accounts.spend(ask.tenant, ask.prompt_tokens + case.output_tokens, now_s)
        if at_once:
            return self._send(case, now_s)
        self._push(case, now_s)
        return Queued(ask.key)

    def poll(self, now_s: float) -> list[Dispatched | Refused]:
        """Who leaves the queue: to the workers while these have room, or unserved because its time is up."""
        answers: list[Dispatched | Refused] = []
        for queue in self._lanes.values():
            answers += [self._give_up(self._cases[entry.key], now_s) for entry in queue.expired(now_s)]
        while self._has_room(1, 0) and (entry := self._next()) is not None:
            case = self._cases[entry.key]
            if (late := self._too_late(case, 0.0, now_s)) is not None:
                self._drop(case, now_s)
                answers.append(late)
            elif self._has_room(case.ask.num_sequences, case.ask.prompt_tokens):
                answers.append(self._send(case, now_s))
            else:
                break
        self._glance(now_s)
        return answers

    def next_poll_s(self) -> float | None:
        """When `poll` must be called though nothing has changed; None: only after a change."""
        return min((at for queue in self._lanes.values() if (at := queue.next_expiry_s()) is not None), default=None)

    def start(self, key: int) -> None:
        """Its first token has come; `poll` afterwards. Twice is once."""
        case = self._cases[key]
        if not case.started:
            case.started = True
            self.out.start(case.ask.prompt_tokens)

    def end(self, key: int, used: Used | None, now_s: float) -> None:
        """It leaves, wherever it is, with what it used; None: nobody knows. `poll` afterwards."""
        case = self._cases[key]
        if case.entry is not None:
            self._drop(case, now_s)
            return
        ask = case.ask
        self.start(key)
        self.out.end(ask.num_sequences)
        self._accounts.end(ask.tenant, case.num_tokens)
        if used is not None:
            if used.whole:
                self._forecast.learn(ask, case.cost, case.sent_s, used, now_s)
            self._settle(case, used.output_tokens, now_s)
        self._forget(case)

    # Refusal before work is done.

    def _case(self, ask: Ask) -> _Case:
        expected = self._forecast.output_tokens(ask.lane, ask.max_tokens) * ask.num_sequences
        cost = ask.prompt_tokens + self._config.output_weight * expected
        return _Case(ask, expected, cost, ask.prompt_tokens + ask.max_tokens * ask.num_sequences)

    def _over_limits(self, case: _Case, now_s: float) -> Refused | None:
        """Those of its tenant."""
        ask, accounts = case.ask, self._accounts
        limits = accounts.limits(ask.tenant)
        quota, most = limits.max_inflight_tokens, limits.max_requests
        if most is not None and accounts.num_requests(ask.tenant) >= most:
            return self._refused(
                case, Reason.TENANT_REQUESTS, f"this tenant has {most} requests under way, as many as it may", None
            )
        if quota is not None and case.num_tokens > quota:
            problem = f"and the prompt come to {case.num_tokens} tokens, over this tenant's {quota}; ask for fewer"
            return Refused(ask.key, Reason.QUOTA, problem)
        wait_s = accounts.rate_wait_s(ask.tenant, ask.prompt_tokens + case.output_tokens, now_s)
        if not wait_s:
            return None
        return self._refused(
            case, Reason.TOKEN_RATE, f"this tenant's {limits.tokens_per_s:g} tokens/s are used up", wait_s
        )

    def _refuse_to_queue(self, case: _Case, now_s: float) -> Refused | None:
        lane, level = case.ask.lane, self._overload.level
        settings, queue = self._config.lane(lane), self._lanes[lane]
        drained_s = self._half_drained_s(lane, now_s)
        if level >= Level.REFUSE and lane is not Lane.INTERACTIVE:
            return self._refused(case, Reason.OVERLOAD, "overloaded: only interactive requests may wait", drained_s)
        if level >= Level.PAUSE_BULK and lane is Lane.BULK:
            return self._refused(case, Reason.BULK_PAUSED, "overloaded: bulk requests are paused", drained_s)
        if queue.num_waiting >= settings.max_queue:
            return self._refused(
                case, Reason.QUEUE_FULL, f"{queue.num_waiting} {lane} requests wait already", drained_s
            )
        wait_s = self._predict_wait_s(case, now_s)
        if wait_s is not None and wait_s > settings.max_wait_s:
            problem = f"it would wait about {wait_s:.3g} s; {lane} requests wait {settings.max_wait_s:g} s at most"
            return self._refused(case, Reason.WAIT, problem, wait_s - _PATIENCE * settings.max_wait_s)
        if (late := self._too_late(case, wait_s or 0.0, now_s)) is not None:
            return late
        if self._rng.random() < shed_probability(self._overload.saturation, settings.shed_from):
            return self._refused(case, Reason.SHED, "overloaded: some requests are refused", drained_s)
        return None

    def _too_late(self, case: _Case, wait_s: float, now_s: float) -> Refused | None:
        """Where this wait and its service would outlast its deadline.

        The emptier the deployment, the less is refused on a guess: how long an answer gets is known in the mean only,
        and one that is tried in vain costs others nothing while there is room. With nothing out at all everything is
        tried, or a rate once measured too low would never be measured again.
        """
        ask = case.ask
        if now_s < ask.deadline_s and self.out.num_requests == 0:
            return None
        trust = min(1.0, self._overload.saturation)
        service = self._estimator.service(
            ask.prompt_tokens, self._forecast.likely_output(ask.lane, ask.max_tokens, trust)
        )
        needed_s = wait_s + (service.total_s if service else 0.0)
        left_s = ask.deadline_s - now_s
        if 0 < left_s >= needed_s:
            return None
        problem = f"it has {max(0.0, left_s):.3g} s left and needs about {needed_s:.3g} s, {wait_s:.3g} s to wait"
        return self._refused(case, Reason.DEADLINE, f"{problem}; give it more time", needed_s - left_s)

    def _predict_wait_s(self, case: _Case, now_s: float) -> float | None:
        rate = self._forecast.drain_per_s(now_s)
        if not rate:
            return None
        lane, tenant = case.ask.lane, case.ask.tenant
        queue, share = self._lanes[lane], self._share(lane)
        everything = sum(one.cost for one in self._lanes.values())
        longest_s = min(everything, (queue.cost + case.cost) / share) / rate
        if longest_s <= min(self._config.lane(lane).max_wait_s, 0.5 * (case.ask.deadline_s - now_s)):
            return longest_s  # nothing hangs on a better estimate, which is dearer
        weights = {one: self._accounts.weight(one) for one in (*queue.waiting_tenants(), tenant)}
        ahead = queue.cost_before(tenant, self._due_s(case.ask), weights[tenant] / sum(weights.values()))
        return min(everything, (ahead + case.cost) / share) / rate

    def _half_drained_s(self, lane: Lane, now_s: float) -> float | None:
        rate = self._forecast.drain_per_s(now_s)
        return 0.5 * self._lanes[lane].cost / self._share(lane) / rate if rate else None

    def _share(self, lane: Lane) -> float:
        """Of the capacity, that this lane gets while the others have work as they have now."""
        own = self._config.lane(lane).weight
        others = sum(self._config.lane(one).weight for one in Lane if one is not lane and self._lanes[one].num_waiting)
        return own / (own + others)

    def _refused(self, case: _Case, reason: Reason, problem: str, wait_s: float | None) -> Refused:
        """With a hint that is jittered, so that those who are refused together do not come back together."""
        base_s = _HINT_UNKNOWN_S if wait_s is None else min(_LONGEST_HINT_S, max(_SHORTEST_HINT_S, wait_s))
        hint_s = base_s * self._rng.uniform(1.0, 1.5)
        return Refused(case.ask.key, reason, f"{problem}; try again in {hint_s:.2g} s", hint_s)

    # The queue.

    def _due_s(self, ask: Ask) -> float:
        return min(ask.deadline_s, ask.arrived_s + _PATIENCE * self._config.lane(ask.lane).max_wait_s)

    def _push(self, case: _Case, now_s: float) -> None:
        ask = case.ask
        expires_s = min(ask.deadline_s, now_s + self._config.lane(ask.lane).max_wait_s)
        case.contended = True
        case.entry = Entry(ask.key, ask.tenant, self._due_s(ask), expires_s, case.cost, case.num_tokens)
        self._lanes[ask.lane].push(case.entry)
        self._forecast.drain.observe(0.0, True, now_s)

    def _next(self) -> Entry | None:
        """Whose turn it is: of the lane that has had least of its share."""
        best: tuple[float, Entry] | None = None
        for lane, queue in self._lanes.items():
            entry = queue.next(self._entry_fits) if queue.num_waiting else None
            if entry is None:
                self._turns.deactivate(lane)
                continue
            self._turns.activate(lane)
            if best is None or self._turns[lane] < best[0]:
                best = (self._turns[lane], entry)
        return best[1] if best else None

    def _entry_fits(self, entry: Entry) -> bool:
        return self._accounts.fits(entry.tenant, entry.num_tokens)

    def _fits(self, case: _Case) -> bool:
        return self._accounts.fits(case.ask.tenant, case.num_tokens)

    def _has_room(self, num_sequences: int, prompt_tokens: int) -> bool:
        fleet, share = self._forecast.fleet, self._forecast.uncached_share
        return has_room(fleet, self.out, num_sequences, prompt_tokens, share, self._config)

    def _send(self, case: _Case, now_s: float) -> Dispatched:
        ask = case.ask
        if case.entry is not None:
            self._unqueue(case, case.cost, now_s)
        self._lanes[ask.lane].tenants.serve(ask.tenant, case.cost / self._accounts.weight(ask.tenant))
        self._turns.serve(ask.lane, case.cost / self._config.lane(ask.lane).weight)
        case.sent_s = now_s
        self.out.send(ask.num_sequences, ask.prompt_tokens)
        self._accounts.send(ask.tenant, case.num_tokens)
        shortened = self._overload.level >= Level.SHORTEN
        max_tokens = min(ask.max_tokens, self._config.overload.max_tokens) if shortened else ask.max_tokens
        return Dispatched(ask.key, max_tokens, max(0.0, now_s - ask.arrived_s))

    def _unqueue(self, case: _Case, served: float, now_s: float) -> None:
        assert case.entry is not None
        self._lanes[case.ask.lane].remove(case.entry)
        case.entry = None
        self._forecast.drain.observe(served, self.num_waiting > 0, now_s)

    def _drop(self, case: _Case, now_s: float) -> None:
        """It leaves the queue unserved and pays nothing."""
        self._unqueue(case, 0.0, now_s)
        self._accounts.spend(case.ask.tenant, -(case.ask.prompt_tokens + case.output_tokens), now_s)
        self._forget(case)

    def _forget(self, case: _Case) -> None:
        del self._cases[case.ask.key]
        self._accounts.leave(case.ask.tenant)

    def _give_up(self, case: _Case, now_s: float) -> Refused:
        lane = case.ask.lane
        self._drop(case, now_s)
        drained_s = self._half_drained_s(lane, now_s)
        if now_s >= case.ask.deadline_s:
            return self._refused(case, Reason.DEADLINE, "its deadline has passed in the queue", drained_s)
        longest_s = self._config.lane(lane).max_wait_s
        return self._refused(case, Reason.WAIT, f"{lane} requests wait {longest_s:g} s at most", drained_s)

    def _settle(self, case: _Case, output_tokens: int, now_s: float) -> None:
        """What was charged on a guess becomes what was used."""
        ask, more = case.ask, output_tokens - case.output_tokens
        cost = self._config.output_weight * more
        tenants, weight = self._lanes[ask.lane].tenants, self._accounts.weight(ask.tenant)
        tenants.settle(ask.tenant, cost / weight, case.contended)
        self._turns.settle(ask.lane, cost / self._config.lane(ask.lane).weight, case.contended)
        self._accounts.spend(ask.tenant, more, now_s)

    # Overload.

    def _glance(self, now_s: float) -> None:
        if now_s - self._observed_s >= _GLANCE_S:
            self._observe(now_s)

    def _observe(self, now_s: float) -> None:
        self._observed_s = now_s
        saturation = worst(self._signals(now_s))
        if self._forecast.fleet is None and (saturation or 0.0) < self._overload.saturation:
            saturation = None  # the workers' part of it is not known any more, which is no relief
        self._overload.observe(saturation, now_s)

    def _signals(self, now_s: float) -> Iterator[float | None]:
        """Bulk is there to wait: its own queue is no sign of overload."""
        rate = self._forecast.drain_per_s(now_s)
        for lane in (Lane.INTERACTIVE, Lane.STANDARD):
            queue, settings = self._lanes[lane], self._config.lane(lane)
            yield queue.num_waiting / settings.max_queue
            if rate:
                yield queue.cost / self._share(lane) / rate / settings.max_wait_s
        if self._forecast.fleet is not None:
            yield fleet_pressure(self._forecast.fleet, self._config)
