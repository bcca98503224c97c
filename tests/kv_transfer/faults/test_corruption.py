"""Tests pages that change after they have landed: with checksums on, the prompt is recomputed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from decode_worker.server import DecodeServer
from engine.engine import Engine
from engine.generate import generate
from kv_transfer.transports import nixl_agent
from penstock.config import EngineConfig
from penstock.types import Role
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import GREEDY, SALT, caller, wait_until_empty, worker_config, workers

PROMPT = [(5 * i) % 300 + 2 for i in range(400)]
PAUSE_S = 0.0002
TRANSPORTS = [
    "shm",
    "torch",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


class BitFlipper(threading.Thread):
    """Stands in for faulty memory: flips one bit of the first page that is written."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(daemon=True)
        self._bytes_PB = engine.kv_pages.view(engine.pool.num_pages, -1).numpy().view("uint8")
        self._before_PB = self._bytes_PB[:, :64].copy()
        self.stopping = threading.Event()
        self.flipped: int | None = None  # the page

    def run(self) -> None:
        while self.flipped is None and not self.stopping.wait(PAUSE_S):
            written_P = (self._bytes_PB[:, :64] != self._before_PB).any(axis=1).nonzero()[0]
            if len(written_P):
                self._bytes_PB[written_P[0], 3] ^= 1 << 6  # a bit of the exponent; the copy has long passed it
                self.flipped = int(written_P[0])


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_flipped_bit_is_detected_and_its_prompt_recomputed(
    model: Path, transport: str, checksums: bool
) -> None:
    """Without checksums nothing detects the flip, unless the logits overflow and end the request."""
    wanted = generate(Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1)), PROMPT, GREEDY, SALT)
    transfer = {"transport": transport, "checksums": checksums}
    async with workers(
        worker_config(Role.PREFILL, model, prefill={"max_batch_tokens": 8}, transfer=transfer),  # 50 steps
        worker_config(Role.DECODE, model, transfer=transfer),
    ) as (prefill, decode):
        assert isinstance(decode, DecodeServer)
        flipper = BitFlipper(decode.worker._engine)
        async with caller(decode) as router:
            flipper.start()
            try:
                answer = await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
            finally:
                flipper.stopping.set()
                flipper.join(60.0)
            assert flipper.flipped is not None
            assert decode.worker._transfers.num_mismatches == int(checksums)
            if checksums:
                assert answer.token_ids == wanted
            if answer.error is None:
                assert len(answer.token_ids) == len(wanted)
            else:
                assert not checksums
                assert "no finite distribution" in str(answer.error)
        await wait_until_empty(prefill, decode)
