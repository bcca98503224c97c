"""Reads the bodies and builds the answers of /tokenize and /detokenize, in vLLM's format. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StrictBool

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from penstock.v1 import inference_pb2
from router.api.dialect import Json
from router.api.openai.chat_prompt import FIRST_ERROR, ChatPrompt
from router.api.openai.fields import check_fields
from router.api.openai.json_bodies import TokenId, read_json
from router.api.openai.requests import validate_fields

_REFUSED = {"chat_template": (), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "return_offsets": (False,)}


class _TokenizeFields(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False


class TokenizeTextBody(_TokenizeFields):
    """The body of POST /tokenize with a text."""

    prompt: str

    def request(self) -> inference_pb2.TokenizeRequest:
        check_fields(self.model_extra, refused=_REFUSED)
        wire = inference_pb2.TokenizeRequest(model=self.model or "", text=self.prompt)
        if self.add_special_tokens is not None:
            wire.add_special_tokens = self.add_special_tokens
        return wire


class TokenizeChatBody(_TokenizeFields, ChatPrompt):
    """The body of POST /tokenize with messages, which the chat template renders."""

    def request(self) -> inference_pb2.TokenizeRequest:
        """Returns the gRPC request. Raises InvalidInput."""
        check_fields(self.model_extra, refused=_REFUSED)
        self.check_messages()
        wire = inference_pb2.TokenizeRequest(model=self.model or "")
        self.fill(wire)
        if self.add_special_tokens is not None:
            wire.add_special_tokens = self.add_special_tokens
        return wire


class DetokenizeBody(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST_ERROR]


TokenizeBody = TokenizeTextBody | TokenizeChatBody


def parse_tokenize_body(raw: bytes, limits: LimitsConfig) -> TokenizeBody:
    """Returns the validated body. Raises InvalidInput that names the field."""
    fields = read_json(raw, limits)
    if isinstance(fields, dict) and ("prompt" in fields) == ("messages" in fields):
        raise InvalidInput("prompt", "give exactly one of prompt and messages")
    if isinstance(fields, dict) and "messages" in fields:
        return validate_fields(TokenizeChatBody, fields, limits)
    return validate_fields(TokenizeTextBody, fields, limits)


def parse_detokenize_body(raw: bytes, limits: LimitsConfig) -> DetokenizeBody:
    """Returns the validated body. Raises InvalidInput that names the field."""
    body = validate_fields(DetokenizeBody, read_json(raw, limits), limits)
    check_fields(body.model_extra, refused={})
    return body


def tokenized_json(token_ids: Sequence[int], texts: Sequence[str] | None, context_length: int | None) -> Json:
    """Returns the answer of /tokenize. `texts` are the tokens' texts; None if the call does not ask for them."""
    return {
        "count": len(token_ids),
        "max_model_len": context_length,
        "tokens": list(token_ids),
        "token_strs": None if texts is None else list(texts),
    }
