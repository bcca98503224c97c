"""What a request will take once it is sent, and how fast the queue moves. Pure: time is passed in.

An estimate that rests on nothing is None, and refuses nobody: a request is turned away on evidence only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.admission_config import AdmissionConfig
from penstock.types import Lane
from router.capacity import FleetState, slot_limit
from router.drain import DrainRate, Mean
from router.verdicts import Ask, Used

_PRIOR_OUTPUT_TOKENS = 256  # of one sequence: what chats come to, and what is charged before any has ended


@dataclass(frozen=True, slots=True)
class Service:
    """Seconds at the workers. Parts that nobody knows count nothing."""

    first_token_s: float
    total_s: float


class Estimator(Protocol):
    def service(self, prompt_tokens: int, output_tokens: int) -> Service | None:
        """Of a request that is sent now. None where nothing is known."""
        ...


class Forecast:
    """Owns what ended requests have taught; an `Estimator` from that and the fleet's reports."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._output_tokens = {lane: Mean() for lane in Lane}  # of one sequence
        self._residence_s = Mean()
        self._cost = Mean()
        self._uncached_share = Mean()  # of a prompt's tokens
        self._token_s = Mean()  # from one output token to the next
        self.drain = DrainRate()  # of weighted tokens
        self.fleet: FleetState | None = None

    @property
    def uncached_share(self) -> float:
        return 1.0 if self._uncached_share.value is None else self._uncached_share.value

    def output_tokens(self, lane: Lane, max_tokens: int) -> int:
        """That one sequence will have."""
        mean = self._output_tokens[lane].value
        return min(max_tokens, _PRIOR_OUTPUT_TOKENS if mean is None else int(mean) + 1)

    def likely_output(self, lane: Lane, max_tokens: int, trust: float) -> int:
        """Fewer, the less the mean is to be trusted: down to one token where it is not, or not known."""
        mean = self._output_tokens[lane].value or 0.0
        return min(max_tokens, int(trust * mean) + 1)

    def learn(self, ask: Ask, cost: float, sent_s: float, used: Used, now_s: float) -> None:
        """A request has ended well."""
        per_sequence = used.output_tokens / ask.num_sequences
        self._output_tokens[ask.lane].add(per_sequence)
        self._cost.add(cost / ask.num_sequences)
        self._residence_s.add(now_s - sent_s)
        self._uncached_share.add(1.0 - min(1.0, used.cached_tokens / max(1, ask.prompt_tokens)))
        if used.decode_s is not None and per_sequence > 1:
            self._token_s.add(used.decode_s / (per_sequence - 1))

    def service(self, prompt_tokens: int, output_tokens: int) -> Service | None:
        first_token_s = self._first_token_s(prompt_tokens)
        token_s = self._token_s.value
        if token_s is None and self.fleet is not None:
            token_s = self.fleet.step_s
        if first_token_s is None and token_s is None:
            return None
        decode_s = max(0, output_tokens - 1) * (token_s or 0.0)
        return Service(first_token_s or 0.0, (first_token_s or 0.0) + decode_s)

    def _first_token_s(self, prompt_tokens: int) -> float | None:
        fleet = self.fleet
        if fleet is None or not fleet.prefill_tokens_per_s:
            return None
        uncached = prompt_tokens * (self._uncached_share.value or 0.0)
        alone_s = uncached * fleet.num_computing / fleet.prefill_tokens_per_s
        return alone_s + (fleet.queued_prefill_tokens or 0) / fleet.prefill_tokens_per_s

    def drain_per_s(self, now_s: float) -> float | None:
        """Measured where there was a queue to measure, else what the slots and the usual time in them come to."""
        measured = self.drain.per_s(now_s)
        if measured is not None:
            return measured
        limit = slot_limit(self.fleet, self._config) if self.fleet else None
        if limit is None or not self._residence_s.value or not self._cost.value:
            return None
        return limit * self._cost.value / self._residence_s.value
