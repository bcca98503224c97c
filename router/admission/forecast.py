"""Forecasts how long a request takes at the workers and how fast the queue drains. Pure: time is passed in.

An estimate without measurements is None, and None never leads to a refusal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from penstock.config.admission import AdmissionConfig
from penstock.types import Lane
from router.admission.capacity import FleetState, slot_limit
from router.admission.interface import AdmissionRequest, RequestUsage

_PRIOR_OUTPUT_TOKENS = 256  # output of one sequence assumed until a request has ended; typical of chats
_WINDOW_S = 5.0  # minimum time constant of the drain rate; twice a request's mean time at the workers if longer
_MIN_EVIDENCE_S = 0.5  # a drain rate is used only after this much time with a backlog
_FORGET_S = 60.0  # an older rate says nothing about the present fleet
_SMOOTHING = 0.05  # weight of a new sample in a running mean


class RunningMean:
    """Keeps an exponentially weighted mean. The first samples weigh equally. `value` is None before the first one."""

    def __init__(self) -> None:
        self._count = 0
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self._count += 1
        share = max(_SMOOTHING, 1.0 / self._count)
        self.value = sample if self.value is None else self.value + share * (sample - self.value)


class DrainRate:
    """Learns how much leaves the queue per second while there is a backlog. Learns nothing from an empty queue."""

    def __init__(self) -> None:
        self.window_s = _WINDOW_S
        self._observed_s: float | None = None  # time of the last call; None if the queue was empty then
        self._ended_s = -math.inf  # when the queue was last found empty
        self._drained = 0.0  # decaying sum
        self._time_s = 0.0  # time with a backlog; decays at the same rate

    def observe(self, drained: float, now_s: float, *, backlogged: bool) -> None:
        """Counts what left the queue since the last call; `backlogged` says whether the queue is now non-empty."""
        passed_s = 0.0 if self._observed_s is None else max(0.0, now_s - self._observed_s)
        decay = math.exp(-passed_s / self.window_s)
        self._drained = self._drained * decay + drained
        self._time_s = self._time_s * decay + self.window_s * (1.0 - decay)
        self._observed_s = now_s if backlogged else None
        if not backlogged:
            self._ended_s = now_s

    def per_s(self, now_s: float) -> float | None:
        """Returns the rate, or None if the last backlog was too short or too long ago."""
        if self._observed_s is None:
            if self._time_s < _MIN_EVIDENCE_S or now_s - self._ended_s > _FORGET_S:
                return None
            return self._drained / self._time_s
        time_s = self._time_s + max(0.0, now_s - self._observed_s)
        return self._drained / time_s if time_s >= _MIN_EVIDENCE_S else None


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """Holds the seconds that a request spends at the workers. Unknown parts count as zero."""

    first_token_s: float
    total_s: float


class ServiceEstimator(Protocol):
    def service(self, prompt_tokens: int, output_tokens: int) -> ServiceTime | None:
        """Estimates the service time of a request dispatched now; None if nothing is known."""
        ...


class Forecast:
    """Predicts from ended requests and the fleet's reports. Implements `ServiceEstimator`."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._output_tokens = {lane: RunningMean() for lane in Lane}  # of one sequence
        self._residence_s = RunningMean()
        self._cost = RunningMean()
        self._uncached_share = RunningMean()  # of a prompt's tokens
        self._token_s = RunningMean()  # between two output tokens
        self.drain = DrainRate()  # weighted tokens per second
        self.fleet: FleetState | None = None

    @property
    def uncached_share(self) -> float:
        return 1.0 if self._uncached_share.value is None else self._uncached_share.value

    def output_tokens(self, lane: Lane, max_tokens: int) -> int:
        """Returns the expected output of one sequence."""
        mean = self._output_tokens[lane].value
        return min(max_tokens, _PRIOR_OUTPUT_TOKENS if mean is None else int(mean) + 1)

    def trusted_output_tokens(self, lane: Lane, max_tokens: int, trust: float) -> int:
        """Returns the expected output of one sequence scaled by `trust` in [0, 1], and at least one token. An unknown
        output counts as one token.
        """
        mean = self._output_tokens[lane].value or 0.0
        return min(max_tokens, int(trust * mean) + 1)

    def learn(self, request: AdmissionRequest, cost: float, sent_s: float, used: RequestUsage, now_s: float) -> None:
        """Learns from a request that ran to its end."""
        per_sequence = used.output_tokens / request.num_sequences
        self._output_tokens[request.lane].add(per_sequence)
        self._cost.add(cost / request.num_sequences)
        self._residence_s.add(now_s - sent_s)
        # Requests dispatched together end together: over a shorter window the rate would follow these bursts.
        self.drain.window_s = max(_WINDOW_S, 2.0 * (self._residence_s.value or 0.0))
        self._uncached_share.add(1.0 - min(1.0, used.cached_tokens / max(1, request.prompt_tokens)))
        if used.decode_s is not None and per_sequence > 1:
            self._token_s.add(used.decode_s / (per_sequence - 1))

    def service(self, prompt_tokens: int, output_tokens: int) -> ServiceTime | None:
        first_token_s = self._first_token_s(prompt_tokens)
        token_s = self._token_s.value
        if token_s is None and self.fleet is not None:
            token_s = self.fleet.step_s
        if first_token_s is None and token_s is None:
            return None
        decode_s = max(0, output_tokens - 1) * (token_s or 0.0)
        return ServiceTime(first_token_s or 0.0, (first_token_s or 0.0) + decode_s)

    def _first_token_s(self, prompt_tokens: int) -> float | None:
        fleet = self.fleet
        if fleet is None or not fleet.prefill_tokens_per_s:
            return None
        uncached = prompt_tokens * (self._uncached_share.value or 0.0)
        alone_s = uncached * fleet.num_computing / fleet.prefill_tokens_per_s
        return alone_s + (fleet.queued_prefill_tokens or 0) / fleet.prefill_tokens_per_s

    def drain_per_s(self, now_s: float) -> float | None:
        """Returns the measured drain rate, or else an estimate from decode slots and a request's mean time there."""
        measured = self.drain.per_s(now_s)
        return self._by_slots() if measured is None else measured

    def fastest_per_s(self, now_s: float) -> float | None:
        """Returns the highest plausible drain rate: the measured rate or the estimate from the decode slots, whichever
        is higher.

        Returns None until both are known. If the workers report no slots, the measured rate suffices.
        """
        measured, by_slots = self.drain.per_s(now_s), self._by_slots()
        if measured is None or (by_slots is None and self.fleet is not None and self.fleet.slots is not None):
            return None
        return max(measured, by_slots or 0.0)

    def request_s(self) -> float | None:
        """Returns a request's mean time at the workers, in seconds."""
        return self._residence_s.value

    def _by_slots(self) -> float | None:
        limit = slot_limit(self.fleet, self._config) if self.fleet else None
        if limit is None or not self._residence_s.value or not self._cost.value:
            return None
        return limit * self._cost.value / self._residence_s.value
