"""Tests the schema of block events: vLLM's own bytes are parsed, hostile bytes are refused."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.block_events import (
    MAX_BATCH_BYTES,
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    decode_batch,
    encode_batch,
)

# The bytes that msgspec makes of vLLM 0.32's own KVEventBatch: three events as maps; and arrays of older publishers.
RECORDED = bytes.fromhex(
    "93cb41da4920401000009489a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfffffffffffffffff05b170617265"
    "6e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc00206465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7fcc80cc"
    "81cc82cc83aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f696478"
    "008ca474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739106b1706172656e745f626c6f636b5f6861736805a9746f6b65"
    "6e5f696473dc0010000102030405060708090a0b0c0d0e0faa626c6f636b5f73697a6510a76c6f72615f696403a66d656469756da3435055a96c"
    "6f72615f6e616d65a36c6177aa65787472615f6b6579739192a36c6177a473616c74a967726f75705f69647800b26b765f63616368655f737065"
    "635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a17383a474797065ac426c6f636b52656d6f766564ac626c6f63"
    "6b5f6861736865739206c4200101010101010101010101010101010101010101010101010101010101010101a66d656469756da347505581a474"
    "797065b0416c6c426c6f636b73436c656172656400"
)
RECORDED_ARRAYS = bytes.fromhex(
    "92cb3ff80000000000009396ab426c6f636b53746f72656491070692010202c092ac426c6f636b52656d6f766564910791b0416c6c426c6f636b"
    "73436c6561726564"
)
HASHES = st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32)
NAMES = st.none() | st.text(max_size=20)


@st.composite
def stored(draw: st.DrawFn) -> BlocksStored:
    hashes = tuple(draw(st.lists(HASHES, min_size=1, max_size=4)))
    size = draw(st.integers(1, 4))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size * len(hashes), max_size=size * len(hashes)))
    keys = draw(st.none() | st.just(tuple(("salt",) if index == 0 else None for index in range(len(hashes)))))
    return BlocksStored(hashes, draw(st.none() | HASHES), tuple(tokens), size, draw(NAMES), draw(NAMES), keys)


EVENTS = st.lists(
    stored() | st.builds(BlocksRemoved, st.lists(HASHES, max_size=4).map(tuple), NAMES) | st.just(BlocksCleared())
)


def test_batches_of_vllm_are_parsed() -> None:
    assert decode_batch(RECORDED) == [
        BlocksStored((2**64 - 1, 5), None, tuple(range(100, 132)), 16, "GPU", group=0),
        BlocksStored((6,), 5, tuple(range(16)), 16, "CPU", "law", (("law", "salt"),), 0),
        BlocksRemoved((6, b"\x01" * 32), "GPU"),
        BlocksCleared(),
    ]


def test_arrays_of_older_publishers_are_parsed() -> None:
    assert decode_batch(RECORDED_ARRAYS) == [
        BlocksStored((7,), 6, (1, 2), 2, None),
        BlocksRemoved((7,), None),
        BlocksCleared(),
    ]


@given(EVENTS)
def test_a_batch_survives_its_wire_format(events: list[BlockEvent]) -> None:
    assert decode_batch(encode_batch(1.0, events)) == events


STORED = {
    "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2
}  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\xc1", "not msgpack"),
        (b"", "not msgpack"),
        (b"x" * (MAX_BATCH_BYTES + 1), "bytes, more than"),
        (msgpack.packb(7), "not an array of a time and events"),
        (msgpack.packb([1.0, {}]), "not an array of a time and events"),
        (msgpack.packb([1.0, [[]] * 70_000]), "more than 65536 arrays and maps"),
        (b"\x91" * 5000 + b"\xc0", "not msgpack"),
        (msgpack.packb([1.0, [msgpack.ExtType(5, b"x")]]), "extension of type 5"),
        (msgpack.packb([1.0, [3]]), "neither a map nor an array"),
        (msgpack.packb([1.0, [{"type": "Evil", "block_hashes": []}]]), "has the type 'Evil'"),
        (msgpack.packb([1.0, [{"type": "BlockRemoved"}]]), "block_hashes is not an array"),
        (msgpack.packb([1.0, [{**STORED, "block_hashes": ["a"]}]]), "a block hash is neither"),
        (msgpack.packb([1.0, [{**STORED, "block_hashes": [True]}]]), "a block hash is neither"),
        (msgpack.packb([1.0, [{**STORED, "block_size": 0}]]), "block_size = 0"),
        (msgpack.packb([1.0, [{**STORED, "block_size": 1 << 40}]]), "block_size = 1099511627776 for 2 token_ids"),
        (msgpack.packb([1.0, [{**STORED, "token_ids": [1, -2]}]]), "not a token id"),
        (msgpack.packb([1.0, [{**STORED, "token_ids": [1, 2**32]}]]), "not a token id"),
        (msgpack.packb([1.0, [{**STORED, "medium": "x" * 600}]]), "medium is not a string of at most"),
        (msgpack.packb([1.0, [{**STORED, "lora_name": 5}]]), "lora_name is not a string"),
        (msgpack.packb([1.0, [{**STORED, "extra_keys": []}]]), "an entry for each block"),
        (msgpack.packb([1.0, [{**STORED, "extra_keys": ["ab"]}]]), "not an array"),
        (msgpack.packb([1.0, [{**STORED, "group_idx": "0"}]]), "group_idx is not an integer"),
    ],
)
def test_hostile_batches_are_refused_by_field(payload: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_value_errors(payload: bytes) -> None:
    for start in (b"", b"\x92\xcb" + bytes(8) + b"\x91"):
        try:
            decode_batch(start + payload)
        except ValueError:
            continue
