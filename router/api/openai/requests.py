"""Defines the bodies and headers of the OpenAI-compatible calls and translates them to the gRPC request. No I/O.

Both APIs produce a `GenerateRequest`; from there on, all requests are handled in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel, ConfigDict, Discriminator, StrictBool, Tag, ValidationError, create_model

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from penstock.types import Lane
from penstock.v1 import common_pb2, inference_pb2
from penstock.wire import grammar_to_wire, kv_hints_to_wire, lane_from_name, lane_to_wire
from router.api.dialect import PLAIN_TEXT, OutputFormat
from router.api.limits import check_count
from router.api.openai.chat_prompt import FIRST_ERROR, PARTS, TEXT, ChatPrompt
from router.api.openai.fields import check_fields
from router.api.openai.json_bodies import Integer, Number, TokenId, read_json, shown
from router.api.openai.kv_hints import DynamoExtension, KvHintsFields, combined_hints
from router.api.openai.pydantic_errors import explain
from router.api.openai.structured import StructuredFields
from router.api.openai.tool_choice import read_tool_choice
from router.api.sampling_fields import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_STOP_STRINGS

LANE = "x-penstock-lane"
TIMEOUT = "x-request-timeout"  # seconds, for the whole call
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill its context
_MAX_PROMPTS = 256

_TEXTS, _IDS, _ID_LISTS = "<texts>", "<ids>", "<id lists>"
_FORMS = {
    TEXT: "text or a list of parts",
    PARTS: "a list of parts",
    _TEXTS: "text",
    _IDS: "token ids",
    _ID_LISTS: "lists of token ids",
}

# OpenAI's service tiers. "auto" means the tenant's default lane.
_TIERS: Mapping[str, Lane | None] = {
    "auto": None,
    "priority": Lane.INTERACTIVE,
    "fast": Lane.INTERACTIVE,  # another name for priority
    "default": Lane.STANDARD,
    "flex": Lane.BULK,
}

_JSON_TYPES: Mapping[int, Any] = {
    FieldDescriptor.CPPTYPE_UINT32: Integer,
    FieldDescriptor.CPPTYPE_UINT64: Integer,
    FieldDescriptor.CPPTYPE_FLOAT: Number,
    FieldDescriptor.CPPTYPE_BOOL: StrictBool,  # otherwise pydantic reads "off", "no", 0 and others as false
    FieldDescriptor.CPPTYPE_STRING: str,
}


def _not_empty(token_ids: list[int]) -> list[int]:
    """Returns the list unchanged. Raises InvalidInput if it is empty: the message cannot distinguish an empty list from
    a missing one, which allows every token.
    """
    if not token_ids:
        raise InvalidInput("allowed_token_ids", "is empty; give at least one token, or leave it out")
    return token_ids


# Conversions of values that other servers accept and the message does not.
_NORMALIZED: Mapping[str, Callable[[Any], Any]] = {
    "top_k": lambda value: 0 if value == -1 else value,  # -1 and 0 keep all tokens
    "seed": lambda value: value % (1 << 64),
    "stop": lambda value: [value] if isinstance(value, str) else value,
    "bad_words": lambda value: [value] if isinstance(value, str) else value,
    "allowed_token_ids": _not_empty,
}


def _json_type(field: Any) -> Any:
    """Returns the type in a body of a field of the message `SamplingParams`. An absent field is None."""
    if field.message_type is not None:
        value = _JSON_TYPES[field.message_type.fields_by_name["value"].cpp_type]
        # The keys of a JSON object are texts, such as "50256".
        return Annotated[dict[int, value], FIRST_ERROR] | None  # type: ignore[valid-type]
    element = _JSON_TYPES[field.cpp_type]
    if not field.is_repeated:
        return element | None
    if element is str:
        return str | Annotated[list[str], FIRST_ERROR] | None
    return Annotated[list[TokenId], FIRST_ERROR] | None


# Fields of `SamplingParams` that bodies declare differently or not at all: `logprobs` is a number for completions and a
# flag for chats.
_OWN_FORMS = frozenset(
    {
        "logprobs",
        "grammar",
        "bad_sequences",
        "include_stop",
        "keep_special_tokens",
    }
)
_SAMPLING_FIELDS = {
    name: (_json_type(field), None)
    for name, field in common_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items()
    if name not in _OWN_FORMS
}


_HARMLESS_STREAM_OPTIONS = frozenset({"include_obfuscation"})


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  # vLLM's field: adds the usage so far to every chunk


class _CommonFields(StructuredFields):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    request_id: str | None = None
    rid: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: Integer | None = None
    add_special_tokens: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    kv_hints: KvHintsFields | None = None
    nvext: DynamoExtension | None = None
    prompt_cache_retention: str | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def caller_id(self) -> str:
        return self.request_id or self.rid or ""

    @property
    def lane(self) -> Lane | None:
        """Returns the lane that the body asks for, or None. Raises InvalidInput for an unknown tier, or if tier and
        priority differ.
        """
        return read_tier(self.service_tier, self.priority)

    @property
    def output_format(self) -> OutputFormat:
        return PLAIN_TEXT

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def session(self) -> str:
        """Returns the first given field that names a session, from the most specific to the least."""
        return self.session_id or self.prompt_cache_key or self.user or ""

    def check_other_fields(self) -> None:
        """Raises InvalidInput for a field that is neither supported nor harmless."""
        check_fields(self.model_extra)
        if self.stream_options is not None:
            check_fields(self.stream_options.model_extra, "stream_options.", _HARMLESS_STREAM_OPTIONS, {})

    def request(self, request_id: str, sampling: common_pb2.SamplingParams) -> inference_pb2.GenerateRequest:
        """Returns a request that lacks only its prompt. Raises InvalidInput for values that the message cannot hold."""
        request = inference_pb2.GenerateRequest(model=self.model or "", request_id=request_id, sampling=sampling)
        for name in ("cache_salt", "truncate_prompt_tokens", "add_special_tokens"):
            _set(request, name, getattr(self, name))
        hints = combined_hints(self.kv_hints, self.nvext, self.prompt_cache_retention, self.session_id or "")
        if (wire_hints := kv_hints_to_wire(hints)) is not None:
            request.kv_hints.CopyFrom(wire_hints)
        return request

    def sampling(self) -> common_pb2.SamplingParams:
        """Returns the sampling parameters. Raises InvalidInput for values that the message cannot hold."""
        wire = common_pb2.SamplingParams()
        _set(wire, "include_stop", self.include_stop_str_in_output)
        if self.skip_special_tokens is not None:
            wire.keep_special_tokens = not self.skip_special_tokens
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None and name in _NORMALIZED:
                value = _NORMALIZED[name](value)
            _set(wire, name, value)
        grammar = self.grammar()
        if grammar is not None:
            wire.grammar.CopyFrom(grammar_to_wire(grammar))
        return wire


if TYPE_CHECKING:

    class _SamplingBody(_CommonFields):
        max_tokens: int | None
        prompt_logprobs: int | None

else:
    _SamplingBody = create_model("_SamplingBody", __base__=_CommonFields, **_SAMPLING_FIELDS)


def _prompt_form(prompt: object) -> str | None:
    """Returns the form of a prompt, judged by its first element, so that pydantic tries only one type; None if there is
    no such form.
    """
    if not isinstance(prompt, list):
        return TEXT if isinstance(prompt, str) else None
    first = prompt[0] if prompt else 0
    if isinstance(first, str | list):
        return _TEXTS if isinstance(first, str) else _ID_LISTS
    return _IDS if isinstance(first, int | float) else None


_Ids = Annotated[list[TokenId], FIRST_ERROR]


class CompletionBody(_SamplingBody):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[list[str], FIRST_ERROR, Tag(_TEXTS)]
        | Annotated[_Ids, Tag(_IDS)]
        | Annotated[list[_Ids], FIRST_ERROR, Tag(_ID_LISTS)],
        Discriminator(_prompt_form, "prompt_form", "is of another form"),
    ]
    logprobs: Integer | None = None
    echo: StrictBool | None = None

    @property
    def prompt_texts(self) -> list[str | None]:
        """Returns the text of each prompt; None if it must be decoded from its tokens, because the prompt was given as
        tokens or is truncated.
        """
        is_whole = self.truncate_prompt_tokens is None
        return [prompt if isinstance(prompt, str) and is_whole else None for prompt in _prompts(self.prompt)]

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def default_max_tokens(self) -> int | None:
        return COMPLETION_MAX_TOKENS

    def requests(self, request_id: str) -> list[inference_pb2.GenerateRequest]:
        """Returns one request for each prompt."""
        sampling = self.sampling()
        _set(sampling, "logprobs", self.logprobs)
        if self.echo:
            self._set_echo(sampling)
        prompts = _prompts(self.prompt)
        requests = []
        for rank, prompt in enumerate(prompts):
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{rank}"
            request = self.request(own_id, sampling)
            if isinstance(prompt, str):
                request.text = prompt
            else:
                _set(request, "token_ids", prompt, "prompt")
            requests.append(request)
        return requests

    def _set_echo(self, sampling: common_pb2.SamplingParams) -> None:
        """Requests the prompt's log-probabilities if the call wants any. If it wants no output, one token is generated
        nevertheless, and `PromptEcho` leaves it out.
        """
        if self.max_tokens == 0:
            sampling.max_tokens = 1
        if self.logprobs is not None:
            sampling.prompt_logprobs = max(sampling.logprobs, sampling.prompt_logprobs)


class ChatBody(_SamplingBody, ChatPrompt):
    """The body of POST /v1/chat/completions."""

    max_completion_tokens: Integer | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Integer | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    include_reasoning: StrictBool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def default_max_tokens(self) -> int | None:
        return None

    @property
    def output_format(self) -> OutputFormat:
        tools = self.functions()
        return OutputFormat(
            is_chat=True,
            tools=tools,
            tool_choice=read_tool_choice(self.tool_choice, tools),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            include_reasoning=self.include_reasoning is not False,
        )

    def check_other_fields(self) -> None:
        super().check_other_fields()
        self.check_messages()

    def requests(self, request_id: str) -> list[inference_pb2.GenerateRequest]:
        """Returns the call's only request, as a list like `CompletionBody.requests`."""
        sampling = self.sampling()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidInput("max_tokens", "differs from max_completion_tokens; give only one of them")
            _set(sampling, "max_tokens", self.max_completion_tokens, "max_completion_tokens")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidInput("top_logprobs", f"is {self.top_logprobs}; give a value from 0 to {MAX_LOGPROBS}")
        if self.logprobs:
            _set(sampling, "logprobs", self.top_logprobs or 0, "top_logprobs")
        elif self.top_logprobs is not None:
            raise InvalidInput("top_logprobs", f"is {self.top_logprobs} without logprobs; set logprobs to true")
        request = self.request(request_id, sampling)
        self.fill(request)
        return [request]


BodyT = TypeVar("BodyT", CompletionBody, ChatBody)
ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_body(kind: type[BodyT], raw: bytes, limits: LimitsConfig) -> BodyT:
    """Returns the validated body. Raises InvalidInput that names the field.

    The limits bound the cost, whatever the body contains.
    """
    return validate_body(kind, read_json(raw, limits), limits)


def validate_body(kind: type[BodyT], fields: Any, limits: LimitsConfig) -> BodyT:
    """Returns the validated body for parsed JSON. Other dialects pass the fields of a translated `ChatBody`."""
    body = validate_fields(kind, fields, limits)
    body.check_other_fields()
    return body


def validate_fields(kind: type[ModelT], fields: Any, limits: LimitsConfig) -> ModelT:
    """Returns a body after validating only its declared fields. Raises InvalidInput that names the field."""
    if isinstance(fields, dict):
        _check_lengths(fields, limits)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise explain(error, _FORMS) from error


def _check_lengths(fields: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Checks the lengths of lists and texts before their elements are validated. Raises InvalidInput."""
    prompt = fields.get("prompt")
    form = _prompt_form(prompt)
    if form == TEXT:
        check_count("prompt", len(fields["prompt"]), limits.prompt_characters, "characters")
    elif form == _IDS:
        check_count("prompt", len(fields["prompt"]), limits.prompt_tokens, "tokens")
    elif isinstance(prompt, list) and len(prompt) > _MAX_PROMPTS and form is not None:
        raise InvalidInput("prompt", f"has {len(prompt)} prompts; give at most {_MAX_PROMPTS} in a call")
    for name, limit, what in (
        ("messages", limits.messages, "messages"),
        ("tools", limits.tools, "tools"),
        ("tokens", limits.prompt_tokens, "tokens"),
        ("stop", MAX_STOP_STRINGS, "strings"),
        ("stop_token_ids", limits.stop_token_ids, "tokens"),
        ("logit_bias", limits.logit_bias, "entries"),
        ("allowed_token_ids", limits.allowed_token_ids, "tokens"),
        ("bad_words", MAX_BAD_WORDS, "words"),
    ):
        value = fields.get(name)
        if isinstance(value, list | dict):
            check_count(name, len(value), limit, what)


def read_tier(service_tier: str | None, priority: int | None = None) -> Lane | None:
    """Returns the lane for OpenAI's tier or vLLM's priority, of which lower values go first; None if neither sets one.

    Raises InvalidInput for an unknown tier, or if the two differ.
    """
    lane = None
    if service_tier is not None:
        if service_tier not in _TIERS:
            raise InvalidInput("service_tier", f"is {service_tier[:100]!r}; give one of {', '.join(_TIERS)}")
        lane = _TIERS[service_tier]
    if not priority:
        return lane
    by_priority = Lane.INTERACTIVE if priority < 0 else Lane.BULK
    if lane not in (None, by_priority):
        raise InvalidInput("priority", f"is {priority}, but service_tier is {service_tier!r}; give only one of them")
    return by_priority


def read_lane(headers: Mapping[str, str], body_lane: Lane | None) -> common_pb2.Lane:
    """Returns the lane of the header or else of the body. Raises InvalidInput if the two differ."""
    name = headers.get(LANE)
    lane = body_lane if name is None else lane_from_name(name, LANE)
    if body_lane is not None and lane is not body_lane:
        raise InvalidInput(LANE, f"is {name!r}, but the body asks for {body_lane.value}; give only one of them")
    return common_pb2.LANE_UNSPECIFIED if lane is None else lane_to_wire(lane)


def read_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Returns the call's timeout from its header, or None. Raises InvalidInput."""
    given = headers.get(TIMEOUT)
    if given is None:
        return None
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise InvalidInput(TIMEOUT, f"is {given[:100]!r}; give a number of seconds above 0")
    return timeout_s


def _prompts(prompt: str | Sequence[Any]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidInput("prompt", "is empty; give text or token ids")
    return [list(prompt)] if isinstance(prompt[0], int) else list(prompt)


def _set(
    message: common_pb2.SamplingParams | inference_pb2.GenerateRequest, name: str, value: Any, given: str = ""
) -> None:
    """Sets a field of a message unless the value is None.

    Raises InvalidInput for a value that the field cannot hold; `given` is the client's name of the field if it differs.
    """
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
        raise InvalidInput(given or name, f"is {shown(value)}; {_fix(name, value, error)}") from error


def _fix(name: str, value: Any, error: Exception) -> str:
    """Returns advice on a value that a message's field cannot hold, for an error."""
    numbers = [number for number in (value if isinstance(value, list | dict) else [value]) if isinstance(number, int)]
    if any(number < 0 for number in numbers):
        return f"give {int(name in ('max_tokens', 'n'))} or more"
    if any(number >= 1 << 32 for number in numbers):
        return f"give at most {(1 << 32) - 1}"
    return f"give a value that the message can hold: {error}"
