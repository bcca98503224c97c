"""Provides fake workers that write a given text to every chat, and routers over them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.v1 import common_pb2
from tests.router.api.test_grpc_service import TOKENIZER
from tests.support.router.router_fakes import EOS, NextToken

MODEL = "penstock-tiny"
ASSISTANT = TOKENIZER._encode(["<|assistant|>"], False)[0][0]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER._encode([text], False)[0])


def saying(text: str) -> NextToken:
    """Returns a `next_token` that answers every chat with this text and then ends."""
    token_ids = [*tokens_of(text), EOS]

    def next_token(context: Sequence[int], sampling: common_pb2.SamplingParams) -> int:
        begin = len(context) - 1 - list(reversed(context)).index(ASSISTANT)
        return token_ids[min(len(context) - begin - 1, len(token_ids) - 1)]

    return next_token


def rendered(submit: object) -> str:
    """Returns the prompt that was sent to a worker, with its special tokens."""
    return TOKENIZER.spelling.decode_all(list(submit.token_ids))  # type: ignore[attr-defined]
