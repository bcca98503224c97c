"""Defines a request as its decode worker holds it, and what the worker sends back: tokens, an end, and the timing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from decode_worker.prefill.client import PrefillCandidate
from decode_worker.prefill.placement_policy import PrefillDecision, PricedPlace
from engine.step.prompt_scores import PromptScores
from engine.step.sequence import SampledToken, Sequence
from penstock import wire
from penstock.errors import PenstockError
from penstock.types import FinishReason, TokenLogprob, TransferKey, WorkerId
from penstock.v1 import common_pb2, worker_pb2
from worker.hints.hint_follower import HintFollower
from worker.pull.policy import PrefixSource

_MAX_PREEMPTIONS = 16  # preemptions whose times are kept


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """A sequence's share of a step: a token, an end or both, or an event of its migration or its prefill."""

    stream_id: int
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: PenstockError | None = None
    timing: common_pb2.Timing | None = None  # with finish_reason
    migrated: worker_pb2.Migrated | None = None  # the last delta here
    prefill: worker_pb2.PrefillOutcome | None = None
    prompt_logprobs: tuple[bytes, ...] = ()  # with the first token: encoded `StepDelta`s that hold them


@dataclass(slots=True, eq=False)
class PlainTokens:
    """A token for each of many sequences, and nothing else: most of a step's output. Never empty."""

    stream_ids: np.ndarray  # uint64
    token_ids: np.ndarray  # int64, one for each stream


Delta = TokenDelta | PlainTokens


class DeltaStream(Protocol):
    """Carries deltas to the reader of its requests. The object identifies the reader; its tokens are sent together."""

    def send(self, deltas: list[Delta]) -> None:
        """Sends deltas. Called on the step loop at most once per step; must not block."""
        ...


def split_plain(deltas: Iterable[Delta]) -> Iterator[TokenDelta]:
    """Yields the same deltas, with plain tokens split into one delta per sequence."""
    for delta in deltas:
        if isinstance(delta, TokenDelta):
            yield delta
        else:
            for stream_id, token_id in zip(delta.stream_ids.tolist(), delta.token_ids.tolist(), strict=True):
                yield TokenDelta(stream_id, SampledToken(token_id))


def _encode_scores(scores: PromptScores) -> bytes:
    """Returns an encoded `StepDelta`. Parts of a message may be encoded one by one as they become known."""
    message = worker_pb2.StepDelta()
    for token_ids, logprobs in zip(scores.token_ids_SA.tolist(), scores.logprobs_SA.tolist(), strict=True):
        top = tuple(zip(token_ids[1:], logprobs[1:], strict=True))
        message.prompt_logprobs.append(wire.logprob_to_wire(TokenLogprob(token_ids[0], logprobs[0], top)))
    return message.SerializeToString()


@dataclass(frozen=True, slots=True)
class RemotePart:
    """The first part of a prompt, computed by a prefill worker."""

    computed_s: float  # when this worker learned of it
    queue_s: float
    prefill_s: float


@dataclass(slots=True)
class StageTimes:
    """The times of a request's stages, in monotonic seconds, 0 until they come; `queue_s` and `prefill_s` are
    durations.
    """

    submitted_s: float = 0.0
    placed_s: float = 0.0  # last placement
    started_s: float = 0.0  # first step that computed it here
    first_token_s: float = 0.0
    reserved_s: float = 0.0  # pages for a remote prefill were reserved here
    landed_s: float = 0.0
    decode_queue_s: float = (
        0.0  # a duration: waiting for pages here, and from the last page's landing to the first step
    )
    queue_s: float = 0.0
    prefill_s: float = 0.0
    part: RemotePart | None = None  # only for a split prompt
    preempted_s: list[float] = field(default_factory=list)  # times of the first few preemptions

    def on_started(self, now_s: float) -> None:
        """Records a step that computes the sequence; only the first one counts."""
        if not self.started_s:
            self.started_s = now_s
            if self.landed_s and self.part is None:  # for a split prompt, `queue_s` includes the wait
                self.decode_queue_s = self.room_wait_s + max(0.0, now_s - max(self.landed_s, self.first_token_s))

    def on_preempted(self, now_s: float) -> None:
        if len(self.preempted_s) < _MAX_PREEMPTIONS:
            self.preempted_s.append(now_s)

    def on_sampled(self, now_s: float) -> None:
        """Records a token that this worker sampled; only the first one counts."""
        if not self.first_token_s:
            self.first_token_s = now_s
            self.queue_s = self.started_s - self.submitted_s
            self.prefill_s = now_s - self.started_s
            if self.part is not None:
                self.queue_s = self.part.queue_s + self.started_s - self.landed_s
                self.prefill_s += self.part.prefill_s

    @property
    def exposed_s(self) -> float:
        """Returns the part of the transfer that overlaps neither the prefill nor the wait for pages here."""
        return max(0.0, self.landed_s - max(self._computed_s, self.reserved_s)) if self.landed_s else 0.0

    @property
    def room_wait_s(self) -> float:
        """Returns how long the computed prompt waited for pages and a place here before its transfer could go on."""
        return max(0.0, self.reserved_s - self._computed_s)

    @property
    def _computed_s(self) -> float:
        """When the prefill worker had computed its part."""
        return self.part.computed_s if self.part else self.first_token_s

    def on_remote_token(self, queue_s: float, prefill_s: float, now_s: float) -> None:
        """Records a token that a prefill worker sampled. Only the first one counts, since an attempt after a failure
        brings a later token.
        """
        if not self.first_token_s:
            self.first_token_s = now_s
            self.queue_s = queue_s
            self.prefill_s = prefill_s


class PendingMigration(Protocol):
    """Answers the source once a migrating sequence's pages are here or will not come."""

    def confirm(self) -> None: ...

    def refuse(self, error: PenstockError) -> None: ...


@dataclass(frozen=True, slots=True)
class HedgeAttempt:
    """A second attempt at a remote prefill, started because the first had not begun in time."""

    key: TransferKey
    worker_id: WorkerId


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request and the state of its sequence. Owned by `DecodeWorker` on the step loop."""

    stream_id: int
    sequence: Sequence
    stream: DeltaStream  # the stream of its router
    candidates: deque[PrefillCandidate]
    deadline_s: float  # monotonic; bounds every call for the request
    times: StageTimes = field(default_factory=StageTimes)
    transfer: TransferKey | None = None  # the attempt in flight
    hedge: HedgeAttempt | None = None  # set until one of the two attempts begins
    prefix_source: PrefixSource | None = None  # a worker that this one may pull from
    pull: common_pb2.Pull | None = None  # record of the pull by the worker that computed the prompt
    must_be_remote: bool = False  # the first candidate computes its prompt, whatever that costs
    placed: PricedPlace | None = None  # where its prompt is computed, by the last placement
    prices: list[common_pb2.PrefillPrice] = field(default_factory=list)  # predictions for that place and for others
    prefilled_by: WorkerId | None = None
    cached_tokens: int = 0  # prompt tokens in the prefill worker's cache
    pages_moved: int = 0
    migration: PendingMigration | None = None  # set while the sequence migrates here, until it runs
    num_resumed_tokens: int = 0  # output tokens that a lost worker had computed before the request came here
    num_preemptions: int = 0  # at previous workers, like the two below
    num_migrations: int = 0
    migration_pause_s: float = 0.0
    paused_since_s: float | None = None  # monotonic; set from the migration here to the first token
    hints_followed: bool = False
    hint_answers: list[common_pb2.HintAnswer] = field(default_factory=list)  # of the workers that it has reached so far
    prompt_logprobs: list[bytes] = field(default_factory=list)  # kept until the first token; see `TokenDelta`

    def add_scores(self, scores: PromptScores) -> None:
        """Keeps the scores of a chunk of the prompt. A chunk from the start replaces the scores of an earlier
        computation.
        """
        if scores.first == 1:
            self.prompt_logprobs.clear()
        self.prompt_logprobs.append(_encode_scores(scores))

    def take_prompt_logprobs(self) -> tuple[bytes, ...]:
        """Returns and drops the kept log-probabilities."""
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    def place(self, decision: PrefillDecision, now_s: float) -> None:
        """Records where the prompt is computed from now on."""
        self.placed, self.times.placed_s = decision.chosen, now_s
        self.times.part, self.times.reserved_s, self.times.landed_s = None, 0.0, 0.0
        self.prices = [_price_to_wire(priced) for priced in (decision.chosen, *decision.others)]

    def follow_hints(self, hints: HintFollower | None, num_found_tokens: int) -> None:
        """Follows its hints, once, while it holds its pages, and keeps the answers."""
        if hints is not None and not self.hints_followed:
            self.hints_followed = True
            self.hint_answers += map(wire.hint_answer_to_wire, hints.follow(self.sequence, num_found_tokens))

    def decoded(self, now_s: float) -> tuple[int, float] | None:
        """Returns the tokens decoded here after the first one, and the seconds they took; None if there are none or the
        sequence has migrated here, since its first token came elsewhere."""
        num_tokens = self.sequence.num_output_tokens - self.num_resumed_tokens - 1
        if num_tokens < 1 or self.num_migrations or not self.times.first_token_s:
            return None
        return num_tokens, now_s - self.times.first_token_s

    def end_pause(self, now_s: float) -> None:
        """Adds an open migration pause to the total, because a token has been sampled."""
        if self.paused_since_s is not None:
            self.migration_pause_s += now_s - self.paused_since_s
            self.paused_since_s = None

    def inherit(self, other: DecodeRequest) -> None:
        """Continues the sequence of `other` under this request's stream and deadline."""
        self.sequence, self.times, self.prices, self.pull = other.sequence, other.times, other.prices, other.pull
        self.prefilled_by, self.cached_tokens, self.pages_moved = (
            other.prefilled_by,
            other.cached_tokens,
            other.pages_moved,
        )
        self.num_preemptions, self.num_migrations = other.num_preemptions, other.num_migrations
        self.migration_pause_s, self.paused_since_s = other.migration_pause_s, other.paused_since_s
        self.hint_answers = other.hint_answers

    def timing(
        self, *, decode_worker: WorkerId, cached_tokens: int, num_preemptions: int, now_s: float
    ) -> common_pb2.Timing:
        """Returns the timing so far. `cached_tokens` and `num_preemptions` are this worker's own counts."""
        times = self.times
        return common_pb2.Timing(
            queue_ms=times.queue_s * 1e3,
            prefill_ms=times.prefill_s * 1e3,
            transfer_ms=times.exposed_s * 1e3,
            first_token_ms=(times.first_token_s - times.submitted_s) * 1e3,
            decode_ms=(now_s - times.first_token_s) * 1e3,
            prefill_worker=self.prefilled_by,
            decode_worker=decode_worker,
            # Counts hits at the worker that computed the prompt; hits at later workers do not count.
            cached_tokens=self.cached_tokens if self.num_migrations else max(self.cached_tokens, cached_tokens),
            pages_moved=self.pages_moved,
            num_preemptions=self.num_preemptions + num_preemptions,
            num_migrations=self.num_migrations,
            migration_pause_ms=self.migration_pause_s * 1e3,
            prefill_cached_tokens=self.cached_tokens,
            decode_cached_tokens=cached_tokens,
            prices=self.prices,
            pull=self.pull,
            hints=self.hint_answers,
            preempted_ms=[(at_s - times.submitted_s) * 1e3 for at_s in times.preempted_s],
            decode_queue_ms=times.decode_queue_s * 1e3,
            decode_first_token_ms=(times.first_token_s - times.placed_s) * 1e3 if times.first_token_s else 0.0,
        )


def _price_to_wire(priced: PricedPlace) -> common_pb2.PrefillPrice:
    return common_pb2.PrefillPrice(
        place=priced.place,
        prefill_worker=priced.option.worker_id if priced.option else "",
        remote_tokens=priced.num_remote,
        first_token_ms=priced.first_token_s * 1e3,
        harm_ms=priced.harm_s * 1e3,
    )
