"""What a policy sees: workers as views, a request as a demand; and what it answers, a choice. Pure data.

The one protocol between the router's shell, the simulator and every policy. A view is made anew when its worker's load,
in-flight work or costs change, and kept until then: what depends on the worker alone is reckoned once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from penstock.types import WorkerId, WorkerLoad
from router.cost_model import PRIOR_COSTS, WorkerCosts
from router.inflight import NO_WORK, Work
from router.topology import PRIORS, Distance, LinkCost

MAX_CANDIDATES = 3
DEFAULT_CHUNK_TOKENS = 2048  # of a worker that does not tell


class Links(Protocol):
    """What moving pages from a prefill to a decode worker costs."""

    @property
    def fastest(self) -> LinkCost:
        """No link is faster, in either respect."""
        ...

    def cost(self, prefill: WorkerId, decode: WorkerId) -> LinkCost: ...

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        """Under way or announced on the link."""
        ...


class EqualLinks:
    """Every link is like every other, and idle."""

    def __init__(self, cost: LinkCost = PRIORS[Distance.UNKNOWN]) -> None:
        self.fastest = cost

    def cost(self, prefill: WorkerId, decode: WorkerId) -> LinkCost:
        return self.fastest

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one worker's configuration, as it describes itself; 0 and None: not told."""

    chunk_tokens: int = 0  # of prompts, in one step
    max_running: int = 0  # sequences
    max_local_tokens: int | None = None  # that a decode worker computes itself where there are prefill workers


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker that takes work, as far as a choice is concerned."""

    worker_id: WorkerId
    load: WorkerLoad
    page_size: int  # tokens
    sent: Work = NO_WORK  # beyond what `load` shows
    costs: WorkerCosts = PRIOR_COSTS
    limits: Limits = Limits()
    queue_s: float = field(init=False)  # until a prompt that comes now is begun
    num_requests: int = field(init=False)  # to decode, waiting ones included
    kv_tokens: int = field(init=False)  # held by them
    token_price: float = field(init=False)  # of one token more decoded here by a new sequence, weighing all who wait
    context_price: float = field(init=False)  # and of each token of its context

    def __post_init__(self) -> None:
        load, sent = self.load, self.sent
        queued = load.queued_prefill_tokens + sent.prefill_tokens
        object.__setattr__(self, "queue_s", queued * self.costs.queued_token_s)
        object.__setattr__(self, "num_requests", load.num_running + load.num_waiting + sent.num_requests)
        used_pages = load.total_pages - load.free_pages + sent.num_pages
        object.__setattr__(self, "kv_tokens", max(0, used_pages) * self.page_size)
        decode = self.costs.decode
        object.__setattr__(self, "token_price", self.step_s + self.num_requests * decode.token_s / 2)
        object.__setattr__(self, "context_price", decode.context_s * (1 + self.num_requests / 2))

    @property
    def step_s(self) -> float:
        """Of decoding with one sequence more than now, its context left out."""
        running = self.num_requests + 1
        if self.limits.max_running:
            running = min(running, self.limits.max_running)
        decode = self.costs.decode
        return decode.fixed_s + running * decode.token_s + self.kv_tokens * decode.context_s

    @property
    def chunk_tokens(self) -> int:
        return self.limits.chunk_tokens or DEFAULT_CHUNK_TOKENS


def _nothing() -> Mapping[WorkerId, int]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for, and what is known of its prompt."""

    num_tokens: int  # to have KV for: prompt, and what was emitted before
    token_bytes: float  # of KV
    # Leading tokens whose pages a worker holds, on whatever tier; of these, those to be copied back from host memory.
    cached_tokens: Mapping[WorkerId, int] = field(default_factory=_nothing)
    host_tokens: Mapping[WorkerId, int] = field(default_factory=_nothing)
    links: Links = field(default_factory=EqualLinks)
    output_tokens: float = 128.0  # expected
    session: str = ""  # requests of one session prefer one pair of workers
    prefix: bytes = b""  # names what the prompt begins with; empty: shorter than a page
    replicate: bool = False  # its prefix is wanted more often than its holders should bear
    explain: bool = False  # the choice shall name what else was considered

    def uncached_on(self, worker_id: WorkerId) -> int:
        """Tokens to compute there. At least the last one: its logits are needed whatever is cached."""
        return max(1, self.num_tokens - self.cached_tokens.get(worker_id, 0))


class PrefillEstimate(NamedTuple):
    worker_id: WorkerId
    queue_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s


class Score(NamedTuple):
    """What one pair is thought to cost, by stage, in seconds. The first four are what a client waits for."""

    prefill: WorkerId | None  # None: the decode worker computes the prompt
    decode: WorkerId
    queue_s: float
    prefill_s: float
    transfer_s: float
    admission_s: float  # until the decode worker has pages and a place
    decode_s: float  # of this request's own tokens
    harm_s: float  # to all the others that decode there, summed
    bonus_s: float  # for the session's worker and for replicas: off the cost
    total_s: float  # what the policy compares; other stages may be weighted in it
    prefill_cached_tokens: int
    decode_cached_tokens: int

    @property
    def first_token_s(self) -> float:
        return self.queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Choice:
    decode: WorkerId
    prefill: tuple[PrefillEstimate, ...]  # best first; empty: the decode worker computes the prompt
    uncached_tokens: int  # on the first of them
    score: Score  # of the pair chosen
    considered: tuple[Score, ...] = ()  # with `explain`: the best, cheapest first


class Policy(Protocol):
    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        """`decode` is not empty; the prefill workers' pages fit each of them."""
        ...
