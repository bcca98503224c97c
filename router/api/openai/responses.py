"""Responses of the OpenAI-compatible calls as plain data, whole or chunk by chunk. No I/O."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from penstock.completions import Output
from penstock.errors import InvalidInput, ModelNotFound, Overloaded, PenstockError, PermissionDenied, Unauthenticated
from penstock.v1 import common_pb2
from router.text.tokenizer import Tokenizer

Json = dict[str, Any]


class _Choice:
    """The collected outputs of one choice."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[common_pb2.TokenLogprob] = []
        self.finish_reason: str | None = None
        self.extension: Json = {}  # what the OpenAI API has no field for
        self.num_characters = 0  # of its tokens' texts so far
        self.has_begun = False


class OpenAiResponse(abc.ABC):
    """One call's response. `choice` counts over the prompts' completions."""

    _whole_object: ClassVar[str]
    _chunk_object: ClassVar[str]

    def __init__(self, id_prefix: str, model: str, tokenizer: Tokenizer, wants_logprobs: bool) -> None:
        self.id = f"{id_prefix}-{uuid.uuid4().hex}"
        self._head: Json = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._choices: dict[int, _Choice] = {}

    @abc.abstractmethod
    def chunks(self, choice: int, output: Output) -> list[Json]:
        """Returns what a streaming client gets of this output."""

    def add(self, choice: int, output: Output) -> None:
        """Collects an output for `whole`."""
        collected = self._choice(choice)
        collected.text.append(output.text)
        collected.logprobs.extend(output.logprobs)
        if output.finish_reason is not None:
            collected.finish_reason = output.finish_reason.value
            collected.extension = _extension(output)

    def whole(self, usage: Json) -> Json:
        """Returns the response of all collected outputs."""
        choices = [
            {
                "index": index,
                **self._content("".join(choice.text)),
                "logprobs": self._logprobs(choice, choice.logprobs),
                "finish_reason": choice.finish_reason,
                **choice.extension,
            }
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._head, "object": self._whole_object, "choices": choices, "usage": usage}

    def last_chunk(self, **fields: object) -> Json:
        """Returns a chunk without choices, like OpenAI's own last chunk with the usage."""
        return {**self._head, "object": self._chunk_object, "choices": [], **fields}

    @abc.abstractmethod
    def _content(self, text: str) -> Json:
        """Returns a whole choice's text in its place."""

    @abc.abstractmethod
    def _logprobs(self, choice: _Choice, logprobs: Sequence[common_pb2.TokenLogprob]) -> Json | None:
        """Returns None unless the call asks for log-probabilities."""

    def _choice(self, choice: int) -> _Choice:
        return self._choices.setdefault(choice, _Choice())

    def _chunk(self, choice: int, content: Json, logprobs: Json | None, output: Output | None) -> Json:
        reason = output.finish_reason.value if output is not None and output.finish_reason else None
        entry = {"index": choice, **content, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None and output is not None:
            entry |= _extension(output)
        return {**self._head, "object": self._chunk_object, "choices": [entry]}

    def _is_worth_sending(self, output: Output) -> bool:
        return bool(output.text or output.finish_reason or (self._wants_logprobs and output.logprobs))


class CompletionResponse(OpenAiResponse):
    """/v1/completions."""

    _whole_object = _chunk_object = "text_completion"

    def chunks(self, choice: int, output: Output) -> list[Json]:
        if not self._is_worth_sending(output):
            return []
        logprobs = self._logprobs(self._choice(choice), output.logprobs)
        return [self._chunk(choice, self._content(output.text), logprobs, output)]

    def _content(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, choice: _Choice, logprobs: Sequence[common_pb2.TokenLogprob]) -> Json | None:
        if not self._wants_logprobs:
            return None
        offsets = []
        for token in logprobs:
            offsets.append(choice.num_characters)
            choice.num_characters += len(token.token)
        return {
            "tokens": [token.token for token in logprobs],
            "token_logprobs": [token.logprob for token in logprobs],
            "top_logprobs": [{other.token: other.logprob for other in token.top} for token in logprobs],
            "text_offset": offsets,
        }


class ChatResponse(OpenAiResponse):
    """/v1/chat/completions."""

    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def chunks(self, choice: int, output: Output) -> list[Json]:
        collected = self._choice(choice)
        chunks = []
        if not collected.has_begun:
            collected.has_begun = True
            chunks.append(self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}, None, None))
        if self._is_worth_sending(output):
            delta = {"content": output.text} if output.text else {}
            logprobs = self._logprobs(collected, output.logprobs)
            chunks.append(self._chunk(choice, {"delta": delta}, logprobs, output))
        return chunks

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def _logprobs(self, choice: _Choice, logprobs: Sequence[common_pb2.TokenLogprob]) -> Json | None:
        if not self._wants_logprobs:
            return None
        tokens = [{**self._token(token), "top_logprobs": [*map(self._token, token.top)]} for token in logprobs]
        return {"content": tokens}

    def _token(self, token: common_pb2.TokenLogprob | common_pb2.TopLogprob) -> Json:
        spelling = list(self._tokenizer.spelling.token_bytes(token.token_id))
        return {"token": token.token, "logprob": token.logprob, "bytes": spelling}


def _extension(output: Output) -> Json:
    """Returns the choice's extra field: the `max_tokens` that overload has granted, where that is less than asked."""
    return {} if output.granted_tokens is None else {"penstock": {"granted_max_tokens": output.granted_tokens}}


def usage_json(usages: Sequence[common_pb2.Usage]) -> Json:
    """Returns the sum over a call's prompts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def error_json(error: PenstockError) -> Json:
    """Returns OpenAI's error object; fields go by the names that its API gives them."""
    message, param = error.message, None
    if isinstance(error, InvalidInput):
        param = error.field.removeprefix("sampling.")
        param = "prompt" if param in ("text", "token_ids") else param
        message = f"{param}: {error.problem}"
    elif isinstance(error, ModelNotFound):
        param = "model"
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    if isinstance(error, Unauthenticated):
        kind = "authentication_error"
    elif isinstance(error, PermissionDenied):
        kind = "permission_error"
    elif isinstance(error, Overloaded):
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}}
