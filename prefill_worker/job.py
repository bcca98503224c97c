"""One request's prefill as its worker holds it, and what is said of it to the receiver of its pages.

What is said counts in the receiver's pages, which may be of another size than ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.sequence import SampledToken, Sequence
from kv_transfer.lease import Lease
from kv_transfer.reshard import Plan
from penstock.errors import PenstockError
from penstock.types import PageHash, PageId, TransferKey


@dataclass(frozen=True, slots=True)
class ReservePages:
    num_pages: int  # of the receiver's, as everything below


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: SampledToken
    queue_s: float
    prefill_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """The manifest of a transfer: what the receiver must hold once every page has landed."""

    num_tokens: int
    page_hashes: tuple[PageHash, ...]
    num_pages: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The job is in hand: its receiver need not give it up."""


@dataclass(frozen=True, slots=True)
class Closed:
    error: PenstockError | None = None


PrefillOutcome = ReservePages | FirstToken | Pushed | Heartbeat | Closed


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One request's prefill and its transfer."""

    key: TransferKey
    sequence: Sequence
    emit: Callable[[PrefillOutcome], None]  # called on the step loop
    submitted_s: float
    lease: Lease | None = None  # of the receiver; set on submission
    plan: Plan | None = None  # from our pages to the receiver's; set on submission
    started_s: float = 0.0
    cached_tokens: int = 0
    num_pages_held: int = 0  # leading pages of the prompt that the receiver has; its pages, here and below
    destination: list[PageId] | None = None
    num_pages_pushed: int = 0  # of the prompt's pages, those held included
    computed: bool = False
    error: PenstockError | None = None
    checksums: list[int] = field(default_factory=list)

    @property
    def page_size(self) -> int:
        """Of the receiver's pages."""
        assert self.plan is not None
        return self.plan.target.page_size

    @property
    def num_pages(self) -> int:
        """That the prompt takes at the receiver."""
        return -(-len(self.sequence.token_ids) // self.page_size)

    def num_ready(self, num_computed_tokens: int) -> int:
        """How many of them are complete once so many tokens are computed."""
        if num_computed_tokens >= len(self.sequence.token_ids):
            return self.num_pages
        return num_computed_tokens // self.page_size
