"""Holds a body of another dialect after its translation to the body of a chat. Pure."""

from __future__ import annotations

from penstock.types import Lane
from penstock.v1 import inference_pb2
from router.api.dialect import OutputFormat
from router.api.openai.requests import ChatBody


class ChatTranslation:
    """Implements `router.api.dialect.DialectBody` by the translated chat."""

    def __init__(self, chat: ChatBody) -> None:
        self.chat = chat

    @property
    def streams(self) -> bool:
        return self.chat.streams

    @property
    def model(self) -> str | None:
        return self.chat.model

    @property
    def session(self) -> str:
        return self.chat.session

    @property
    def caller_id(self) -> str:
        return self.chat.caller_id

    @property
    def lane(self) -> Lane | None:
        return self.chat.lane

    @property
    def default_max_tokens(self) -> int | None:
        return self.chat.default_max_tokens

    @property
    def output_format(self) -> OutputFormat:
        return self.chat.output_format

    @property
    def grammar_field(self) -> str:
        return self.chat.grammar_field

    def requests(self, request_id: str) -> list[inference_pb2.GenerateRequest]:
        """Returns the call's only request. Raises InvalidInput."""
        return self.chat.requests(request_id)
