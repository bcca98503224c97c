"""Schedules drafts: as recorded, as a Poisson process, in bursts, or whenever a closed loop has a free slot."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.bench.workloads.plan import Chain, Draft, LoadPlan, LoadRequest, Source
from penstock.errors import InvalidInput
from penstock.types import Lane


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The times at which requests arrive. Exactly one of `rate`, `speed` and `concurrency` is set."""

    rate: float | None = None  # requests/s, at random times
    cv: float = 1.0  # coefficient of variation of interarrival times: 1 is Poisson, more is bursty
    speed: float | None = None  # replays recorded times this many times as fast
    concurrency: int | None = None  # a closed loop with this many clients

    def __post_init__(self) -> None:
        given = {"rate": self.rate, "speed": self.speed, "concurrency": self.concurrency}
        for name, value in given.items():
            if value is not None and not value > 0:
                raise InvalidInput(name, f"is {value:g}; give a number above 0")
        if sum(value is not None for value in given.values()) != 1:
            raise InvalidInput("arrivals", f"need exactly one of rate, speed and concurrency, not {given}")
        if not 0 < self.cv <= 20:
            raise InvalidInput("burstiness", f"is {self.cv:g}; give a coefficient of variation above 0 and up to 20")

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s" + (f", CV {self.cv:g}" if self.cv != 1 else "")
        if self.speed is not None:
            return "recorded times" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Extras:
    """Options that apply to the drafts of any source."""

    lanes: Mapping[Lane, float] | None = None  # the shares by which requests without a lane get one
    cancel_share: float = 0.0  # share of requests whose clients disconnect
    cancel_after: int = 4  # number of tokens after which they disconnect


def arrival_times(count: int, rate: float, cv: float, rng: random.Random) -> list[float]:
    """Returns arrival times from 0 on. Their gaps have the mean 1 / rate and the coefficient of variation `cv`.

    Gaps follow a gamma distribution, which is the exponential one for cv = 1 (BurstGPT, https://arxiv.org/abs/2401.17644,
    fits recorded traffic with it).
    """
    shape = 1 / cv**2
    times, now_s = [], 0.0
    for _ in range(count):
        times.append(now_s)
        now_s += rng.gammavariate(shape, 1 / (rate * shape))
    return times


def schedule(source: Source, arrivals: Arrivals, extras: Extras, seed: int) -> LoadPlan:
    """Returns the source's drafts as chains by due time."""
    chains = _conversations(source.drafts)
    if arrivals.rate is not None:
        # Conversations start at random times, often enough that requests arrive at the rate.
        starts_per_s = arrivals.rate * len(chains) / max(1, len(source.drafts))
        dues = arrival_times(len(chains), starts_per_s, arrivals.cv, random.Random(f"{seed}/arrivals"))
    elif arrivals.speed is not None:
        dues = [chain[0].arrival_s / arrivals.speed for chain in chains]
    else:
        dues = [0.0] * len(chains)
    rng, number, scheduled = random.Random(f"{seed}/extras"), 0, []
    for due_s, chain in zip(dues, chains, strict=True):
        planned = _planned(chain, number, source.gaps_are_pauses, arrivals.speed or 1.0)
        scheduled.append(Chain(due_s, tuple(_with_extras(request, extras, rng) for request in planned)))
        number += len(planned)
    return LoadPlan(tuple(sorted(scheduled, key=lambda chain: chain.due_s)))


def _conversations(drafts: Sequence[Draft]) -> list[list[Draft]]:
    """Groups the drafts of a conversation, in the order of first arrivals."""
    open_chains: dict[str, list[Draft]] = {}
    chains = []
    for draft in sorted(drafts, key=lambda draft: draft.arrival_s):
        chain = open_chains.get(draft.conversation) if draft.conversation else None
        if chain is None:
            chain = []
            chains.append(chain)
            if draft.conversation:
                open_chains[draft.conversation] = chain
        chain.append(draft)
    return chains


def _planned(chain: Sequence[Draft], first: int, gaps_are_pauses: bool, speed: float) -> list[LoadRequest]:
    planned, before_s = [], chain[0].arrival_s
    for number, draft in enumerate(chain, first):
        wait_s = (draft.arrival_s - before_s) / speed
        before_s = draft.arrival_s
        request = LoadRequest(number, draft.prompt, draft.num_output_tokens, lane=draft.lane)
        planned.append(replace(request, pause_s=wait_s) if gaps_are_pauses else replace(request, gap_s=wait_s))
    return planned


def _with_extras(request: LoadRequest, extras: Extras, rng: random.Random) -> LoadRequest:
    lane, cancel_after = request.lane, None
    # Both are sampled for every request, so that neither option affects the other.
    lane_at, cancel_at = rng.random(), rng.random()
    if lane is None and extras.lanes:
        lane = _pick(extras.lanes, lane_at)
    if cancel_at < extras.cancel_share:
        cancel_after = extras.cancel_after
    return replace(request, lane=lane, cancel_after=cancel_after)


def _pick(shares: Mapping[Lane, float], at: float) -> Lane:
    left = at * sum(shares.values())
    for lane, share in shares.items():
        left -= share
        if left < 0:
            return lane
    return list(shares)[-1]
