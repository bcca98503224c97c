"""Tests that vLLM's own classes decode what workers publish; PENSTOCK_VLLM_PYTHON names an interpreter with vLLM."""

from __future__ import annotations

import os
import subprocess

import pytest

from penstock.kv.block_events import BlocksCleared, BlocksRemoved, BlocksStored, encode_batch

PYTHON = os.environ.get("PENSTOCK_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not PYTHON, reason="PENSTOCK_VLLM_PYTHON names no interpreter with vLLM"),
]
DECODE = """
import sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.Decoder(KVEventBatch).decode(sys.stdin.buffer.read())
print(batch.ts, batch.data_parallel_rank)
for event in batch.events:
    print(event)
"""


def test_batches_are_decoded_field_by_field() -> None:
    events = [
        BlocksCleared(),
        BlocksStored((2**64 - 1, 5), None, tuple(range(32)), 16),
        BlocksStored((6,), 5, (7, 8), 2, "STORAGE", "law", (("law", "salt"),)),
        BlocksRemoved((6,), "CPU"),
    ]
    run = subprocess.run(
        [PYTHON, "-c", DECODE], input=encode_batch(2.5, events), stdout=subprocess.PIPE, check=True, timeout=240
    )
    lines = run.stdout.decode().splitlines()[-5:]
    assert lines[0] == "2.5 0"
    assert lines[1] == "AllBlocksCleared()"
    assert "block_hashes=[18446744073709551615, 5], parent_block_hash=None" in lines[2]
    assert "block_size=16, lora_id=None, medium='GPU', lora_name=None, extra_keys=None" in lines[2]
    assert "token_ids=[7, 8], block_size=2, lora_id=None, medium='STORAGE', lora_name='law'" in lines[3]
    assert "extra_keys=[('law', 'salt')]" in lines[3]
    assert "BlockRemoved(block_hashes=[6], medium='CPU'" in lines[4]
