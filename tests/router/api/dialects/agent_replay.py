"""Replays an agent's conversation with tools in each dialect, as that dialect's clients send it turn by turn."""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from typing import Any

import httpx

from tests.router.api.dialects.speech import MODEL, WEATHER

Json = dict[str, Any]

SYSTEM = "You are an agent. Call functions where they help, and be brief otherwise. " * 4
DESCRIPTION = "Looks up the weather of a city."


class Agent(abc.ABC):
    """Sends one request for each turn; `take` appends what the model wrote, and tool results or a question."""

    path: str

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.turn = 0

    async def ask(self, question: str, max_tokens: int = 64) -> Json:
        """Returns the answer to the conversation so far, after a new question unless it ends with a tool result."""
        self._before(question)
        answer = await self._http.post(self.path, json=self._body(max_tokens))
        assert answer.status_code == 200, answer.text
        whole: Json = answer.json()
        self._take(whole)
        self.turn += 1
        return whole

    @abc.abstractmethod
    def _before(self, question: str) -> None: ...

    @abc.abstractmethod
    def _body(self, max_tokens: int) -> Json: ...

    @abc.abstractmethod
    def _take(self, answer: Json) -> None: ...


class MessagesAgent(Agent):
    """Writes Anthropic's dialect as Claude Code does: a header line that changes, and marks that move with each
    turn."""

    path = "/v1/messages"

    def __init__(self, http: httpx.AsyncClient) -> None:
        super().__init__(http)
        self.messages: list[Json] = []

    def _before(self, question: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": [{"type": "text", "text": question}]})

    def _body(self, max_tokens: int) -> Json:
        header = f"x-anthropic-billing-header: cc_version=2.1.{self.turn}; cc_entrypoint=cli; cch={self.turn:05x};"
        mark = {"type": "ephemeral"}
        *before, last = self.messages
        *blocks, block = last["content"]
        marked = {**last, "content": [*blocks, {**block, "cache_control": mark}]}
        system = [{"type": "text", "text": header}, {"type": "text", "text": SYSTEM, "cache_control": mark}]
        tool = {"name": "get_weather", "description": DESCRIPTION, "input_schema": WEATHER}
        return {
            **{"model": MODEL, "max_tokens": max_tokens, "system": system, "tools": [tool]},
            **{"messages": [*before, marked], "metadata": {"user_id": "user_1_session_2"}, "temperature": 0},
        }

    def _take(self, answer: Json) -> None:
        self.messages.append({"role": "assistant", "content": answer["content"] or [{"type": "text", "text": "..."}]})
        results = [_result(block) for block in answer["content"] if block["type"] == "tool_use"]
        if results:
            self.messages.append({"role": "user", "content": results})


class ChatAgent(Agent):
    """Writes OpenAI's chat completions."""

    path = "/v1/chat/completions"

    def __init__(self, http: httpx.AsyncClient) -> None:
        super().__init__(http)
        self.messages: list[Json] = [{"role": "system", "content": SYSTEM}]

    def _before(self, question: str) -> None:
        if self.messages[-1]["role"] != "tool":
            self.messages.append({"role": "user", "content": question})

    def _body(self, max_tokens: int) -> Json:
        function = {"name": "get_weather", "description": DESCRIPTION, "parameters": WEATHER}
        tools = [{"type": "function", "function": function}]
        return {"messages": self.messages, "tools": tools, "max_tokens": max_tokens, "temperature": 0}

    def _take(self, answer: Json) -> None:
        message = answer["choices"][0]["message"]
        self.messages.append(message)
        for call in message.get("tool_calls") or ():
            report = _report(json.loads(call["function"]["arguments"]))
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": report})


class ResponsesAgent(Agent):
    """Writes the Responses API with all items in each call, as Codex does."""

    path = "/v1/responses"

    def __init__(self, http: httpx.AsyncClient) -> None:
        super().__init__(http)
        self.items: list[Json] = []

    def _before(self, question: str) -> None:
        if not self.items or self.items[-1]["type"] != "function_call_output":
            part = {"type": "input_text", "text": question}
            self.items.append({"type": "message", "role": "user", "content": [part]})

    def _body(self, max_tokens: int) -> Json:
        tool = {"type": "function", "name": "get_weather", "description": DESCRIPTION, "parameters": WEATHER}
        return {
            **{"model": MODEL, "instructions": SYSTEM, "input": self.items, "tools": [tool], "store": False},
            **{"max_output_tokens": max_tokens, "prompt_cache_key": "session-2", "temperature": 0},
        }

    def _take(self, answer: Json) -> None:
        self.items.extend(answer["output"])
        self.items.extend(_outputs(answer["output"]))


class StoredResponsesAgent(ResponsesAgent):
    """Writes the Responses API with only the new items and the id of the previous response."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        super().__init__(http)
        self._previous: str | None = None

    def _body(self, max_tokens: int) -> Json:
        return {**super()._body(max_tokens), "store": True, "previous_response_id": self._previous}

    def _take(self, answer: Json) -> None:
        self._previous = answer["id"]
        self.items = _outputs(answer["output"])


AGENTS: Sequence[type[Agent]] = (MessagesAgent, ChatAgent, ResponsesAgent, StoredResponsesAgent)


def _result(block: Json) -> Json:
    content = [{"type": "text", "text": _report(block["input"])}]
    return {"type": "tool_result", "tool_use_id": block["id"], "content": content}


def _outputs(items: Sequence[Json]) -> list[Json]:
    return [
        {
            "type": "function_call_output",
            "call_id": item["call_id"],
            "output": _report(json.loads(item["arguments"])),
        }
        for item in items
        if item["type"] == "function_call"
    ]


def _report(arguments: Json) -> str:
    return f"The weather in {arguments.get('city')}: sunny, 25 degrees, a light wind from the west."
