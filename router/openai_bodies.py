"""Bodies of the OpenAI-compatible calls, and their translation to the gRPC request that both fronts share. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import InvalidInput
from penstock.v1 import common_pb2, inference_pb2

COMPLETION_MAX_TOKENS = 16  # what the OpenAI API says for /v1/completions; a chat goes to the end of its context
_MAX_PROMPTS = 256
_CHAT_ROLES = {"developer": "system"}  # OpenAI's newer name

# Fields that would change the answer and that nobody here obeys: refused unless they ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "best_of": (0, 1),
    "suffix": ("",),
    "echo": (False,),
    "use_beam_search": (False,),
    "prompt_logprobs": (0,),
    "length_penalty": (1.0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_embeds": (),
}


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Sampling(BaseModel):
    """What both calls take. An absent field is the model's default."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    user: str | None = None  # names the session, where no header does
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    service_tier: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> common_pb2.SamplingParams:
        """Raises InvalidInput for values that the wire cannot even hold."""
        wire = common_pb2.SamplingParams()
        for name in (
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "n",
            "ignore_eos",
        ):
            _set(wire, name, getattr(self, name))
        _set(wire, "top_k", 0 if self.top_k == -1 else self.top_k)  # -1 keeps all, in other servers
        _set(wire, "seed", self.seed if self.seed is None else self.seed % (1 << 64))
        _set(wire, "stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        _set(wire, "stop_token_ids", self.stop_token_ids)
        _set(wire, "logit_bias", self.logit_bias)
        return wire


class CompletionBody(_Sampling):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None

    @property
    def default_max_tokens(self) -> int | None:
        return COMPLETION_MAX_TOKENS

    def requests(self, request_id: str) -> list[inference_pb2.GenerateRequest]:
        """One a prompt."""
        sampling = self.sampling()
        _set(sampling, "logprobs", self.logprobs)
        prompts = _prompts(self.prompt)
        requests = []
        for rank, prompt in enumerate(prompts):
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{rank}"
            request = inference_pb2.GenerateRequest(model=self.model, request_id=own_id, sampling=sampling)
            if isinstance(prompt, str):
                request.text = prompt
            else:
                _set(request, "token_ids", prompt, "prompt")
            requests.append(request)
        return requests


class TextPart(BaseModel):
    type: str
    text: str = ""


class ChatMessage(BaseModel):
    role: str
    content: str | list[TextPart] | None = None

    def text(self, number: int) -> str:
        if isinstance(self.content, str):
            return self.content
        for part in self.content or ():
            if part.type != "text":
                raise InvalidInput(f"messages[{number}].content", f"has a part of type {part.type!r}; give text only")
        return "".join(part.text for part in self.content or ())


class ChatBody(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def default_max_tokens(self) -> int | None:
        return None

    def requests(self, request_id: str) -> list[inference_pb2.GenerateRequest]:
        sampling = self.sampling()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidInput("max_tokens", "differs from max_completion_tokens; give one of them")
            _set(sampling, "max_tokens", self.max_completion_tokens, "max_completion_tokens")
        if self.logprobs:
            _set(sampling, "logprobs", self.top_logprobs or 0, "top_logprobs")
        elif self.top_logprobs is not None:
            raise InvalidInput("top_logprobs", f"is {self.top_logprobs} without logprobs; set logprobs to true")
        messages = [
            inference_pb2.ChatMessage(role=_CHAT_ROLES.get(one.role, one.role), content=one.text(number))
            for number, one in enumerate(self.messages)
        ]
        request = inference_pb2.GenerateRequest(
            model=self.model, request_id=request_id, messages=messages, sampling=sampling
        )
        return [request]


BodyT = TypeVar("BodyT", CompletionBody, ChatBody)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """Raises InvalidInput that names the field."""
    try:
        raw.decode()
        body = kind.model_validate_json(raw)
    except UnicodeDecodeError as error:
        raise InvalidInput("body", f"is not valid UTF-8 ({error.reason} at byte {error.start}); send UTF-8") from error
    except ValidationError as error:
        raise _explain(error) from error
    for name, harmless in _UNSUPPORTED.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in harmless:
            raise InvalidInput(name, f"= {json.dumps(value)[:100]} is not supported; leave it out")
    return body


def _explain(error: ValidationError) -> InvalidInput:
    """The first problem; of a union, the field itself."""
    problems = error.errors(include_url=False)
    first = problems[0]
    field = str(first["loc"][0]) if first["loc"] else "body"
    parts = [str(part) for part in first["loc"]]
    if len(problems) == 1 and len(parts) > 1:
        field = parts[0] + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts[1:])
    if first["type"] == "missing":
        return InvalidInput(field, "is missing; give it")
    if first["type"] == "json_invalid":
        return InvalidInput("body", f"is no JSON: {first['msg']}")
    shown = repr(first["input"])
    return InvalidInput(field, f"is {shown[:100]}: {first['msg']}")


def _prompts(prompt: str | Sequence[Any]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidInput("prompt", "is empty; give text or token ids")
    if len(prompt) > _MAX_PROMPTS and not isinstance(prompt[0], int):
        raise InvalidInput("prompt", f"has {len(prompt)} prompts; give at most {_MAX_PROMPTS} in a call")
    return [list(prompt)] if isinstance(prompt[0], int) else list(prompt)


def _set(
    message: common_pb2.SamplingParams | inference_pb2.GenerateRequest, name: str, value: Any, given: str = ""
) -> None:
    """Sets a field where there is a value. Raises InvalidInput under the name that the client gave it."""
    if value is None:
        return
    try:
        if isinstance(value, dict):
            getattr(message, name).update(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (ValueError, TypeError) as error:
        raise InvalidInput(given or name, f"is {str(value)[:100]}: {error}") from error
