"""Tests the baselines of the transfer benchmark on a few bytes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.transfer.__main__ import bare_gloo
from benchmarks.transfer.peer import PeerProcess

NUM_BYTES = 4096


@pytest.mark.processes
def test_bare_gloo_sends_to_the_receiving_process() -> None:
    peer = PeerProcess(NUM_BYTES)
    try:
        peer.expect_ready()
        with bare_gloo(peer, torch.ones(NUM_BYTES, dtype=torch.uint8), NUM_BYTES) as send:
            assert send() > 0.0
            assert send() > 0.0
    finally:
        peer.stop()
