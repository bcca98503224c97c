"""The nouns that every plane shares: identities, sampling parameters, finish reasons.

Plain frozen data without I/O. The wire forms are in `proto/penstock/v1`, the conversions in `penstock.wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)  # one incarnation of a worker process
TransferId = NewType("TransferId", str)
PageId = NewType("PageId", int)  # index of a page in one worker's pool
PageHash = NewType("PageHash", bytes)  # 16 bytes, see penstock.page_hash
TokenId = int


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Lane(StrEnum):
    """What a request competes with; earlier members go first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens, every default resolved. Validated by `penstock.sampling.resolve`, not here."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0  # uint64; the draw at a position depends on (seed, position) alone
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probabilities of a drawn token and of the likeliest ones, before penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class TransferKey:
    """One attempt to move one request's pages between two incarnations. Minted by the decode worker."""

    transfer_id: TransferId
    sender_epoch: Epoch
    receiver_epoch: Epoch


OLD_COHORT, NEW_COHORT = "", "new"  # of members; without an upgrade all are in the first


@dataclass(frozen=True, slots=True)
class Member:
    """One worker incarnation that takes work."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: str  # host:port of its gRPC server
    cohort: str = ""  # NEW_COHORT while an upgrade proves it beside the old workers


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A worker's prefix cache, in pages: counts since the worker started, and what its lower tiers hold now."""

    queries: int = 0  # pages looked up
    device_hits: int = 0  # of these
    host_hits: int = 0  # copied back from host memory
    disk_hits: int = 0  # read back from disk
    evictions: int = 0  # from the device
    spoiled_pages: int = 0  # that did not read back from disk as they were written
    host_pages: int = 0
    total_host_pages: int = 0
    disk_pages: int = 0
    total_disk_pages: int = 0

    @property
    def num_hits(self) -> int:
        return self.device_hits + self.host_hits + self.disk_hits


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """What became of a worker's requests since it started."""

    ended: int = 0
    failed: int = 0  # by a fault of the worker
    first_token_s: float = 0.0  # all times are sums over those that ended
    decode_s: float = 0.0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepTotals:
    """A worker's steps of one kind since it started: the difference of two reports is what happened between them."""

    steps: int = 0
    tokens: int = 0  # computed
    contexts: float = 0.0  # for each of them, the tokens before it
    seconds: float = 0.0

    def plus(self, tokens: int, contexts: float, seconds: float) -> StepTotals:
        """One step more."""
        return StepTotals(self.steps + 1, self.tokens + tokens, self.contexts + contexts, self.seconds + seconds)

    def with_more(self, more: StepTotals) -> StepTotals:
        return StepTotals(
            self.steps + more.steps,
            self.tokens + more.tokens,
            self.contexts + more.contexts,
            self.seconds + more.seconds,
        )

    def since(self, before: StepTotals) -> StepTotals:
        return StepTotals(
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.contexts - before.contexts,
            self.seconds - before.seconds,
        )


@dataclass(frozen=True, slots=True)
class Labels:
    """Where a worker stands; empty: not known."""

    host: str = ""
    rack: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of itself with every event batch."""

    num_running: int = 0
    num_waiting: int = 0
    free_pages: int = 0  # free or evictable
    total_pages: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0  # 0: not measured yet
    step_s: float = 0.0
    cache: CacheStats = CacheStats()
    prefill_steps: StepTotals = StepTotals()  # in which prompts were computed, perhaps beside decoding
    decode_steps: StepTotals = StepTotals()  # in which each sequence got one token and nothing else was done
    num_open: int = 0  # requests held, whatever their state
    requests: RequestTotals = RequestTotals()
    leaving: bool = False  # its process was told to end: it wants no new work


class CachedPage(NamedTuple):
    """A page of a prefix cache and its place in the chain: all that another worker's cache needs to find it."""

    page_hash: PageHash
    parent: PageHash | None  # None: a prompt's first
    page: PageId


@dataclass(frozen=True, slots=True)
class HandoverTarget:
    """A worker that cached pages of another one may go to."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    max_pages: int
