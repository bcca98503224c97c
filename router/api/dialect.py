"""Defines the parts of an HTTP dialect: a body that becomes requests and a response made from parsed outputs. Pure.

Each generating call of OpenAI's API, the Responses API and Anthropic's Messages is one `Dialect`, which says how to
read its body and how to answer it. `router.api.http.generation` does everything in between, in the same way for all
dialects: it prepares the body's requests, runs them, parses each choice's text into `ParserEvent`s and passes every
output to the response as a `ChoiceDelta`. `router.api.http.app.SHAPES` has the formats of their errors. A dialect
performs no I/O and knows neither workers nor connections.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from penstock.config.limits import LimitsConfig
from penstock.errors import PenstockError
from penstock.text.completions import Output
from penstock.types import Lane
from penstock.v1 import inference_pb2
from router.parsers.events import ParserEvent
from router.parsers.tools import ToolFunction
from router.prepared_request import PreparedRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Says how to parse the text of a call's outputs. By default nothing is parsed: everything is text."""

    is_chat: bool = False  # parses reasoning and, if there are tools, tool calls
    tools: Sequence[ToolFunction] = ()
    tool_choice: str = "auto"  # or "none", "required", or the name of the tool to call
    parallel_tool_calls: bool = True  # False: only the first call of a choice counts
    include_reasoning: bool = True  # False: reasoning is left out


PLAIN_TEXT = OutputFormat()


class DialectBody(Protocol):
    """A validated body of a generating call."""

    @property
    def streams(self) -> bool:
        """Returns whether the answer is a stream of events."""
        ...

    @property
    def session(self) -> str:
        """Returns the session's name, which a header overrides; "" for none."""
        ...

    @property
    def caller_id(self) -> str:
        """Returns the caller's own id of the request, or ""."""
        ...

    @property
    def lane(self) -> Lane | None:
        """Returns the lane that the body asks for, or None. Raises InvalidInput."""
        ...

    @property
    def default_max_tokens(self) -> int | None:
        """Returns the output tokens of a request that sets no limit; None allows all that fit in the context."""
        ...

    @property
    def output_format(self) -> OutputFormat:
        """Returns how to parse the outputs. Raises InvalidInput."""
        ...

    @property
    def grammar_field(self) -> str:
        """Returns the name, for errors, of the field that says what the output must match."""
        ...

    def requests(self, request_id: str) -> list[inference_pb2.GenerateRequest]:
        """Returns one request for each prompt. Raises InvalidInput."""
        ...


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """A server-sent event."""

    data: Json | str
    name: str = ""  # content of its `event:` line; "" for none


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The addition of one output to a choice."""

    choice: int  # index of the choice, counted over the completions of all prompts
    events: Sequence[ParserEvent]  # the output's parsed text; text that is still ambiguous comes with a later delta
    output: Output  # tokens, log-probabilities, the finish reason
    called_tools: bool = False  # whether a tool call has begun, in this delta or before
    reasoning_tokens: int = 0  # number of the output's tokens that are reasoning, even if the client does not get it

    @property
    def text(self) -> str:
        """Returns the output's text, including the markers of reasoning and tool calls."""
        return self.output.text


@dataclass(slots=True)
class CallTotals:
    """The usage of a call so far. `cached_tokens` and `decisions` are complete when the call ends."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    decisions: list[Json] = field(default_factory=list)  # why its workers were chosen, if the call asks for that

    def add(self, delta: ChoiceDelta) -> None:
        output = delta.output
        self.completion_tokens += len(output.token_ids)
        self.reasoning_tokens += delta.reasoning_tokens
        if output.usage is not None:
            self.cached_tokens += output.usage.cached_tokens
        if output.decision is not None:
            self.decisions.append(output.decision)


class CallResponse(abc.ABC):
    """Builds a call's response: `add` and `whole` build it in one piece; `opening`, `events` and then `closing` or
    `failure` stream it.
    """

    id: str  # id of the response; the call's requests derive their ids from it

    def begin(self, requests: Sequence[PreparedRequest]) -> None:
        """Receives the tokenized requests before any output."""
        return

    @abc.abstractmethod
    def add(self, delta: ChoiceDelta) -> None:
        """Adds a delta to the response that `whole` returns."""

    @abc.abstractmethod
    def whole(self, totals: CallTotals) -> Json:
        """Returns the whole response, made of all added deltas."""

    def opening(self, totals: CallTotals) -> list[ServerEvent]:
        """Returns the events to send before those of the first delta."""
        return []

    @abc.abstractmethod
    def events(self, delta: ChoiceDelta, totals: CallTotals) -> list[ServerEvent]:
        """Returns the events of a delta. `totals` already include it."""

    @abc.abstractmethod
    def closing(self, totals: CallTotals) -> list[ServerEvent]:
        """Returns the events to send after those of the last delta."""

    @abc.abstractmethod
    def failure(self, error: PenstockError) -> list[ServerEvent]:
        """Returns the events that end a failed stream."""


ErrorShape = Callable[[PenstockError], tuple[int, Json]]  # returns the HTTP status and the body of an error

BodyT = TypeVar("BodyT", bound=DialectBody)


@dataclass(frozen=True, slots=True)
class Dialect(Generic[BodyT]):
    """Says how to read and answer one generating call of an HTTP API."""

    read: Callable[[bytes, LimitsConfig, str], BodyT]  # takes the body's bytes, the limits and the tenant's name
    respond: Callable[[BodyT], CallResponse]
    heartbeat: ServerEvent | None = None  # sent while a stream has no other event; None sends empty lines
    reads_more: bool = False  # whether `read` reads more than the body, so that it always runs off the event loop
