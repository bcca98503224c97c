"""Builds Anthropic's message, whole or as an event stream, from the parsed outputs of one completion. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from penstock.errors import PenstockError
from penstock.text.completions import Output
from penstock.types import FinishReason
from router.api.dialect import CallResponse, CallTotals, ChoiceDelta, Json, ServerEvent
from router.api.openai.responses import extension_json
from router.api.translation.anthropic.errors import anthropic_error
from router.api.translation.anthropic.requests import MessagesBody
from router.api.translation.sealed import seal
from router.parsers.events import ParserEvent, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart

PING = ServerEvent({"type": "ping"}, "ping")
_SIGNATURE = "penstock"  # signature of thinking that is sent in full; it is never checked
# A block's type -> the field of its deltas, and their type.
_DELTAS = {
    "text": ("text", "text_delta"),
    "thinking": ("thinking", "thinking_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}


class _OpenBlock:
    """Collects the pieces of a content block that has not ended."""

    def __init__(self, index: int, start: Json) -> None:
        self.index = index
        self.start = start
        self.kind: str = start["type"]
        self.pieces: list[str] = []

    def whole(self, omits_thinking: bool) -> Json:
        text = "".join(self.pieces)
        if self.kind == "text":
            return {**self.start, "text": text}
        if self.kind == "thinking":
            return {
                **self.start,
                "thinking": "" if omits_thinking else text,
                "signature": self.signature(omits_thinking),
            }
        return {**self.start, "input": _partial_object(text)}

    def signature(self, omits_thinking: bool) -> str:
        return seal("".join(self.pieces)) if omits_thinking else _SIGNATURE


class MessagesResponse(CallResponse):
    """Builds a message. Each run of text, each run of thinking and each tool call becomes a content block."""

    def __init__(self, body: MessagesBody, model: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self._model = model
        self._omits_thinking = body.omits_thinking
        self._max_tokens = body.max_tokens
        self._content: list[Json] = []
        self._open: _OpenBlock | None = None
        self._thinking_tokens = 0
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}
        self._extension: Json = {}

    def add(self, delta: ChoiceDelta) -> None:
        for _ in self._advance(delta):
            pass

    def whole(self, totals: CallTotals) -> Json:
        for _ in self._close_block():
            pass
        return self._message(self._content, self._usage(totals)) | self._stop | self._extras(totals)

    def opening(self, totals: CallTotals) -> list[ServerEvent]:
        start = self._message([], self._usage(totals)) | {"stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message=start), PING]

    def events(self, delta: ChoiceDelta, totals: CallTotals) -> list[ServerEvent]:
        return list(self._advance(delta))

    def closing(self, totals: CallTotals) -> list[ServerEvent]:
        end = _event("message_delta", delta=self._stop, usage=self._usage(totals), **self._extras(totals))
        return [*self._close_block(), end, _event("message_stop")]

    def failure(self, error: PenstockError) -> list[ServerEvent]:
        return [ServerEvent(anthropic_error(error)[1], "error")]

    def _advance(self, delta: ChoiceDelta) -> Iterator[ServerEvent]:
        for event in delta.events:
            yield from self._apply(event)
        output = delta.output
        if self._open is not None and self._open.kind == "thinking":
            self._thinking_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._stop = self._stop_fields(output, delta.called_tools)
            self._extension = extension_json(output)

    def _apply(self, event: ParserEvent) -> Iterator[ServerEvent]:
        if isinstance(event, TextDelta):
            yield from self._extend({"type": "text", "text": ""}, event.text)
        elif isinstance(event, ReasoningDelta):
            yield from self._extend({"type": "thinking", "thinking": "", "signature": ""}, event.text)
        elif isinstance(event, ToolCallStart):
            call = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": event.name, "input": {}}
            yield from self._close_block()
            yield from self._open_block(call)
        elif isinstance(event, ToolArgumentsDelta):
            yield from self._grow(event.text)
        else:  # the end of a tool call
            yield from self._close_block()

    def _extend(self, start: Json, text: str) -> Iterator[ServerEvent]:
        """Appends to the open block if it is of the same kind, or else opens a new one."""
        if self._open is None or self._open.kind != start["type"]:
            yield from self._close_block()
            yield from self._open_block(start)
        yield from self._grow(text)

    def _open_block(self, start: Json) -> Iterator[ServerEvent]:
        self._open = _OpenBlock(len(self._content), start)
        yield _event("content_block_start", index=self._open.index, content_block=start)

    def _grow(self, text: str) -> Iterator[ServerEvent]:
        block = self._open
        assert block is not None  # arguments follow their call's start
        block.pieces.append(text)
        if text and not (block.kind == "thinking" and self._omits_thinking):
            field, kind = _DELTAS[block.kind]
            yield _event("content_block_delta", index=block.index, delta={"type": kind, field: text})

    def _close_block(self) -> Iterator[ServerEvent]:
        block, self._open = self._open, None
        if block is None:
            return
        self._content.append(block.whole(self._omits_thinking))
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": block.signature(self._omits_thinking)}
            yield _event("content_block_delta", index=block.index, delta=signature)
        yield _event("content_block_stop", index=block.index)

    def _stop_fields(self, output: Output, called_tools: bool) -> Json:
        reason, sequence = "end_turn", None
        if output.finish_reason is FinishReason.LENGTH:
            reached = output.usage is None or output.usage.completion_tokens >= self._max_tokens
            granted = output.granted_tokens is not None
            reason = "max_tokens" if reached or granted else "model_context_window_exceeded"
        elif output.stop_string is not None:
            reason, sequence = "stop_sequence", output.stop_string
        elif called_tools:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _message(self, content: list[Json], usage: Json) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "usage": usage}

    def _usage(self, totals: CallTotals) -> Json:
        """Returns Anthropic's counts, in which `input_tokens` leave out tokens read from the prefix cache."""
        return {
            "input_tokens": totals.prompt_tokens - totals.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": totals.cached_tokens,
            "output_tokens": totals.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._thinking_tokens},
            "service_tier": "standard",
        }

    def _extras(self, totals: CallTotals) -> Json:
        """Returns the field `penstock` with data that Anthropic's API has no field for."""
        extras = self._extension | ({"decisions": totals.decisions} if totals.decisions else {})
        return {"penstock": extras} if extras else {}


def _partial_object(text: str) -> Json:
    """Returns the arguments of a tool call; if the output ended within them, as much of them as can be parsed."""
    try:
        value: Any = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: object) -> ServerEvent:
    return ServerEvent({"type": kind, **fields}, kind)
