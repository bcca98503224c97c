"""Tests pages that change after they have landed: with checksums on, the prompt is recomputed."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_worker.prefill.transfer_table import FailedTransfer, LandedTransfer
from decode_worker.server import DecodeServer
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.generate import generate
from kv_transfer.transports import nixl_agent
from penstock.config import EngineConfig
from penstock.types import Role, TransferKey
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import GREEDY, SALT, caller, wait_until_empty, worker_config, workers

PROMPT = [(5 * i) % 300 + 2 for i in range(400)]
TRANSPORTS = [
    "shm",
    "torch",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


class BitFlipper:
    """Stands in for faulty memory: flips one bit of the first page of a transfer when the page has landed."""

    def __init__(self, worker: DecodeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._table = worker._transfers
        self._bytes_PB = worker._engine.kv_pages.view(worker._engine.pool.num_pages, -1).numpy().view("uint8")
        self._on_arrival = self._table.on_arrival
        self.flipped: int | None = None  # the page
        monkeypatch.setattr(self._table, "on_arrival", self._flip)

    def _flip(self, key: TransferKey, first_index: int, num_pages: int) -> LandedTransfer | FailedTransfer | None:
        transfer = self._table._transfers.get(key)
        if transfer is not None and self.flipped is None:
            self.flipped = transfer.session.pages[first_index]
            self._bytes_PB[self.flipped, 3] ^= 1 << 6  # a bit of the exponent
        return self._on_arrival(key, first_index, num_pages)


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_flipped_bit_is_detected_and_its_prompt_recomputed(
    model: Path, transport: str, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums nothing detects the flip, unless the logits overflow and end the request."""
    wanted = generate(Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1)), PROMPT, GREEDY, SALT)
    transfer = {"transport": transport, "checksums": checksums}
    async with workers(
        worker_config(Role.PREFILL, model, prefill={"max_batch_tokens": 8}, transfer=transfer),  # 50 steps
        worker_config(Role.DECODE, model, transfer=transfer),
    ) as (prefill, decode):
        assert isinstance(prefill, PrefillServer)
        assert isinstance(decode, DecodeServer)
        flipper = BitFlipper(decode.worker, monkeypatch)
        async with caller(decode) as router:
            answer = await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
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
