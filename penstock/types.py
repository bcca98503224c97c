"""Defines the types that all planes share: identities, sampling parameters, members, loads.

Plain frozen data without I/O. The wire forms are in `proto/penstock/v1`, the conversions in `penstock.wire`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, NewType, TypedDict

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)  # one incarnation of a worker process or a router; epochs have no order
TransferId = NewType("TransferId", str)
PageId = NewType("PageId", int)  # index of a page in one worker's pool
PageHash = NewType("PageHash", bytes)  # 16 bytes, see penstock.kv.page_hash

SHARED_STORE = WorkerId("shared store")  # the source of pulls from it; no worker has a name with a space

_EPOCH_BITS = 57  # random; two of a thousand workers share an epoch with probability 3e-12
RANK_BITS = 6  # reserved for a worker's ranks, which count up from its epoch


def new_epoch() -> Epoch:
    """Returns the random epoch of a new incarnation, below 2**63. It does not come from the clock, which may step back,
    stand still or be restored from a snapshot, and so repeat an epoch.
    """
    return Epoch((secrets.randbelow((1 << _EPOCH_BITS) - 1) + 1) << RANK_BITS)


class WorkerEnd(StrEnum):
    """The way a worker's life ended, as planned or not."""

    DRAINED = "drained"  # an operator drained it
    SCALED_DOWN = "scaled down"
    FLIPPED = "flipped"  # its process now serves in the other role
    UPGRADED = "upgraded"
    ROLLED_BACK = "rolled back"  # it was a new worker of a failed upgrade
    RELOCATED = "relocated"  # its node goes away
    TERMINATED = "terminated"  # its process was asked to stop
    STOPPED = "stopped"  # the deployment was stopped
    DIED = "died"  # lost: its process crashed or was killed
    HUNG = "hung"  # lost: its process stopped answering
    NOT_STARTED = "not started"  # lost before it was ready
    QUARANTINED = "quarantined"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Lane(StrEnum):
    """The priority of a request; earlier members go first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


class PauseMode(StrEnum):
    """The fate of requests that run while the weights under them are replaced."""

    WAIT = "wait"  # they end first, within a deadline
    ABORT = "abort"  # they fail with an error that names the cause
    KEEP = "keep"  # they continue with the new weights, their KV recomputed


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The rule that an output's text must match; `proto/penstock/v1/common.proto` defines the source of each kind."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with all defaults resolved, validated by `router.api.sampling_fields.resolve`."""

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
    seed: int = 0  # uint64; a sampled token depends only on (seed, position) and the distribution
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: no log-probabilities of the prompt
    allowed_token_ids: tuple[int, ...] = ()  # if given, only these and tokens that end the output are sampled
    bad_words: tuple[str, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # the tokens of `bad_words`, which never appear in the output
    grammar: Grammar | None = None
    include_stop: bool = False  # whether the output's text includes the stop string that ended it
    keep_special_tokens: bool = False
    no_speculation: bool = False  # propose no tokens; false leaves the choice to the worker

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_every_token(self) -> bool:
        """Returns whether the logits of every token are edited before it is sampled."""
        return self.grammar is not None or self.edits_beside_grammar

    @property
    def edits_beside_grammar(self) -> bool:
        """Returns whether the logits are edited by more than a grammar."""
        return bool(self.has_penalties or self.logit_bias or self.allowed_token_ids or self.bad_sequences)


class SamplingOptions(TypedDict, total=False):
    """The client's keyword arguments for sampling. An omitted option takes the model's default.

    The names are those of `SamplingParams`; proto/penstock/v1/common.proto documents them.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    grammar: Grammar
    include_stop: bool
    keep_special_tokens: bool
    no_speculation: bool


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probabilities of a sampled token and of the likeliest ones, before penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class TransferKey:
    """Identifies an attempt to transfer one request's pages between two incarnations. Created by the decode worker."""

    transfer_id: TransferId
    sender_epoch: Epoch
    receiver_epoch: Epoch


OLD_COHORT, NEW_COHORT = "", "new"  # cohorts of members; all are in the first unless an upgrade is in flight


@dataclass(frozen=True, slots=True)
class Member:
    """A worker incarnation that takes work."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: str  # host:port of its gRPC server
    cohort: str = ""  # NEW_COHORT while an upgrade tries it next to the old workers


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A worker's prefix cache, in pages: counts since its start, and what its lower tiers hold now."""

    queries: int = 0  # pages looked up
    device_hits: int = 0
    host_hits: int = 0  # copied back from host memory
    disk_hits: int = 0  # read back from disk
    evictions: int = 0  # pages evicted from the device
    spoiled_pages: int = 0  # pages whose contents on disk had changed
    host_pages: int = 0
    total_host_pages: int = 0
    disk_pages: int = 0
    total_disk_pages: int = 0

    @property
    def num_hits(self) -> int:
        return self.device_hits + self.host_hits + self.disk_hits


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """The outcomes of a worker's requests since its start."""

    ended: int = 0
    failed: int = 0  # failed through the worker's fault
    first_token_s: float = 0.0  # summed over the ended requests, like decode_s
    decode_s: float = 0.0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The steps of one kind since a worker's start. The difference of two reports describes the time between them."""

    steps: int = 0
    tokens: int = 0  # tokens computed
    contexts: float = 0.0  # for each of these tokens the number of tokens before it, summed
    seconds: float = 0.0

    def plus(self, tokens: int, contexts: float, seconds: float) -> StepTotals:
        """Adds one step."""
        return StepTotals(self.steps + 1, self.tokens + tokens, self.contexts + contexts, self.seconds + seconds)

    def with_more(self, more: StepTotals) -> StepTotals:
        """Returns the sum."""
        return StepTotals(
            self.steps + more.steps,
            self.tokens + more.tokens,
            self.contexts + more.contexts,
            self.seconds + more.seconds,
        )

    def since(self, before: StepTotals) -> StepTotals:
        """Returns the difference to an earlier report. The fields are written out, as `dataclasses.astuple` takes ten
        times as long.
        """
        return StepTotals(
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.contexts - before.contexts,
            self.seconds - before.seconds,
        )


@dataclass(frozen=True, slots=True)
class ChunkSpeed:
    """The costs of chunks of prompts beside a worker's present decoding, in seconds."""

    step_tokens: int = 0  # prompt tokens that a step computes at most; 0: nothing is known yet
    step_s: float = 0.0  # a step without chunks
    chunked_s: float = 0.0  # added to every step with chunks
    token_s: float = 0.0  # added by each of their tokens
    pair_s: float = 0.0  # added by each pair of such a token and an earlier one


@dataclass(frozen=True, slots=True)
class Labels:
    """The location of a worker; empty strings mean unknown."""

    host: str = ""
    rack: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's report with every batch of events."""

    num_running: int = 0
    num_waiting: int = 0
    num_bulk: int = 0  # of both, those of the bulk lane, which yield to all others
    free_pages: int = 0  # free or evictable; fewer if `engine.window_share` leaves a smaller share of slots
    bulk_pages: int = 0  # in sequences of the bulk lane; one that several share counts for each
    total_pages: int = 0
    queued_prefill_tokens: int = 0
    queued_bulk_tokens: int = 0  # of these, those of the bulk lane
    prefill_tokens_per_s: float = 0.0  # 0: not measured yet
    step_s: float = 0.0
    cache: CacheStats = CacheStats()
    prefill_steps: StepTotals = StepTotals()  # steps that computed chunks of prompts, with or without decoding
    decode_steps: StepTotals = StepTotals()  # steps that only computed one token for each sequence
    chunks: ChunkSpeed = ChunkSpeed()  # of a decode worker
    num_open: int = 0  # requests held, in any state
    requests: RequestTotals = RequestTotals()
    leaving: bool = False  # its process is about to stop and takes no new work
    metrics: Mapping[str, float] = field(default_factory=dict)  # values by name (penstock.metrics.worker_metrics)
    adapters: tuple[str, ...] = ()  # revisions of the loaded adapters
    adapter_load_s: float = 0.0  # recent mean time to load one; 0: not known yet


class CachedPage(NamedTuple):
    """A page of a prefix cache and its place in the chain, which together identify it to any other cache."""

    page_hash: PageHash
    parent: PageHash | None  # None for a prompt's first page
    page: PageId


@dataclass(frozen=True, slots=True)
class HandoverTarget:
    """A worker that may receive another worker's cached pages."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    max_pages: int
