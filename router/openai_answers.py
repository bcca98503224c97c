"""Answers of the OpenAI-compatible calls as plain data, whole or chunk by chunk. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from penstock.errors import (
    InvalidInput,
    ModelNotFound,
    Overloaded,
    PenstockError,
    PermissionDenied,
    Unauthenticated,
)
from penstock.outputs import Output
from penstock.v1 import common_pb2
from router.tokenizer import Tokenizer

Json = dict[str, Any]


class Answer(Protocol):
    """One call's answer. `choice` counts over the prompts' completions."""

    def chunks(self, choice: int, output: Output) -> list[Json]:
        """What a streaming client gets of this output."""
        ...

    def add(self, choice: int, output: Output) -> None:
        """Collects for `whole`."""
        ...

    def whole(self, usage: Json) -> Json: ...

    def usage_chunk(self, usage: Json) -> Json: ...

    def decision_chunk(self, decisions: list[Json]) -> Json: ...


class _Choice:
    """What is collected of one choice."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[common_pb2.TokenLogprob] = []
        self.finish_reason: str | None = None
        self.num_characters = 0  # of its tokens' texts so far
        self.has_begun = False


class _Answer:
    def __init__(self, answer_id: str, model: str, tokenizer: Tokenizer, wants_logprobs: bool) -> None:
        self._head: Json = {"id": answer_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._choices: dict[int, _Choice] = {}

    def _choice(self, choice: int) -> _Choice:
        return self._choices.setdefault(choice, _Choice())

    def add(self, choice: int, output: Output) -> None:
        collected = self._choice(choice)
        collected.text.append(output.text)
        collected.logprobs.extend(output.logprobs)
        if output.finish_reason is not None:
            collected.finish_reason = output.finish_reason.value

    def _last_chunk(self, kind: str, **fields: object) -> Json:
        """Without choices, as OpenAI's own last chunk with the usage."""
        return {**self._head, "object": kind, "choices": [], **fields}

    def _worth_sending(self, output: Output) -> bool:
        return bool(output.text or output.finish_reason or (self._wants_logprobs and output.logprobs))


class CompletionAnswer(_Answer):
    """/v1/completions."""

    def chunks(self, choice: int, output: Output) -> list[Json]:
        if not self._worth_sending(output):
            return []
        entry: Json = {
            "index": choice,
            "text": output.text,
            "logprobs": self._logprobs(self._choice(choice), output.logprobs),
            "finish_reason": output.finish_reason.value if output.finish_reason else None,
        }
        return [{**self._head, "object": "text_completion", "choices": [entry]}]

    def whole(self, usage: Json) -> Json:
        choices = [
            {
                "index": index,
                "text": "".join(one.text),
                "logprobs": self._logprobs(one, one.logprobs),
                "finish_reason": one.finish_reason,
            }
            for index, one in sorted(self._choices.items())
        ]
        return {**self._head, "object": "text_completion", "choices": choices, "usage": usage}

    def usage_chunk(self, usage: Json) -> Json:
        return self._last_chunk("text_completion", usage=usage)

    def decision_chunk(self, decisions: list[Json]) -> Json:
        return self._last_chunk("text_completion", penstock={"decisions": decisions})

    def _logprobs(self, choice: _Choice, logprobs: Sequence[common_pb2.TokenLogprob]) -> Json | None:
        if not self._wants_logprobs:
            return None
        offsets = []
        for one in logprobs:
            offsets.append(choice.num_characters)
            choice.num_characters += len(one.token)
        return {
            "tokens": [one.token for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{other.token: other.logprob for other in one.top} for one in logprobs],
            "text_offset": offsets,
        }


class ChatAnswer(_Answer):
    """/v1/chat/completions."""

    def chunks(self, choice: int, output: Output) -> list[Json]:
        collected = self._choice(choice)
        made = []
        if not collected.has_begun:
            collected.has_begun = True
            made.append(self._chunk(choice, {"role": "assistant", "content": ""}, None, None))
        if self._worth_sending(output):
            delta = {"content": output.text} if output.text else {}
            reason = output.finish_reason.value if output.finish_reason else None
            made.append(self._chunk(choice, delta, self._logprobs(output.logprobs), reason))
        return made

    def _chunk(self, choice: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [entry]}

    def whole(self, usage: Json) -> Json:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(one.text)},
                "logprobs": self._logprobs(one.logprobs),
                "finish_reason": one.finish_reason,
            }
            for index, one in sorted(self._choices.items())
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def usage_chunk(self, usage: Json) -> Json:
        return self._last_chunk("chat.completion.chunk", usage=usage)

    def decision_chunk(self, decisions: list[Json]) -> Json:
        return self._last_chunk("chat.completion.chunk", penstock={"decisions": decisions})

    def _logprobs(self, logprobs: Sequence[common_pb2.TokenLogprob]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [{**self._token(one), "top_logprobs": [*map(self._token, one.top)]} for one in logprobs]}

    def _token(self, one: common_pb2.TokenLogprob | common_pb2.TopLogprob) -> Json:
        spelt = list(self._tokenizer.spelling.token_bytes(one.token_id))
        return {"token": one.token, "logprob": one.logprob, "bytes": spelt}


def usage_json(usages: Sequence[common_pb2.Usage]) -> Json:
    """The sum over a call's prompts."""
    prompt = sum(one.prompt_tokens for one in usages)
    completion = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in usages)},
    }


def error_json(error: PenstockError) -> Json:
    """OpenAI's error object; fields go by the names that its API gives them."""
    message, param = error.message, None
    if isinstance(error, InvalidInput):
        param = error.field.removeprefix("sampling.")
        param = "prompt" if param in ("text", "token_ids") else param
        message = f"{param}: {error.problem}"
    elif isinstance(error, ModelNotFound):
        param = "model"
    kind = "invalid_request_error" if error.http_status < 429 else "server_error"
    if isinstance(error, Unauthenticated):
        kind = "authentication_error"
    elif isinstance(error, PermissionDenied):
        kind = "permission_error"
    elif isinstance(error, Overloaded):
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}}
