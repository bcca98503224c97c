"""Which requests go to the workers, which wait, and which are refused before work is done. Pure.

Data in, data out: the caller passes the time and the randomness, tells what ends, and asks `poll` who goes next. Lanes
share the capacity by weight, tenants share a lane by weight (`router.fairness`), and within a tenant the earliest due
goes first. Whoever is queued is served within a bound while capacity flows: overload refuses newcomers, never those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from penstock.admission_config import AdmissionConfig
from penstock.types import Lane
from router.accounts import Limits, TenantAccounts
from router.capacity import FleetState, Outstanding, has_room
from router.fairness import FairCounters
from router.forecast import Estimator, Forecast
from router.lanes import Case, Entry, LaneQueue
from router.overload import Level, Overload, fleet_pressure, worst
from router.refusals import Judge, due_s
from router.verdicts import Answer, Ask, Dispatched, Queued, Refused, Used

_GLANCE_S = 0.01  # saturation is looked at no more often, however many requests come and go


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
        self._lanes = {lane: LaneQueue() for lane in Lane}
        self._turns = FairCounters[Lane]()
        self._cases: dict[int, Case] = {}
        self._accounts = TenantAccounts(limits_of or (lambda tenant: config.tenant))
        self._forecast = Forecast(config)
        self._overload = Overload(config.overload)
        self._observed_s = float("-inf")
        self.out = Outstanding()
        self._judge = Judge(
            config,
            rng,
            self._lanes,
            self._accounts,
            self._forecast,
            estimator or self._forecast,
            self._overload,
            self.out,
        )

    @property
    def level(self) -> Level:
        return self._overload.level

    @property
    def saturation(self) -> float:
        return self._overload.saturation

    @property
    def num_waiting(self) -> int:
        return sum([queue.num_waiting for queue in self._lanes.values()])

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
        refused = self._judge.over_limits(case, now_s)
        at_once = False
        if refused is None:
            at_once = self._fits(case) and self._has_room(ask.num_sequences, ask.prompt_tokens)
            at_once = at_once and (not self.num_waiting or self._next() is None)
            refused = self._judge.too_late(case, 0.0, now_s) if at_once else self._judge.refuse_to_queue(case, now_s)
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
            for expired in queue.expired(now_s):
                case = self._cases[expired.key]
                self._drop(case, now_s)
                answers.append(self._judge.gave_up(case, now_s))
        while self._has_room(1, 0) and (entry := self._next()) is not None:
            case = self._cases[entry.key]
            if (late := self._judge.too_late(case, 0.0, now_s)) is not None:
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

    def _case(self, ask: Ask) -> Case:
        expected = self._forecast.output_tokens(ask.lane, ask.max_tokens) * ask.num_sequences
        cost = ask.prompt_tokens + self._config.output_weight * expected
        return Case(ask, expected, cost, ask.prompt_tokens + ask.max_tokens * ask.num_sequences)

    # The queue.

    def _push(self, case: Case, now_s: float) -> None:
        ask = case.ask
        expires_s = min(ask.deadline_s, now_s + self._config.lane(ask.lane).max_wait_s)
        case.contended = True
        case.entry = Entry(ask.key, ask.tenant, due_s(ask, self._config), expires_s, case.cost, case.num_tokens)
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

    def _fits(self, case: Case) -> bool:
        return self._accounts.fits(case.ask.tenant, case.num_tokens)

    def _has_room(self, num_sequences: int, prompt_tokens: int) -> bool:
        fleet, share = self._forecast.fleet, self._forecast.uncached_share
        return has_room(fleet, self.out, num_sequences, prompt_tokens, share, self._config)

    def _send(self, case: Case, now_s: float) -> Dispatched:
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

    def _unqueue(self, case: Case, served: float, now_s: float) -> None:
        assert case.entry is not None
        self._lanes[case.ask.lane].remove(case.entry)
        case.entry = None
        self._forecast.drain.observe(served, self.num_waiting > 0, now_s)

    def _drop(self, case: Case, now_s: float) -> None:
        """It leaves the queue unserved and pays nothing."""
        self._unqueue(case, 0.0, now_s)
        self._accounts.spend(case.ask.tenant, -(case.ask.prompt_tokens + case.output_tokens), now_s)
        self._forget(case)

    def _forget(self, case: Case) -> None:
        del self._cases[case.ask.key]
        self._accounts.leave(case.ask.tenant)

    def _settle(self, case: Case, output_tokens: int, now_s: float) -> None:
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
                yield queue.cost / self._judge.share(lane) / rate / settings.max_wait_s
        if self._forecast.fleet is not None:
            yield fleet_pressure(self._forecast.fleet, self._config)
