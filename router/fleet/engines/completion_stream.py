"""Converts the events of a streamed completion to step deltas. Pure. Checks every field of the engine's answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import InvalidInput, Overloaded, PenstockError, Unavailable
from penstock.v1 import common_pb2, worker_pb2

MAX_EVENT_BYTES = 1 << 24
_EVENT_BYTES = 1 << 16  # for an event without its prompt and tokens
_PROMPT_TOKEN_BYTES = 16  # for each prompt token, since the first event repeats the prompt
_TOKEN_BYTES, _TOP_BYTES = 256, 64  # for each token and for each of its alternatives
_TOKEN_PREFIX = "token_id:"
_MAX_TOKEN = 1 << 32
_MAX_MESSAGE = 500  # characters of an engine's error message that are kept
_MIN_LOGPROB, _MAX_LOGPROB = -9999.0, 1e30  # range that JSON and 32-bit floats can carry
_FINISH = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """The last event of a stream."""

    cached_tokens: int | None  # prompt tokens that were cached; None if the engine does not say


class BrokenStream(Exception):
    """Raised when an engine's answer is not a valid completion. The message says what is wrong with it."""


def max_event_bytes(num_prompt_tokens: int, max_tokens: int, num_alternatives: int) -> int:
    """Returns the maximum size of one event of a completion, kept low since parsed JSON takes many times its size."""
    per_token = _TOKEN_BYTES + _TOP_BYTES * num_alternatives
    return min(MAX_EVENT_BYTES, _EVENT_BYTES + _PROMPT_TOKEN_BYTES * num_prompt_tokens + per_token * max_tokens)


def read_event(line: bytes, with_logprobs: bool) -> worker_pb2.StepDelta | EngineUsage | None:
    """Returns the delta or the usage in one line of a server-sent event stream; None for other lines.

    Raises BrokenStream.
    """
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if not data or data == b"[DONE]":
        return None
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenStream("an event is not JSON") from error
    if not isinstance(event, dict):
        raise BrokenStream("an event is not an object")
    if "error" in event:
        raise BrokenStream(f"it reported: {message_of(event)}")
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise BrokenStream("an event has no choices")
    return _delta(choices[0], with_logprobs) if choices else EngineUsage(cached_tokens(event))


def cached_tokens(answer: object) -> int | None:
    """Returns the number of prompt tokens that were cached; None if the engine does not say."""
    found = answer
    for name in ("usage", "prompt_tokens_details", "cached_tokens"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if type(found) is int and 0 <= found < _MAX_TOKEN else None


def transfer_params(answer: object) -> dict[str, object]:
    """Returns the `kv_transfer_params` of a prefill engine's answer. Raises BrokenStream if it has none."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(params, dict):
        raise BrokenStream("it returned no kv_transfer_params; configure its KV connector")
    return params


def _delta(choice: object, with_logprobs: bool) -> worker_pb2.StepDelta:
    if not isinstance(choice, dict):
        raise BrokenStream("a choice is not an object")
    tokens = choice.get("token_ids") or []
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < _MAX_TOKEN for token in tokens):
        raise BrokenStream("token_ids is not a list of token ids; the engine must support return_token_ids")
    delta = worker_pb2.StepDelta(token_ids=tokens)
    if with_logprobs and tokens:
        delta.logprobs.extend(_logprobs(choice.get("logprobs"), tokens))
    reason = choice.get("finish_reason")
    if reason is not None:
        if reason not in _FINISH:
            raise BrokenStream(f"it ended with the unknown finish_reason {str(reason)[:40]!r}")
        delta.finish_reason = _FINISH[reason]
    return delta


def _logprobs(value: object, tokens: list[int]) -> list[common_pb2.TokenLogprob]:
    if not isinstance(value, dict):
        raise BrokenStream("logprobs is missing")
    chosen, tops = value.get("token_logprobs"), value.get("top_logprobs")
    if not isinstance(chosen, list) or not isinstance(tops, list) or not len(chosen) == len(tops) == len(tokens):
        raise BrokenStream("logprobs does not have one entry for each token")
    return [
        common_pb2.TokenLogprob(token_id=token, logprob=_number(logprob), top=_top(top))
        for token, logprob, top in zip(tokens, chosen, tops, strict=True)
    ]


def _top(value: object) -> list[common_pb2.TopLogprob]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise BrokenStream("top_logprobs is not a list of objects")
    return [common_pb2.TopLogprob(token_id=_token(name), logprob=_number(each)) for name, each in value.items()]


def _token(name: str) -> int:
    number = name.removeprefix(_TOKEN_PREFIX)
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise BrokenStream("top_logprobs names a token by its text, not by its id")
    return int(number)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BrokenStream("a log-probability is not a number")
    if not value < _MAX_LOGPROB:
        raise BrokenStream("a log-probability is not finite")
    return float(max(value, _MIN_LOGPROB))


def message_of(answer: object) -> str:
    """Returns the message of an engine's error, shortened and printable; "no reason" if there is none."""
    error = answer.get("error") if isinstance(answer, Mapping) else None
    found = error.get("message") if isinstance(error, Mapping) else error
    return printable(str(found)) if found else "no reason"


def printable(text: str) -> str:
    """Returns an engine's text for use in a status or a log line: shortened, with question marks for control characters
    and lone surrogates.
    """
    return "".join(each if each.isprintable() else "?" for each in text[:_MAX_MESSAGE])


def refusal(status: int, body: bytes, engine: str) -> PenstockError:
    """Returns the error for an answer whose status is not 200."""
    try:
        message = message_of(json.loads(body))
    except (ValueError, RecursionError):
        message = "no reason"
    if status in (429, 503):
        return Overloaded(f"engine {engine} is overloaded: {message}")
    if status in (400, 422):
        return InvalidInput("request", f"engine {engine} refused it: {message}")
    return Unavailable(f"engine {engine} answered with status {status}: {message}")
