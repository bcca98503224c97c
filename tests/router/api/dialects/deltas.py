"""Makes deltas of one completion for tests of dialects' responses: what a model writes, and how it is split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from penstock.text.completions import Output
from penstock.types import FinishReason
from penstock.v1 import common_pb2
from router.api.dialect import CallResponse, CallTotals, ChoiceDelta, Json, ServerEvent
from router.parsers.events import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

PROMPT_TOKENS, CACHED_TOKENS = 40, 32


@dataclass(frozen=True)
class Written:
    """Holds a run of text or reasoning, or a tool call with its name."""

    kind: str
    pieces: tuple[str, ...]
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def events_of(run: Sequence[Written], cut: bool = False) -> list[ParserEvent]:
    """Returns the events of an output. A `cut` output stops before the end of its last tool call."""
    events: list[ParserEvent] = []
    calls = 0
    for number, written in enumerate(run):
        if written.kind == "call":
            events.append(ToolCallStart(calls, written.name))
            events.extend(ToolArgumentsDelta(calls, piece) for piece in written.pieces)
            if not (cut and number == len(run) - 1):
                events.append(ToolCallEnd(calls))
            calls += 1
        else:
            kind = TextDelta if written.kind == "text" else ReasoningDelta
            events.extend(kind(piece) for piece in written.pieces)
    return events


def deltas_of(
    events: Sequence[ParserEvent],
    sizes: Sequence[int] = (),
    reason: FinishReason = FinishReason.STOP,
    **last: object,
) -> list[ChoiceDelta]:
    """Returns the events in deltas of these sizes, one token each. The last delta holds the rest and ends the
    output."""
    groups, start = [], 0
    for size in sizes:
        groups.append(events[start : start + size])
        start += size
    groups.append(events[start:])
    called, deltas = False, []
    for number, group in enumerate(groups):
        called = called or any(isinstance(event, ToolCallStart) for event in group)
        output = Output(index=0, text="", token_ids=[300 + number])
        if number == len(groups) - 1:
            usage = common_pb2.Usage(
                prompt_tokens=PROMPT_TOKENS, completion_tokens=len(groups), cached_tokens=CACHED_TOKENS
            )
            output = dataclasses.replace(output, finish_reason=reason, usage=usage, **last)
        deltas.append(ChoiceDelta(0, group, output, called))
    return deltas


def whole_of(response: CallResponse, deltas: Sequence[ChoiceDelta]) -> Json:
    totals = CallTotals(PROMPT_TOKENS)
    for delta in deltas:
        totals.add(delta)
        response.add(delta)
    return response.whole(totals)


def stream_of(response: CallResponse, deltas: Sequence[ChoiceDelta]) -> list[ServerEvent]:
    totals = CallTotals(PROMPT_TOKENS)
    events = response.opening(totals)
    for delta in deltas:
        totals.add(delta)
        events += response.events(delta, totals)
    return events + response.closing(totals)


_PIECES = st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)
_ARGUMENTS = st.sampled_from(['{"city":"Rome"}', "{}", '{"a":[1,{"b":"}"}]}']).flatmap(
    lambda text: st.integers(0, len(text)).map(lambda place: (text[:place], text[place:]))
)
WRITTEN = st.one_of(
    st.builds(Written, st.sampled_from(["text", "reasoning"]), _PIECES),
    st.builds(Written, st.just("call"), _ARGUMENTS, st.sampled_from(["look_up", "add"])),
)


def merged(run: Sequence[Written]) -> list[Written]:
    """Joins adjacent runs of text, and of reasoning, which no output can distinguish."""
    joined: list[Written] = []
    for written in run:
        if joined and written.kind != "call" and joined[-1].kind == written.kind:
            joined[-1] = Written(written.kind, joined[-1].pieces + written.pieces)
        else:
            joined.append(written)
    return joined
