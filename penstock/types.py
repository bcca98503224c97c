"""The types that all planes share: identities, sampling parameters, members, loads.

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


_EPOCH_BITS = 57  # at random: a thousand workers that start share an epoch once in 3e11 times
RANK_BITS = 6  # left to a worker's ranks, which count on from its epoch


def new_epoch() -> Epoch:
    """Returns the epoch of a new incarnation, below 2**63. No clock is asked: one that steps back, stands still or is
    restored from a snapshot would repeat itself."""
    return Epoch((secrets.randbelow((1 << _EPOCH_BITS) - 1) + 1) << RANK_BITS)


class WorkerEnd(StrEnum):
    """The way a worker's life ended: a word for each planned end, and for the unplanned ones."""

    DRAINED = "drained"  # by an operator
    SCALED_DOWN = "scaled down"
    FLIPPED = "flipped"  # its process serves in the other role
    UPGRADED = "upgraded"
    ROLLED_BACK = "rolled back"  # a new worker of an upgrade that failed
    RELOCATED = "relocated"  # its node goes
    TERMINATED = "terminated"  # its process was asked to end
    STOPPED = "stopped"  # with the deployment
    DIED = "died"  # lost: its process crashed or was killed
    HUNG = "hung"  # lost: its process gave no sign of life any more
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
    """The rule that the text of an output must match; `proto/penstock/v1/common.proto` says what each kind's source
    is."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of sampling, with every default resolved. Validated by `router.api.sampling_fields.resolve`."""

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
    seed: int = 0  # uint64; the token sampled at a position depends on (seed, position) and the distribution alone
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: none of the prompt
    allowed_token_ids: tuple[int, ...] = ()  # if any, only these and those that end the output are sampled
    bad_words: tuple[str, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # the tokens of `bad_words`, which the output never holds
    grammar: Grammar | None = None
    include_stop: bool = False  # the text of an output ends with the stop string that ended it
    keep_special_tokens: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_every_token(self) -> bool:
        """Whether the logits of every token are edited before it is sampled."""
        return self.grammar is not None or self.edits_beside_grammar

    @property
    def edits_beside_grammar(self) -> bool:
        """Whether they are edited by more than a grammar."""
        return bool(self.has_penalties or self.logit_bias or self.allowed_token_ids or self.bad_sequences)


class SamplingOptions(TypedDict, total=False):
    """The client's keyword arguments for sampling. An option left out takes the model's default.

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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probabilities of a sampled token and of the likeliest ones, before penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class TransferKey:
    """An attempt to move one request's pages between two incarnations. Minted by the decode worker."""

    transfer_id: TransferId
    sender_epoch: Epoch
    receiver_epoch: Epoch


OLD_COHORT, NEW_COHORT = "", "new"  # of members; all are in the first unless an upgrade is in flight


@dataclass(frozen=True, slots=True)
class Member:
    """A worker incarnation that takes work."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: str  # host:port of its gRPC server
    cohort: str = ""  # NEW_COHORT while an upgrade tries it beside the old workers


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The prefix cache of a worker, in pages: counts since its start, and what its lower tiers hold now."""

    queries: int = 0  # pages looked up
    device_hits: int = 0
    host_hits: int = 0  # copied back from host memory
    disk_hits: int = 0  # read back from disk
    evictions: int = 0  # from the device
    spoiled_pages: int = 0  # whose contents on disk had changed
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
    failed: int = 0  # through the worker's fault
    first_token_s: float = 0.0  # this and decode_s are sums over the ended requests
    decode_s: float = 0.0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The steps of one kind since a worker's start. The difference of two reports describes the time between them."""

    steps: int = 0
    tokens: int = 0  # computed
    contexts: float = 0.0  # sum over these tokens of the number of tokens before each
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
        """Returns the difference to an earlier report. Written out: `dataclasses.astuple` costs ten times as much."""
        return StepTotals(
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.contexts - before.contexts,
            self.seconds - before.seconds,
        )


@dataclass(frozen=True, slots=True)
class Labels:
    """The location of a worker; empty strings are unknown."""

    host: str = ""
    rack: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's report with every batch of events."""

    num_running: int = 0
    num_waiting: int = 0
    free_pages: int = 0  # free or evictable
    total_pages: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0  # 0: not measured yet
    step_s: float = 0.0
    cache: CacheStats = CacheStats()
    prefill_steps: StepTotals = StepTotals()  # steps that computed chunks of prompts, alone or beside decoding
    decode_steps: StepTotals = StepTotals()  # steps that computed one token for each sequence and nothing else
    num_open: int = 0  # requests held, in any state
    requests: RequestTotals = RequestTotals()
    leaving: bool = False  # its process is about to end and takes no new work
    metrics: Mapping[str, float] = field(default_factory=dict)  # by name (penstock.worker_metrics)
    adapters: tuple[str, ...] = ()  # revisions of those that are loaded
    adapter_load_s: float = 0.0  # recent mean of the time to load one; 0: not known yet


class CachedPage(NamedTuple):
    """A page of a prefix cache and its place in the chain, which identify it to any other cache."""

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
