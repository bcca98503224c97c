"""Reads the prompts of requests: their texts, token ids or messages, which the chat template renders, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from penstock.errors import InvalidInput, Overloaded
from penstock.types import Lane
from penstock.v1 import inference_pb2
from router.admission.gate import AdmissionGate
from router.api.identity import Tenant, salted_scope
from router.api.limits import PromptRequest, num_prompt_characters, prompt_texts
from router.text.conversation import RESERVED_ARGUMENTS, Conversation
from router.text.tokenizer import Tokenizer

MANY_TOKENS = 1 << 16  # tokens, or characters, of a long prompt
_INLINE_MESSAGES = 128  # read in half a millisecond
_CHARACTERS_PER_MESSAGE = 16  # that a message counts for in the size of work
CHARACTERS_PER_TOKEN = 64  # above any prompt's average, so that a text that cannot fit is refused before tokenizing
_BYTES_PER_TOKEN = 4  # the approximate average, to price a text before tokenizing

ChatRequest = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest
ResultT = TypeVar("ResultT")


class Prompt(NamedTuple):
    token_ids: list[int]
    prepaid_tokens: int  # taken from the tenant's rate, for tokenizing


class PromptReader:
    """Tokenizes prompts; their tenant's rate pays for that."""

    def __init__(self, tokenizer: Tokenizer, gate: AdmissionGate, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._gate = gate
        self._vocab_size = vocab_size

    async def read(self, wire: inference_pb2.GenerateRequest, tenant: Tenant, lane: Lane) -> Prompt:
        """Returns the prompt, cut to `truncate_prompt_tokens`. Raises InvalidInput or Overloaded."""
        forms = {"text": wire.HasField("text"), "token_ids": bool(wire.token_ids), "messages": bool(wire.messages)}
        given = [name for name, is_given in forms.items() if is_given]
        if len(given) > 1:
            raise InvalidInput("prompt", f"is given more than once, as {' and '.join(given)}; give exactly one of them")
        if not given or (given == ["text"] and not wire.text):
            raise InvalidInput("prompt", "is empty; give text, token_ids or messages")
        if given == ["token_ids"]:
            token_ids = wire.token_ids[:]  # makes a list, three times as fast as list()
            if (highest := max(token_ids)) >= self._vocab_size:
                raise InvalidInput("token_ids", f"hold {highest}; the vocabulary ends at {self._vocab_size - 1}")
            return _truncated(wire, Prompt(token_ids, 0))
        return _truncated(wire, await self.encode(wire, tenant, lane))

    async def inspect(self, wire: PromptRequest, tenant: Tenant, work: Callable[[], ResultT]) -> ResultT:
        """Runs work that reads all messages or the text, off the event loop if they are long.

        Raises Overloaded, or what `work` raises.
        """
        num_messages, num_characters = len(wire.messages), len(wire.text)  # each access to `text` copies it
        if num_messages <= _INLINE_MESSAGES and num_characters <= MANY_TOKENS:
            return work()
        size = _CHARACTERS_PER_MESSAGE * num_messages + num_characters // CHARACTERS_PER_TOKEN
        return await self._tokenizer.off_loop(tenant.name, size, work)

    async def encode(self, wire: ChatRequest, tenant: Tenant, lane: Lane) -> Prompt:
        """Returns the token ids of the text, or of the messages as the chat template renders them.

        The tenant pays first, by the size of the text, and gets this back only if the work is refused: a thread that
        has begun is not stopped, even if its caller stops waiting. Raises InvalidInput or Overloaded.
        """
        salt = wire.cache_salt if isinstance(wire, inference_pb2.GenerateRequest) else ""
        scope, caller, gate = salted_scope(tenant.cache_scope, salt), tenant.name, self._gate
        conversation, num_bytes = await self.inspect(wire, tenant, lambda: _texts_of(wire))
        added = wire.add_special_tokens if wire.HasField("add_special_tokens") else conversation is None
        prepaid_tokens = 1 + num_bytes // _BYTES_PER_TOKEN
        gate.prepay(tenant.name, lane, prepaid_tokens)
        try:
            if conversation is not None:
                encoding = self._tokenizer.encode_chat(conversation, scope, caller, add_special_tokens=added)
            else:
                encoding = self._tokenizer.encode(wire.text, scope=scope, caller=caller, add_special_tokens=added)
            return Prompt(await encoding, prepaid_tokens)
        except Overloaded:
            gate.repay(tenant.name, prepaid_tokens)
            raise


def read_conversation(wire: ChatRequest) -> Conversation:
    """Returns the conversation of a request with messages. `check_prompt` must have passed. Raises InvalidInput."""
    chat = wire.chat
    continues = chat.continue_final_message
    if continues and chat.add_generation_prompt:
        raise InvalidInput("continue_final_message", "and add_generation_prompt are true; set one of them to false")
    return Conversation(
        messages=[_message(message) for message in wire.messages],
        tools=[_tool(tool) for tool in chat.tools],
        add_generation_prompt=chat.add_generation_prompt or not (chat.HasField("add_generation_prompt") or continues),
        continue_final_message=continues,
        template_arguments=_checked_arguments(chat.template_arguments),
        num_characters=num_prompt_characters(wire),
    )


def _message(wire: inference_pb2.ChatMessage) -> dict[str, Any]:
    """Returns a message in the format that templates expect.

    The empty content of a message with tool calls becomes None, which templates distinguish from an empty string.
    """
    message: dict[str, Any] = {"role": wire.role, "content": wire.content}
    if wire.name:
        message["name"] = wire.name
    if wire.reasoning:
        message["reasoning_content"] = message["reasoning"] = wire.reasoning
    if wire.tool_calls:
        message["content"] = wire.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in wire.tool_calls
        ]
    if wire.tool_call_id:
        message["tool_call_id"] = wire.tool_call_id
    return message


def _tool(wire: inference_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": wire.name}
    if wire.description:
        function["description"] = wire.description
    if wire.parameters:
        function["parameters"] = wire.parameters
    return {"type": "function", "function": function}


def _checked_arguments(text: str) -> str:
    """Returns the template arguments. Raises InvalidInput unless they are a JSON object without reserved names."""
    if not text:
        return ""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("chat_template_kwargs", f"is not valid JSON: {error}; give an object") from error
    if not isinstance(arguments, dict):
        raise InvalidInput("chat_template_kwargs", "is not a JSON object; give an object")
    for name in arguments:
        if name in RESERVED_ARGUMENTS or not name.isidentifier():
            raise InvalidInput("chat_template_kwargs", f"has {name[:100]!r}, which requests cannot set; leave it out")
    return text


def _texts_of(wire: PromptRequest) -> tuple[Conversation | None, int]:
    """Returns the conversation, if there is one, and the bytes of all texts of the prompt. Raises InvalidInput."""
    conversation = read_conversation(wire) if wire.messages else None
    return conversation, sum(len(text.encode()) for text in prompt_texts(wire))


def _truncated(wire: inference_pb2.GenerateRequest, prompt: Prompt) -> Prompt:
    """Returns the last `truncate_prompt_tokens` of a prompt, if it is set; what is cut off stays paid for."""
    if not wire.HasField("truncate_prompt_tokens"):
        return prompt
    num_cut = max(0, len(prompt.token_ids) - wire.truncate_prompt_tokens)
    return Prompt(prompt.token_ids[num_cut:], max(0, prompt.prepaid_tokens - num_cut))
