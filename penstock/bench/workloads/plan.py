"""Defines the requests of a run before they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.bench.traces.record import BlockRuns, TraceRecord
from penstock.types import Lane


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt of known length without text. Equal leading block ids stand for equal leading tokens."""

    runs: BlockRuns
    block_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptMessages:
    """A prompt of chat messages, each with the keys `role` and `content`."""

    messages: tuple[Mapping[str, str], ...]


AnyPrompt = PromptBlocks | PromptMessages | str


@dataclass(frozen=True, slots=True)
class Draft:
    """A request of a source, with the time that the source gives it."""

    prompt: AnyPrompt
    num_output_tokens: int
    arrival_s: float = 0.0
    conversation: str = ""  # drafts of one conversation are sent one after another; "": it has none
    lane: Lane | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Drafts by arrival, with notes that a reader of the figures should know."""

    name: str
    drafts: tuple[Draft, ...]
    gaps_are_pauses: bool = False  # times within a conversation are pauses after answers, not gaps between requests
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request of a chain. The first is sent at the chain's due time; each other one at least `gap_s` after the
    previous request was sent and `pause_s` after that ended.
    """

    number: int
    prompt: AnyPrompt
    num_output_tokens: int
    gap_s: float = 0.0
    pause_s: float = 0.0
    lane: Lane | None = None
    cancel_after: int | None = None  # number of tokens after which the client disconnects


@dataclass(frozen=True, slots=True)
class Chain:
    """The requests of one conversation, each sent after the previous answer has ended. Most chains have one request."""

    due_s: float  # since the start of the run; a closed loop waits for a free slot instead
    requests: tuple[LoadRequest, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The chains of a run, ordered by due time."""

    chains: tuple[Chain, ...]

    def requests(self) -> Iterator[LoadRequest]:
        for chain in self.chains:
            yield from chain.requests

    @property
    def num_requests(self) -> int:
        return sum(len(chain.requests) for chain in self.chains)


def draft_of(record: TraceRecord) -> Draft:
    """Converts a trace's request to a draft. Each agent of a session is its own conversation."""
    return Draft(
        prompt=PromptBlocks(record.block_runs, record.block_tokens, record.num_input_tokens),
        num_output_tokens=record.num_output_tokens,
        arrival_s=record.arrival_s,
        conversation=f"{record.session}/{record.agent}" if record.session else "",
        lane=record.lane,
    )
