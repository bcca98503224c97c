"""Builds a response of the Responses API, whole or as an event stream, from the parsed outputs of one completion.

Performs no I/O; a response that ends is put into this process's store.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from penstock.errors import Cancelled, Overloaded, PenstockError
from penstock.types import FinishReason
from router.api.dialect import CallResponse, CallTotals, ChoiceDelta, Json, ServerEvent
from router.api.openai.responses import extension_json
from router.api.translation.responses.errors import responses_error
from router.api.translation.responses.output import FunctionCallItem, MessageItem, OutputItem, ReasoningItem
from router.api.translation.responses.requests import ResponsesBody
from router.api.translation.responses.store import ResponseStore
from router.api.translation.turns import ChatTurns
from router.parsers.events import ParserEvent, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart


class ResponsesResponse(CallResponse):
    """Builds a response. Each run of text, each run of reasoning and each tool call becomes an output item."""

    def __init__(self, body: ResponsesBody, model: str, store: ResponseStore) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._body = body
        self._store = store
        head = {"id": self.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._response: Json = {
            **head,
            **body.echo,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        self._open: OutputItem | None = None
        self._turns = ChatTurns()
        self._sequence_number = 0
        self._reasoning_tokens = 0
        self._is_cut = False  # whether the output ended at its length limit
        self._extension: Json = {}

    def add(self, delta: ChoiceDelta) -> None:
        for _ in self._advance(delta):
            pass

    def whole(self, totals: CallTotals) -> Json:
        for _ in self._close_item():
            pass
        return self._end(totals)

    def opening(self, totals: CallTotals) -> list[ServerEvent]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response={**self._response, "output": []}) for kind in kinds]

    def events(self, delta: ChoiceDelta, totals: CallTotals) -> list[ServerEvent]:
        return list(self._advance(delta))

    def closing(self, totals: CallTotals) -> list[ServerEvent]:
        events = list(self._close_item())
        response = self._end(totals)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: PenstockError) -> list[ServerEvent]:
        """Ends the response as failed or cancelled. A cancelled one ends with the event of an incomplete response,
        since the API has no event for cancellation.
        """
        if self._open is not None:
            self._finish_item(self._open, is_complete=False)
        if isinstance(error, Cancelled):
            self._response["status"] = "cancelled"
            self._keep()
            return [self._event("response.incomplete", response=self._response)]
        problem = responses_error(error)[1]["error"]
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        if error.http_status < 500 and code == "server_error":
            code = "invalid_prompt"
        self._response |= {"status": "failed", "error": {"code": code, "message": problem["message"]}}
        self._keep()
        failed = self._event("response.failed", response=self._response)
        return [failed, self._event("error", code=code, message=problem["message"], param=problem["param"])]

    def _advance(self, delta: ChoiceDelta) -> Iterator[ServerEvent]:
        for event in delta.events:
            yield from self._apply(event)
        output = delta.output
        if isinstance(self._open, ReasoningItem):
            self._reasoning_tokens += len(output.token_ids)
        if output.finish_reason is FinishReason.LENGTH:
            self._is_cut = True
        if output.finish_reason is not None:
            self._extension = extension_json(output)

    def _apply(self, event: ParserEvent) -> Iterator[ServerEvent]:
        if isinstance(event, TextDelta):
            if not isinstance(self._open, MessageItem):
                yield from self._begin(MessageItem())
            yield from self._grow(event.text)
        elif isinstance(event, ReasoningDelta):
            if not isinstance(self._open, ReasoningItem):
                yield from self._begin(ReasoningItem(self._body.seals_reasoning))
            yield from self._grow(event.text)
        elif isinstance(event, ToolCallStart):
            yield from self._begin(FunctionCallItem(event.name))
        elif isinstance(event, ToolArgumentsDelta):
            yield from self._grow(event.text)
        else:  # the end of a tool call
            yield from self._close_item(is_complete=True)

    def _begin(self, item: OutputItem) -> Iterator[ServerEvent]:
        yield from self._close_item(is_complete=True)
        self._open = item
        yield from self._item_events(item.opening())

    def _grow(self, text: str) -> Iterator[ServerEvent]:
        assert self._open is not None  # arguments follow their call's start
        if text:
            yield from self._item_events([self._open.grow(text)])

    def _close_item(self, is_complete: bool | None = None) -> Iterator[ServerEvent]:
        """Ends the open item, if any. By default (at the output's end) it is complete unless the output was cut."""
        if (item := self._open) is None:
            return
        index = len(self._response["output"])
        is_cut = self._is_cut and not (isinstance(item, FunctionCallItem) and item.has_whole_arguments)
        done = self._finish_item(item, not is_cut if is_complete is None else is_complete)
        for kind, fields in done:
            yield self._event(kind, output_index=index, **fields)

    def _finish_item(self, item: OutputItem, is_complete: bool) -> list[tuple[str, Json]]:
        self._open = None
        done = item.closing(is_complete)
        self._response["output"].append(item.whole(is_complete))
        item.add_to(self._turns, is_complete)
        return done

    def _item_events(self, parts: list[tuple[str, Json]]) -> Iterator[ServerEvent]:
        """Yields events of the open item."""
        index = len(self._response["output"])
        for kind, fields in parts:
            yield self._event(kind, output_index=index, **fields)

    def _end(self, totals: CallTotals) -> Json:
        """Completes, stores and returns the response."""
        response = self._response
        response["usage"] = {
            "input_tokens": totals.prompt_tokens,
            "input_tokens_details": {"cached_tokens": totals.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": totals.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        }
        response["status"] = "incomplete" if self._is_cut else "completed"
        if self._is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        extras = self._extension | ({"decisions": totals.decisions} if totals.decisions else {})
        if extras:
            response["penstock"] = extras
        self._keep()
        return response

    def _keep(self) -> None:
        """Stores the response if its call asks for that. Sets `store` to false in a response that is too large."""
        body = self._body
        if body.stores and not self._store.put(
            body.tenant, self._response, body.given, self._turns.messages, body.previous_id
        ):
            self._response["store"] = False

    def _event(self, kind: str, **fields: object) -> ServerEvent:
        data = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return ServerEvent(data, kind)
