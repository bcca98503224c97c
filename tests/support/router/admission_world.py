"""Simulates a deployment in virtual time around admission: prefill workers as one queue, decode slots, load reports."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.config.admission import AdmissionConfig, TenantLimits
from penstock.types import Lane
from router.admission.admission_policy import AdmissionPolicy
from router.admission.capacity import FleetState
from router.admission.interface import AdmissionRequest, Dispatched, Queued, Refused, RequestUsage

REPORT_S = 0.1


@dataclass
class Arrival:
    at_s: float
    lane: Lane = Lane.STANDARD
    tenant: str = ""
    prompt_tokens: int = 500
    output_tokens: int = 100
    max_tokens: int = 4096
    timeout_s: float = 60.0


@dataclass
class Fate:
    """Holds the outcome of one arrival."""

    arrival: Arrival
    ask: AdmissionRequest
    sent_s: float | None = None
    max_tokens: int = 0
    first_token_s: float | None = None
    ended_s: float | None = None
    refused: Refused | None = None
    refused_s: float | None = None
    too_late: bool = False  # its deadline passed at the workers, which wasted their time

    @property
    def good(self) -> bool:
        return self.ended_s is not None and not self.too_late


@dataclass
class Fleet:
    """Decodes `slots` sequences at a time at `step_s` per token, and computes prompts in turn at `tokens_per_s`."""

    slots: int = 32
    step_s: float = 0.02
    tokens_per_s: float = 20_000.0
    decode: int = 2
    prefill: int = 2

    def capacity_per_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Returns the highest rate of requests of this size."""
        return min(self.slots / (output_tokens * self.step_s), self.tokens_per_s / prompt_tokens)


@dataclass
class World:
    fleet: Fleet = field(default_factory=Fleet)
    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    seed: int = 1
    limits_of: Callable[[str], TenantLimits] | None = None

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.admission = AdmissionPolicy(self.config, random.Random(self.seed), limits_of=self.limits_of)
        self.fates: list[Fate] = []
        self.most_waiting = dict.fromkeys(Lane, 0)
        self.levels: list[tuple[float, int]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._prefilling: deque[Fate] = deque()
        self._for_slot: deque[Fate] = deque()
        self._num_decoding = 0

    def run(self, arrivals: list[Arrival], until_s: float) -> list[Fate]:
        for arrival in arrivals:
            self._at(arrival.at_s, lambda arrival=arrival: self._arrive(arrival))
        self._at(0.0, self._report)
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
            for lane in Lane:
                self.most_waiting[lane] = max(self.most_waiting[lane], self.admission.num_waiting_in(lane))
        return self.fates

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, act))

    def _arrive(self, arrival: Arrival) -> None:
        ask = AdmissionRequest(
            key=len(self.fates),
            lane=arrival.lane,
            tenant=arrival.tenant,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.max_tokens,
            arrived_s=self.now_s,
            deadline_s=self.now_s + arrival.timeout_s,
        )
        self.fates.append(Fate(arrival, ask))
        answer = self.admission.offer(ask, self.now_s)
        if isinstance(answer, Queued):
            self._at(self.admission.next_poll_s() or self.now_s, self._poll)
        else:
            self._take(answer)

    def _take(self, answer: Dispatched | Refused) -> None:
        fate = self.fates[answer.key]
        if isinstance(answer, Refused):
            fate.refused, fate.refused_s = answer, self.now_s
            return
        fate.sent_s, fate.max_tokens = self.now_s, answer.max_tokens
        self._prefilling.append(fate)
        if len(self._prefilling) == 1:
            self._prefill_next()

    def _poll(self) -> None:
        for answer in self.admission.poll(self.now_s):
            self._take(answer)

    def _prefill_next(self) -> None:
        seconds = self._prefilling[0].arrival.prompt_tokens / self.fleet.tokens_per_s
        self._at(self.now_s + seconds, self._prefilled)

    def _prefilled(self) -> None:
        fate = self._prefilling.popleft()
        fate.first_token_s = self.now_s
        self.admission.start(fate.ask.key)
        self._for_slot.append(fate)
        if self._prefilling:
            self._prefill_next()
        self._fill_slots()
        self._poll()

    def _fill_slots(self) -> None:
        while self._for_slot and self._num_decoding < self.fleet.slots:
            fate = self._for_slot.popleft()
            self._num_decoding += 1
            tokens = min(fate.arrival.output_tokens, fate.max_tokens)
            ends_s = self.now_s + tokens * self.fleet.step_s
            fate.too_late = ends_s > fate.ask.deadline_s
            self._at(min(ends_s, max(self.now_s, fate.ask.deadline_s)), lambda fate=fate: self._end(fate))

    def _end(self, fate: Fate) -> None:
        self._num_decoding -= 1
        fate.ended_s = self.now_s
        tokens = min(fate.arrival.output_tokens, fate.max_tokens)
        used = None if fate.too_late else RequestUsage(tokens, decode_s=self.now_s - (fate.first_token_s or 0.0))
        self.admission.end(fate.ask.key, used, self.now_s)
        self._fill_slots()
        self._poll()

    def state(self) -> FleetState:
        return FleetState(
            num_decode=self.fleet.decode,
            num_prefill=self.fleet.prefill,
            slots=self.fleet.slots,
            num_waiting=len(self._for_slot),
            queued_prefill_tokens=sum(fate.arrival.prompt_tokens for fate in self._prefilling),
            prefill_tokens_per_s=self.fleet.tokens_per_s,
            step_s=self.fleet.step_s,
        )

    def _report(self) -> None:
        self.admission.on_fleet(self.state(), self.now_s)
        self._poll()
        self.levels.append((self.now_s, int(self.admission.level)))
        self._at(self.now_s + REPORT_S, self._report)


def poisson(rng: random.Random, per_s: float, until_s: float, template: Arrival) -> list[Arrival]:
    """Returns Poisson arrivals like the template."""
    arrivals, at_s = [], rng.expovariate(per_s)
    while at_s < until_s:
        arrivals.append(replace(template, at_s=at_s))
        at_s += rng.expovariate(per_s)
    return arrivals


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
