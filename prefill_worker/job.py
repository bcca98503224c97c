"""Defines a request's prefill as its worker holds it, and the messages that it sends to the receiver of its pages.

These messages count the receiver's pages, whose size may differ from this worker's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.step.sequence import SampledToken, Sequence
from kv_transfer.layout.reshard import ReshardPlan
from kv_transfer.session.lease import Lease
from penstock.errors import PenstockError
from penstock.kv.kv_hints import HintAnswer
from penstock.types import PageHash, PageId, TransferKey
from penstock.v1 import common_pb2
from worker.pull.policy import PrefixSource


@dataclass(frozen=True, slots=True)
class ReservePages:
    num_pages: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: SampledToken
    queue_s: float
    prefill_s: float
    cached_tokens: int
    pull: common_pb2.Pull | None = None  # record of what was pulled for the prompt
    hints: tuple[HintAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class Pushed:
    """The manifest of a transfer: what the receiver must hold once every page has landed."""

    num_tokens: int
    page_hashes: tuple[PageHash, ...]
    num_pages: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Shows that the job is alive, so that its receiver does not give it up."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The last message: the transfer's last write is over."""

    error: PenstockError | None = None


PrefillOutcome = ReservePages | FirstToken | Pushed | Heartbeat | Closed


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A request's prefill and its transfer. Page counts refer to the receiver's pages."""

    key: TransferKey
    sequence: Sequence
    emit: Callable[[PrefillOutcome], None]  # called on the step loop
    submitted_s: float
    prefix_source: PrefixSource | None = None  # a worker to pull from
    pull: common_pb2.Pull | None = None  # the record of what was pulled, complete once the prompt is computed
    lease: Lease | None = None  # the receiver's lease; set on submission
    plan: ReshardPlan | None = None  # maps this worker's pages to the receiver's; set on submission
    started_s: float = 0.0
    cached_tokens: int = 0  # tokens that were not computed, as far as it has got
    num_computed_tokens: int = 0
    num_pages_held: int = 0  # leading pages of the prompt that the receiver has cached
    destination: list[PageId] | None = None
    num_pages_pushed: int = 0  # leading pages of the prompt, including those held
    computed: bool = False
    error: PenstockError | None = None
    checksums: list[int] = field(default_factory=list)

    @property
    def page_size(self) -> int:
        """The number of tokens in one of the receiver's pages."""
        assert self.plan is not None
        return self.plan.target.page_size

    @property
    def num_pages(self) -> int:
        """The number of pages that the prompt takes at the receiver."""
        return -(-len(self.sequence.token_ids) // self.page_size)

    def num_ready(self, num_computed_tokens: int) -> int:
        """Returns how many of these pages are complete once that many tokens are computed."""
        if num_computed_tokens >= len(self.sequence.token_ids):
            return self.num_pages
        return num_computed_tokens // self.page_size
