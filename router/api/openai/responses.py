"""Builds the responses of the OpenAI-compatible calls as plain data, whole or chunk by chunk. No I/O."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from penstock.errors import InvalidInput, ModelNotFound, Overloaded, PenstockError, PermissionDenied, Unauthenticated
from penstock.text.completions import Output
from penstock.types import FinishReason
from penstock.v1 import common_pb2
from router.api.dialect import CallResponse, CallTotals, ChoiceDelta, Json, ServerEvent
from router.api.openai.kv_hints import answers_json
from router.api.openai.messages import AssistantMessage, message_deltas
from router.api.openai.prompt_echo import PromptEcho, completion_logprobs, prompt_logprobs_json
from router.api.openai.requests import ChatBody, CompletionBody
from router.prepared_request import PreparedRequest
from router.text.tokenizer import Tokenizer


class _Choice:
    """Holds the collected outputs of one choice."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.message = AssistantMessage()
        self.logprobs: list[common_pb2.TokenLogprob] = []
        self.token_ids: list[int] = []
        self.weight_versions: list[int] = []  # one for each token
        self.finish_reason: str | None = None
        self.extension: Json = {}  # data that OpenAI's API has no field for
        self.num_characters = 0  # length of its tokens' texts so far
        self.has_begun = False
        self.prompt_logprobs: Sequence[common_pb2.TokenLogprob] = ()


class OpenAiResponse(CallResponse):
    """The response of an OpenAI-compatible call. `choice` is an index over the completions of all prompts."""

    _whole_object: ClassVar[str]
    _chunk_object: ClassVar[str]

    def __init__(self, id_prefix: str, model: str, tokenizer: Tokenizer, body: CompletionBody | ChatBody) -> None:
        self.id = f"{id_prefix}-{uuid.uuid4().hex}"
        self._head: Json = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._wants_logprobs = body.wants_logprobs
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._wants_token_ids = bool(body.return_token_ids)
        self._tokens_as_ids = bool(body.return_tokens_as_token_ids)
        self._prompts: list[list[int]] = []
        self._num_completions = 1  # of each prompt
        self._usage_at_end = body.includes_usage
        self._usage_in_chunks = body.continuous_usage
        self._choices: dict[int, _Choice] = {}

    def begin(self, requests: Sequence[PreparedRequest]) -> None:
        if self._wants_token_ids:
            self._prompts = [request.token_ids for request in requests]
            self._num_completions = requests[0].sampling.n

    def add(self, delta: ChoiceDelta) -> None:
        collected, output = self._choice(delta.choice), delta.output
        self._collect(collected, delta)
        collected.logprobs.extend(output.logprobs)
        collected.prompt_logprobs = collected.prompt_logprobs or output.prompt_logprobs
        if self._wants_token_ids:
            collected.token_ids.extend(output.token_ids)
            collected.weight_versions.extend([output.weight_version] * len(output.token_ids))
        if output.finish_reason is not None:
            collected.finish_reason = _finish_reason(delta)
            collected.extension = _extension_field(output)

    def whole(self, totals: CallTotals) -> Json:
        choices = [
            {
                "index": index,
                **self._content(choice),
                "logprobs": self._logprobs(choice, choice.logprobs),
                "finish_reason": choice.finish_reason,
                **choice.extension,
                **self._ids_json(choice.token_ids, choice.weight_versions),
                **self._choice_prompt(index),
            }
            for index, choice in sorted(self._choices.items())
        ]
        whole = {**self._head, "object": self._whole_object, "choices": choices, "usage": self._usage(totals)}
        whole |= self._call_prompt()
        return whole | ({"penstock": {"decisions": totals.decisions}} if totals.decisions else {})

    def events(self, delta: ChoiceDelta, totals: CallTotals) -> list[ServerEvent]:
        choice = self._choice(delta.choice)
        choice.prompt_logprobs = choice.prompt_logprobs or delta.output.prompt_logprobs
        # The number of cached prompt tokens is known only at the end.
        usage = {"usage": self._usage(totals)} if self._usage_in_chunks else {}
        return [ServerEvent(chunk | usage) for chunk in self._chunks(choice, delta)]

    def closing(self, totals: CallTotals) -> list[ServerEvent]:
        events = []
        if self._usage_at_end:
            events.append(self._last_chunk(usage=self._usage(totals)))
        if totals.decisions:
            events.append(self._last_chunk(penstock={"decisions": totals.decisions}))
        return [*events, ServerEvent("[DONE]")]

    def failure(self, error: PenstockError) -> list[ServerEvent]:
        """Returns the error's event. No `[DONE]` follows a failure."""
        return [ServerEvent(error_json(error), "error")]

    def _usage(self, totals: CallTotals) -> Json:
        return usage_json(totals)

    def _last_chunk(self, **fields: object) -> ServerEvent:
        """Returns a chunk without choices, like OpenAI's own last chunk with the usage."""
        return ServerEvent({**self._head, "object": self._chunk_object, "choices": [], **fields})

    @abc.abstractmethod
    def _collect(self, choice: _Choice, delta: ChoiceDelta) -> None:
        """Adds a delta's content to the choice."""

    @abc.abstractmethod
    def _content(self, choice: _Choice) -> Json:
        """Returns the fields with a whole choice's content."""

    @abc.abstractmethod
    def _chunks(self, choice: _Choice, delta: ChoiceDelta) -> Iterator[Json]:
        """Yields the chunks of a delta."""

    @abc.abstractmethod
    def _logprobs(self, choice: _Choice, logprobs: Sequence[common_pb2.TokenLogprob]) -> Json | None:
        """Returns the log-probabilities of tokens; None unless the call asks for them."""

    def _ids_json(self, token_ids: Sequence[int], weight_versions: Sequence[int]) -> Json:
        """Returns the fields with token ids and the weight version of each token; empty unless the call asks for
        them.
        """
        return {"token_ids": [*token_ids], "weight_versions": [*weight_versions]} if self._wants_token_ids else {}

    def _prompt_logprobs(self, choice: _Choice) -> Json:
        """Returns the field with the log-probabilities of the choice's prompt in vLLM's format; empty unless the call
        asks for them.
        """
        if not self._wants_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs_json(choice.prompt_logprobs)}

    def _choice_prompt(self, choice: int) -> Json:
        """Returns the field with the prompt's tokens for a choice, in formats that have it there."""
        return {}

    def _call_prompt(self) -> Json:
        """Returns the field with the prompt's tokens for the whole call, in formats that have it there."""
        return {}

    def _token_name(self, token: common_pb2.TokenLogprob | common_pb2.TopLogprob) -> str:
        return f"token_id:{token.token_id}" if self._tokens_as_ids else token.token

    def _choice(self, choice: int) -> _Choice:
        return self._choices.setdefault(choice, _Choice())

    def _chunk(self, delta: ChoiceDelta, content: Json, logprobs: Json | None = None, *, is_last: bool = False) -> Json:
        """Returns a chunk. The last chunk of a delta has the delta's tokens and, if it ends the choice, the finish
        reason.
        """
        ends = is_last and delta.output.finish_reason is not None
        reason = _finish_reason(delta) if ends else None
        entry = {"index": delta.choice, **content, "logprobs": logprobs, "finish_reason": reason}
        if ends:
            entry |= _extension_field(delta.output)
        token_ids = delta.output.token_ids if is_last else ()
        entry |= self._ids_json(token_ids, [delta.output.weight_version] * len(token_ids))
        return {**self._head, "object": self._chunk_object, "choices": [entry]}

    def _is_worth_sending(self, output: Output) -> bool:
        """Returns whether a delta must be sent although it has no content."""
        wants_tokens = self._wants_token_ids or (self._wants_logprobs and output.logprobs)
        return bool(output.finish_reason or (wants_tokens and output.token_ids))


class CompletionResponse(OpenAiResponse):
    """The response of /v1/completions."""

    _whole_object = _chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__("cmpl", model, tokenizer, body)
        self._echo: PromptEcho | None = None
        if body.echo:
            self._echo = PromptEcho(body.prompt_texts, tokenizer.spelling, prompt_alone=body.max_tokens == 0)

    def begin(self, requests: Sequence[PreparedRequest]) -> None:
        super().begin(requests)
        if self._echo is not None:
            self._echo.begin(requests)

    def add(self, delta: ChoiceDelta) -> None:
        super().add(self._with_prompt(delta))

    def events(self, delta: ChoiceDelta, totals: CallTotals) -> list[ServerEvent]:
        return super().events(self._with_prompt(delta), self._counted(totals))

    def whole(self, totals: CallTotals) -> Json:
        return super().whole(self._counted(totals))

    def closing(self, totals: CallTotals) -> list[ServerEvent]:
        return super().closing(self._counted(totals))

    def _with_prompt(self, delta: ChoiceDelta) -> ChoiceDelta:
        return delta if self._echo is None else self._echo.extended(delta, with_logprobs=self._wants_logprobs)

    def _counted(self, totals: CallTotals) -> CallTotals:
        return totals if self._echo is None else self._echo.counted(totals)

    def _collect(self, choice: _Choice, delta: ChoiceDelta) -> None:
        choice.text.append(delta.text)

    def _content(self, choice: _Choice) -> Json:
        return {"text": "".join(choice.text), **self._prompt_logprobs(choice)}

    def _chunks(self, choice: _Choice, delta: ChoiceDelta) -> Iterator[Json]:
        output = delta.output
        if output.text or self._is_worth_sending(output):
            content: Json = {"text": output.text}
            if not choice.has_begun:
                choice.has_begun = True
                content |= self._choice_prompt(delta.choice) | self._prompt_logprobs(choice)
            yield self._chunk(delta, content, self._logprobs(choice, output.logprobs), is_last=True)

    def _choice_prompt(self, choice: int) -> Json:
        if not self._wants_token_ids:
            return {}
        return {"prompt_token_ids": self._prompts[choice // self._num_completions]}

    def _logprobs(self, choice: _Choice, logprobs: Sequence[common_pb2.TokenLogprob]) -> Json | None:
        if not self._wants_logprobs:
            return None
        found = completion_logprobs(logprobs, choice.num_characters, self._token_name)
        choice.num_characters += sum(len(token.token) for token in logprobs)
        return found


class ChatResponse(OpenAiResponse):
    """The response of /v1/chat/completions."""

    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__("chatcmpl", model, tokenizer, body)

    def whole(self, totals: CallTotals) -> Json:
        return super().whole(totals) | self._prompt_logprobs(self._choice(0))  # all choices have the same prompt

    def _usage(self, totals: CallTotals) -> Json:
        details = {"reasoning_tokens": totals.reasoning_tokens}
        return super()._usage(totals) | {"completion_tokens_details": details}

    def _collect(self, choice: _Choice, delta: ChoiceDelta) -> None:
        choice.message.add(delta.events)

    def _content(self, choice: _Choice) -> Json:
        return {"message": choice.message.to_json()}

    def _chunks(self, choice: _Choice, delta: ChoiceDelta) -> Iterator[Json]:
        output = delta.output
        if not choice.has_begun:
            choice.has_begun = True
            first = self._chunk(delta, {"delta": {"role": "assistant", "content": ""}}) | self._call_prompt()
            yield first | (self._prompt_logprobs(choice) if delta.choice == 0 else {})
        contents = message_deltas(delta.events)
        if not contents and self._is_worth_sending(output):
            contents = [{}]
        for content in contents[:-1]:
            yield self._chunk(delta, {"delta": content})
        if contents:
            logprobs = self._logprobs(choice, output.logprobs)
            yield self._chunk(delta, {"delta": contents[-1]}, logprobs, is_last=True)

    def _call_prompt(self) -> Json:
        return {"prompt_token_ids": self._prompts[0]} if self._wants_token_ids else {}

    def _logprobs(self, choice: _Choice, logprobs: Sequence[common_pb2.TokenLogprob]) -> Json | None:
        if not self._wants_logprobs:
            return None
        tokens = [{**self._token(token), "top_logprobs": [*map(self._token, token.top)]} for token in logprobs]
        return {"content": tokens}

    def _token(self, token: common_pb2.TokenLogprob | common_pb2.TopLogprob) -> Json:
        spelling = list(self._tokenizer.spelling.token_bytes(token.token_id))
        return {"token": self._token_name(token), "logprob": token.logprob, "bytes": spelling}


def _finish_reason(delta: ChoiceDelta) -> str | None:
    """Returns the finish reason of a choice: "tool_calls" if the model stopped after calling a tool."""
    reason = delta.output.finish_reason
    if reason is FinishReason.STOP and delta.called_tools:
        return "tool_calls"
    return None if reason is None else reason.value


def extension_json(output: Output) -> Json:
    """Returns what the last output of a choice reports and OpenAI's API has no field for: the `max_tokens` that
    overload lowered, the version of updated weights that the last token comes from, and the outcome of KV hints.
    """
    extension: Json = {} if output.granted_tokens is None else {"granted_max_tokens": output.granted_tokens}
    if output.weight_version:
        extension["weight_version"] = output.weight_version
    if answers := answers_json(output):
        extension["kv_hints"] = answers
    return extension


def _extension_field(output: Output) -> Json:
    extension = extension_json(output)
    return {"penstock": extension} if extension else {}


def usage_json(totals: CallTotals) -> Json:
    """Returns the usage of a call, over all of its prompts."""
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens},
    }


def error_json(error: PenstockError, prompt_fields: Collection[str] = ("text", "token_ids")) -> Json:
    """Returns OpenAI's error object, in which fields have the names of OpenAI's API.

    `prompt_fields` are the fields of the gRPC API that are called `prompt` there.
    """
    message, param = error.message, None
    if isinstance(error, InvalidInput):
        param = error.field.removeprefix("sampling.").removeprefix("chat.")
        param = "prompt" if param in prompt_fields else param
        message = error.named(param)
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
