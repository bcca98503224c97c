"""Defines what a placement policy takes and returns: workers as views, a request as a demand, and a choice. Pure data.

Placement, the simulator and every policy share this protocol. A view is reused until its worker's load, in-flight work
or costs change, so whatever depends only on the worker is computed once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from penstock.types import ChunkSpeed, WorkerId, WorkerLoad
from router.routing.costs.cost_model import PRIOR_COSTS, WorkerCosts
from router.routing.costs.inflight import NO_WORK, InflightWork
from router.routing.costs.link_costs import PRIORS, Distance, LinkCost

MAX_CANDIDATES = 3  # prefill workers proposed for one request
DEFAULT_CHUNK_TOKENS = 2048  # for a worker that does not report its own


class LinkPricing(Protocol):
    """The cost of moving pages from a prefill to a decode worker."""

    @property
    def fastest(self) -> LinkCost:
        """A lower bound on every link's cost, in latency and in seconds per byte."""
        ...

    def cost(self, prefill: WorkerId, decode: WorkerId) -> LinkCost: ...

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        """Returns the bytes that the link has yet to move for requests already placed."""
        ...


class UniformLinkPricing:
    """Prices all links alike, as if they were idle."""

    def __init__(self, cost: LinkCost = PRIORS[Distance.UNKNOWN]) -> None:
        self.fastest = cost

    def cost(self, prefill: WorkerId, decode: WorkerId) -> LinkCost:
        return self.fastest

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of one worker as it reports them; 0 or None if it does not."""

    chunk_tokens: int = 0  # prompt tokens in one step
    max_running: int = 0  # sequences
    max_local_tokens: int | None = None  # the longest prompt that it computes itself if there are prefill workers
    max_held_tokens: int = 0  # the most tokens of one sequence whose KV it holds at once
    itl_target_s: float = 0.0  # for the time between tokens, which bounds the chunks beside decoding; 0: none

    def held_tokens(self, num_tokens: int) -> int:
        """Returns how many of a sequence's tokens take pages on the worker."""
        return min(num_tokens, self.max_held_tokens or num_tokens)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that takes requests, as a policy sees it."""

    worker_id: WorkerId
    load: WorkerLoad
    page_size: int  # tokens
    sent: InflightWork = NO_WORK  # work in flight that `load` does not show yet
    costs: WorkerCosts = PRIOR_COSTS
    limits: WorkerLimits = WorkerLimits()
    # Bulk requests at the worker count only by their pages, because they yield to everything else.
    queue_s: float = field(init=False)  # until a prompt that arrives now is started
    num_requests: int = field(init=False)  # decoding or waiting to
    kv_tokens: int = field(init=False)  # in used pages
    token_price: float = field(init=False)  # seconds, summed over all sequences, for each token that a new one decodes

    def __post_init__(self) -> None:
        load, sent = self.load, self.sent
        object.__setattr__(self, "queue_s", self.queued_tokens * self.costs.queued_token_s)
        object.__setattr__(
            self, "num_requests", load.num_running + load.num_waiting - load.num_bulk + sent.num_requests
        )
        used_pages = load.total_pages - load.free_pages + sent.num_pages
        object.__setattr__(self, "kv_tokens", max(0, used_pages) * self.page_size)
        decode = self.costs.decode
        object.__setattr__(self, "token_price", self.step_s + self.num_requests * decode.token_s / 2)

    @property
    def step_s(self) -> float:
        """The time of a decode step with one more sequence than now, without that sequence's context."""
        running = self.num_requests + 1
        if self.limits.max_running:
            running = min(running, self.limits.max_running)
        decode = self.costs.decode
        return decode.fixed_s + running * decode.token_s + self.kv_tokens * decode.context_s

    @property
    def chunk_tokens(self) -> int:
        return self.limits.chunk_tokens or DEFAULT_CHUNK_TOKENS

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the worker computes before those of a prompt that arrives now."""
        return self.load.queued_prefill_tokens - self.load.queued_bulk_tokens + self.sent.prefill_tokens

    @property
    def chunks(self) -> ChunkSpeed:
        """The costs of chunks beside the worker's decoding: reported, or else derived from its steps with prompts."""
        if self.load.chunks.step_tokens:
            return self.load.chunks
        cost = self.costs.prefill
        return ChunkSpeed(self.chunk_tokens, 0.0, cost.fixed_s, cost.token_s, cost.context_s)


@dataclass(frozen=True, slots=True)
class PullOffer:
    """The worker that holds most of a prompt, or the shared store; workers may pull its pages instead of computing
    them.
    """

    source: WorkerId  # or SHARED_STORE
    tokens: int  # the prompt's leading tokens on the source's device, or in the store
    cost: Callable[[WorkerId, WorkerId], LinkCost]  # of a pull, by source and by the worker that pulls


class PlannedPull(NamedTuple):
    """The part of a prompt that a worker would pull before it computes the rest."""

    source: WorkerId
    tokens: int  # leading tokens of the prompt at the source
    pull_s: float
    compute_s: float  # what computing the pulled tokens would take


NOTHING_CACHED: Mapping[WorkerId, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PlacementDemand:
    """The needs of a request, and what is known about its prompt."""

    num_tokens: int  # that need KV: the prompt and the tokens already emitted
    token_bytes: float  # of KV, for each token
    # Leading tokens whose pages a worker holds on any tier, and how many of these it must copy back to its device.
    cached_tokens: Mapping[WorkerId, int] = field(default_factory=lambda: NOTHING_CACHED)
    host_tokens: Mapping[WorkerId, int] = field(default_factory=lambda: NOTHING_CACHED)
    # The part of `cached_tokens` that the worker has yet to compute for its pending prompts.
    pending_tokens: Mapping[WorkerId, int] = field(default_factory=lambda: NOTHING_CACHED)
    links: LinkPricing = field(default_factory=UniformLinkPricing)
    output_tokens: float = 128.0  # expected
    session: str = ""  # requests of one session prefer one pair of workers
    prefix: bytes = b""  # identifies the beginning of the prompt; empty if the prompt is shorter than a page
    replicate: bool = False  # the prefix is requested so often that another worker should hold it
    explain: bool = False  # the choice lists the pairs considered
    pull: PullOffer | None = None
    adapter: str = ""  # revision; empty: the base model
    adapter_sent: frozenset[WorkerId] = frozenset()  # workers that are loading it but do not report it yet

    def uncached_on(self, worker_id: WorkerId) -> int:
        """Returns the tokens that the worker must compute: at least the last one, whose logits are always needed."""
        return max(1, self.num_tokens - self.cached_tokens.get(worker_id, 0))


class PrefillEstimate(NamedTuple):
    worker_id: WorkerId
    queue_s: float
    prefill_s: float
    cached_tokens: int = 0  # of the prompt, by the worker
    pull: PlannedPull | None = None  # included in the times, but not in `cached_tokens`

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s


class PairScore(NamedTuple):
    """The estimated cost of one pair by stage, in seconds. The client waits for the first four stages."""

    prefill: WorkerId | None  # None: the decode worker computes the prompt
    decode: WorkerId
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float  # until the decode worker has pages and a slot
    decode_s: float  # to decode this request's own tokens
    harm_s: float  # the summed delay of all other sequences on the decode worker
    bonus_s: float  # already subtracted, for the session's workers and for copies of the prefix
    total_s: float  # the cost that the policy compares, which may weight the stages
    prefill_cached_tokens: int
    decode_cached_tokens: int
    pull: PlannedPull | None = None  # by the worker that computes the prompt; its wait is part of `queue_s`

    @property
    def first_token_s(self) -> float:
        return self.queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class PairChoice:
    """A policy's answer: the decode worker, and the prefill workers to try in order.

    A decode worker that gets prefill workers may still compute the prompt itself, or a part of it.
    """

    decode: WorkerId
    prefill: tuple[PrefillEstimate, ...]  # best first; empty: the decode worker computes the prompt
    uncached_tokens: int  # that the worker chosen to compute the prompt has to compute
    score: PairScore  # of the chosen pair
    considered: tuple[PairScore, ...] = ()  # with `explain`: the cheapest pairs, cheapest first
    decode_pull: PlannedPull | None = None  # what the decode worker pulls if it computes the prompt itself


class PlacementPolicy(Protocol):
    def choose(
        self, demand: PlacementDemand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> PairChoice:
        """Chooses a pair. `decode` is not empty, and every decode worker can take every prefill worker's pages."""
        ...
