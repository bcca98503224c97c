"""Defines a request at a decode worker, and the updates that its router gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from decode_worker.prefill.placement_policy import PrefillPlace, PricedPlace
from engine.step.sequence import Sequence
from penstock.errors import PenstockError
from penstock.types import TransferKey, WorkerId
from penstock.v1 import common_pb2
from simulator.request import RequestTokens
from simulator.workers.transfers import PrefillOption
from simulator.world.virtual_time import Timer


@dataclass(frozen=True, slots=True)
class MigratedTo:
    """Names the worker that runs a migrated sequence, and the ticket for its router."""

    worker_id: WorkerId
    ticket: TransferKey


@dataclass(slots=True)
class Delta:
    """An update of one request for its router. `error` and `ended` are final.

    Its tokens follow from the request that they were computed for and the position of the first one.
    """

    stream: int
    number: int = 0  # the request's number
    position: int = 0
    num_tokens: int = 0
    ended: bool = False
    error: PenstockError | None = None
    cached_tokens: int = 0
    computed_by: WorkerId | None = None
    transfer_s: float | None = None  # transfer time after the first token; None if no pages were transferred
    pull: common_pb2.Pull | None = None  # of the prefix, by the worker that computed the prompt
    migrated: MigratedTo | None = None


@dataclass(slots=True, eq=False)
class Submission:
    """A request as a router submits it; `send` takes the deltas of one step."""

    stream: int
    sequence: Sequence
    tokens: RequestTokens  # the tokens of the sequence
    candidates: deque[PrefillOption]
    send: Callable[[list[Delta]], None]
    timeout_s: float
    caller: object  # the link that it arrived on: the request's lease
    has_first: bool = False
    num_sent: int = 0  # tokens sent, prompt included
    cached_tokens: int = 0
    computed_by: WorkerId | None = None
    pull: common_pb2.Pull | None = None
    first_token_s: float = 0.0
    landed_s: float | None = None
    timer: Timer | None = None
    placed: PricedPlace | None = None
    placed_s: float = 0.0
    computed_s: float = 0.0  # time at which a prefill worker had computed the first part of a split prompt

    @property
    def is_split(self) -> bool:
        return self.placed is not None and self.placed.place is PrefillPlace.SPLIT

    @property
    def exposed_s(self) -> float:
        """Returns the part of the transfer that followed the prefill worker's computation."""
        computed_s = self.computed_s if self.is_split else self.first_token_s
        return max(0.0, self.landed_s - computed_s) if self.landed_s is not None else 0.0

    @property
    def num_output(self) -> int:
        return self.sequence.num_output_tokens

    def copy(self, timeout_s: float) -> Submission:
        """Returns the submission that a decode worker sends to the target of a migration."""
        sequence, tokens = self.sequence, self.tokens.copy()
        return Submission(
            self.stream,
            Sequence(
                request_id=sequence.request_id,
                token_ids=tokens.as_list(),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.sampling,
                salt=sequence.salt,
                page_hashes=list(sequence.page_hashes),
            ),
            tokens,
            deque(),
            lambda deltas: None,
            timeout_s,
            caller=None,
            has_first=True,
            num_sent=len(tokens),
            cached_tokens=self.cached_tokens,
            computed_by=self.computed_by,
            pull=self.pull,
        )
