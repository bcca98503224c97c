"""The parts of an HTTP dialect: a body that becomes requests, and a response that is made of parsed outputs. Pure.

A call of OpenAI's API, the Responses API or Anthropic's Messages is one `Dialect`: how its body is read, and what
answers it. `router.api.http.generation` does everything between the two, alike for all dialects: it prepares the body's
requests, runs them, parses each choice's text into `ParserEvent`s and hands every output to the response as a
`ChoiceDelta`. `router.api.http.app.SHAPES` has the shapes of their errors. A dialect performs no I/O and knows neither
workers nor connections.
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
    """The way in which the text of a call's outputs is parsed. The default parses nothing: all of it is text."""

    is_chat: bool = False  # parses reasoning, and tool calls where there are tools
    tools: Sequence[ToolFunction] = ()
    tool_choice: str = "auto"  # or "none", "required", or the name of the tool to call
    parallel_tool_calls: bool = True  # False: only the first call of a choice counts
    include_reasoning: bool = True  # False: reasoning is left out


PLAIN_TEXT = OutputFormat()


class DialectBody(Protocol):
    """A validated body."""

    @property
    def streams(self) -> bool:
        """Returns whether the answer is a stream of events."""
        ...

    @property
    def session(self) -> str:
        """Names the session where no header does."""
        ...

    @property
    def caller_id(self) -> str:
        """The caller's own name of the request, or ""."""
        ...

    @property
    def lane(self) -> Lane | None:
        """The lane that the body asks for, if any. Raises InvalidInput."""
        ...

    @property
    def default_max_tokens(self) -> int | None:
        """The output tokens of a request that names no number; None allows all that the context holds."""
        ...

    @property
    def output_format(self) -> OutputFormat:
        """Returns how outputs are parsed. Raises InvalidInput."""
        ...

    @property
    def grammar_field(self) -> str:
        """The field that says what the output must match, as errors name it."""
        ...

    def requests(self, request_id: str) -> list[inference_pb2.GenerateRequest]:
        """Returns a request for each prompt. Raises InvalidInput."""
        ...


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """A server-sent event."""

    data: Json | str
    name: str = ""  # its `event:` line, if any


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The part of a choice that one output adds."""

    choice: int  # counts over the completions of all prompts
    events: Sequence[ParserEvent]  # the output's text, parsed; what it leaves open comes with a later delta
    output: Output  # tokens, log-probabilities, the finish reason
    called_tools: bool = False  # a tool call has begun, in this delta or before
    reasoning_tokens: int = 0  # those of the output's tokens that are reasoning, whether or not the client gets it

    @property
    def text(self) -> str:
        """The output's text, with the marks of reasoning and tool calls."""
        return self.output.text


@dataclass(slots=True)
class CallTotals:
    """The usage of a call so far; `cached_tokens` and `decisions` are complete at its end."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    decisions: list[Json] = field(default_factory=list)  # why its workers were chosen, if it asks

    def add(self, delta: ChoiceDelta) -> None:
        output = delta.output
        self.completion_tokens += len(output.token_ids)
        self.reasoning_tokens += delta.reasoning_tokens
        if output.usage is not None:
            self.cached_tokens += output.usage.cached_tokens
        if output.decision is not None:
            self.decisions.append(output.decision)


class CallResponse(abc.ABC):
    """A call's response: `add` and `whole` make it in one piece; `opening`, `events` and then `closing` or `failure`
    stream it."""

    id: str  # of the response; the call's requests are named for it

    def begin(self, requests: Sequence[PreparedRequest]) -> None:
        """Takes the requests as they are sent, with their tokens, before any output."""
        return

    @abc.abstractmethod
    def add(self, delta: ChoiceDelta) -> None:
        """Collects a delta for `whole`."""

    @abc.abstractmethod
    def whole(self, totals: CallTotals) -> Json:
        """Returns the response of all collected deltas."""

    def opening(self, totals: CallTotals) -> list[ServerEvent]:
        """Returns the events that come before the first delta's."""
        return []

    @abc.abstractmethod
    def events(self, delta: ChoiceDelta, totals: CallTotals) -> list[ServerEvent]:
        """Returns the events of a delta, which `totals` include."""

    @abc.abstractmethod
    def closing(self, totals: CallTotals) -> list[ServerEvent]:
        """Returns the events after the last delta's."""

    @abc.abstractmethod
    def failure(self, error: PenstockError) -> list[ServerEvent]:
        """Returns the events that end a stream that fails."""


ErrorShape = Callable[[PenstockError], tuple[int, Json]]  # the HTTP status and the body of an error

BodyT = TypeVar("BodyT", bound=DialectBody)


@dataclass(frozen=True, slots=True)
class Dialect(Generic[BodyT]):
    """The way in which a call of an HTTP API is read and answered."""

    read: Callable[[bytes, LimitsConfig, str], BodyT]  # of the bytes, the limits, and the tenant's name
    respond: Callable[[BodyT], CallResponse]
    heartbeat: ServerEvent | None = None  # which a stream sends while nothing else comes; None: empty lines
    reads_more: bool = False  # than the body's bytes, so that it is always read off the event loop
