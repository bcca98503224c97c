"""Reads and checks the sequences that routers and other workers send to a worker. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.step.sequence import Sequence
from penstock import wire
from penstock.errors import InvalidInput
from penstock.kv.kv_hints import NO_KV_HINTS
from penstock.types import RequestId
from penstock.v1 import worker_pb2

_MAX_TENANT = 256  # most characters of a tenant's name


def sequence_from_wire(
    message: worker_pb2.DecodeSubmit | worker_pb2.PrefillStart | worker_pb2.SequenceState,
) -> Sequence:
    """Returns a sequence without pages. Raises InvalidInput if a hint is out of bounds."""
    return Sequence(
        request_id=RequestId(message.request_id),
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=wire.sampling_from_wire(message.sampling),
        salt=message.salt,
        lane=wire.lane_from_wire(message.lane),
        adapter=wire.adapter_from_wire(message.adapter),
        tenant=message.tenant[:_MAX_TENANT],
        kv_hints=wire.kv_hints_from_wire(message.kv_hints) if message.HasField("kv_hints") else NO_KV_HINTS,
    )


def check_token_ids(token_ids: Seq[int], num_to_come: int, context_length: int, vocab_size: int) -> None:
    """Raises InvalidInput unless the tokens, and `num_to_come` after them, fit into the context and the vocabulary.

    A worker does not trust routers or other workers with this check: a position or token beyond the model's tables
    would end its step loop and thus all its requests. Workers may also differ in their context length.
    """
    if not token_ids:
        raise InvalidInput("token_ids", "are empty; give at least one token")
    if len(token_ids) + num_to_come > context_length:
        raise InvalidInput(
            "token_ids",
            f"are {len(token_ids)}, but this worker holds {context_length} tokens of context; shorten the prompt",
        )
    if max(token_ids) >= vocab_size:
        raise InvalidInput("token_ids", f"hold {max(token_ids)}; the vocabulary ends at {vocab_size - 1}")
