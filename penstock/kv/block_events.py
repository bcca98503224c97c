"""Encodes and decodes the KV event schema of vLLM 0.32, which llm-d, Dynamo and LMCache read too.

A message of the ZMQ publisher has three frames: topic, sequence number (8 bytes, big-endian), and a batch in msgpack,
`[ts, events, data_parallel_rank]`. Its events are maps with the key `type`, or arrays that begin with the type, as
older publishers send them. The schema says *block* for a page.

Source: vllm/distributed/kv_events.py. Decoding trusts nothing: sizes, counts, depth and types are bounded first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgpack

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"  # media
SEQ_BYTES = 8
END_SEQ = (-1).to_bytes(SEQ_BYTES, "big", signed=True)  # ends an answer of the replay socket
MAX_BATCH_BYTES = 1 << 20  # 200,000 tokens, far more than an engine stores in one step
_MAX_LISTS = 1 << 16  # lists and maps in one batch, at any depth; bounds the memory of a hostile batch
_MAX_NAME = 512  # characters of any string that is kept
_MAX_TOKEN = 1 << 32

BlockHash = int | bytes


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks that a medium holds, each the child of the previous one."""

    block_hashes: tuple[BlockHash, ...]
    parent: BlockHash | None  # parent of the first block; None: the block begins a prompt
    token_ids: tuple[int, ...]  # tokens of all blocks, end to end
    block_size: int
    medium: str | None = GPU
    lora_name: str | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None  # for each block, what else its hash depends on
    group: int | None = None  # number of the group of layers, if groups have separate KV


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that a medium no longer holds."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = GPU
    group: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The whole cache is empty."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared

# The order of fields in events that are arrays.
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")


class _Refused(ValueError):
    pass


def encode_batch(unix_s: float, events: Sequence[BlockEvent], rank: int = 0) -> bytes:
    """Returns the payload of one message."""
    return msgpack.packb([unix_s, [_to_map(event) for event in events], rank])


def _to_map(event: BlockEvent) -> dict[str, object]:
    if isinstance(event, BlocksCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": event.medium}
    stored: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": event.block_hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "lora_id": None,  # deprecated by vLLM in favour of the name
        "medium": event.medium,
        "lora_name": event.lora_name,
    }
    return stored if event.extra_keys is None else {**stored, "extra_keys": event.extra_keys}


def decode_batch(payload: bytes) -> list[BlockEvent]:
    """Returns the events of a message's payload. Raises a ValueError that names the fault for any other payload."""
    if len(payload) > MAX_BATCH_BYTES:
        raise ValueError(f"a batch has {len(payload)} bytes, more than {MAX_BATCH_BYTES}")
    batch = _unpack(payload)
    if not isinstance(batch, list) or not 2 <= len(batch) <= 16 or not isinstance(batch[1], list):
        raise ValueError("a batch is not an array of a time and events")
    return [_to_event(event) for event in batch[1]]


def _unpack(payload: bytes) -> object:
    num_lists = 0

    def count(value: object) -> object:
        nonlocal num_lists
        num_lists += 1
        if num_lists > _MAX_LISTS:
            raise _Refused(f"a batch has more than {_MAX_LISTS} arrays and maps")
        return value

    try:
        return msgpack.unpackb(
            payload, list_hook=count, object_hook=count, ext_hook=_refuse_extension, strict_map_key=True
        )
    except _Refused:
        raise
    except Exception as error:  # msgpack's exceptions have no other common base
        raise ValueError(f"a batch is not msgpack: {error!r}") from error


def _refuse_extension(code: int, data: bytes) -> object:
    raise _Refused(f"a batch has an extension of type {code}")


def _to_event(event: object) -> BlockEvent:
    kind, fields = _split(event)
    if kind == "AllBlocksCleared":
        return BlocksCleared()
    hashes = tuple(_block_hash(value) for value in _list(fields, "block_hashes"))
    medium, group = _name(fields, "medium"), _optional_int(fields, "group_idx")
    if kind == "BlockRemoved":
        return BlocksRemoved(hashes, medium, group)
    if kind != "BlockStored":
        raise ValueError(f"an event has the type {str(kind)[:64]!r}")
    token_ids, size = _list(fields, "token_ids"), fields.get("block_size")
    if type(size) is not int or size < 1 or len(token_ids) != size * len(hashes):
        raise ValueError(f"block_size = {str(size)[:32]} for {len(token_ids)} token_ids and {len(hashes)} block_hashes")
    if not all(type(token) is int and 0 <= token < _MAX_TOKEN for token in token_ids):
        raise ValueError("token_ids holds a value that is not a token id")
    parent = fields.get("parent_block_hash")
    return BlocksStored(
        hashes,
        None if parent is None else _block_hash(parent),
        tuple(token_ids),  # type: ignore[arg-type]
        size,
        medium,
        _name(fields, "lora_name"),
        _extra_keys(fields, len(hashes)),
        group,
    )


def _split(event: object) -> tuple[object, Mapping[str, object]]:
    if isinstance(event, dict):
        return event.get("type"), event
    if isinstance(event, list) and event:
        names = _STORED if event[0] == "BlockStored" else _REMOVED
        return event[0], dict(zip(names, event[1:], strict=False))
    raise ValueError("an event is neither a map nor an array")


def _list(fields: Mapping[str, object], name: str) -> list[object]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is not an array")
    return value


def _block_hash(value: object) -> BlockHash:
    if type(value) is int or (isinstance(value, bytes) and len(value) <= 64):
        return value
    raise ValueError("a block hash is neither an integer nor at most 64 bytes")


def _name(fields: Mapping[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is None or (isinstance(value, str) and len(value) <= _MAX_NAME):
        return value
    raise ValueError(f"{name} is not a string of at most {_MAX_NAME} characters")


def _optional_int(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    if value is None or type(value) is int:
        return value
    raise ValueError(f"{name} is not an integer")


def _extra_keys(fields: Mapping[str, object], num_blocks: int) -> tuple[tuple[object, ...] | None, ...] | None:
    value = fields.get("extra_keys")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != num_blocks:
        raise ValueError("extra_keys is not an array with an entry for each block")
    if not all(keys is None or isinstance(keys, list) for keys in value):
        raise ValueError("extra_keys holds an entry that is not an array")
    return tuple(None if keys is None else tuple(keys) for keys in value)
