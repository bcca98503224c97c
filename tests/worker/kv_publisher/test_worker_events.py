"""Tests that real workers publish the pages of prompts that they computed, received and decoded, and forget evicted
ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_worker.server import DecodeServer
from penstock.config import KvPublisherConfig, WorkerConfig
from penstock.kv.block_events import BlocksCleared, BlocksRemoved, BlocksStored, decode_batch
from penstock.types import Role
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.router.zmq_subscriber import ZmqSubscriber
from tests.support.serving import GREEDY, SALT, caller, until, worker_config, workers
from worker.kv_publisher.publisher import KvPublisher

PROMPT = [(5 * i) % 300 + 2 for i in range(100)]
PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def with_events(config: WorkerConfig) -> WorkerConfig:
    return config.model_copy(update={"kv_publisher": KvPublisherConfig()})


def publisher_of(server: PrefillServer | DecodeServer) -> KvPublisher:
    publisher = server.shell.publisher
    assert publisher is not None
    return publisher


def held_texts(subscriber: ZmqSubscriber) -> set[tuple[int, ...]]:
    """Returns the whole text up to the end of each held block, as a reader of the events reconstructs it."""
    texts: dict[object, tuple[int, ...]] = {}
    for _, payload in subscriber.replay(0):
        for event in decode_batch(payload):
            if isinstance(event, BlocksCleared):
                texts.clear()
            elif isinstance(event, BlocksRemoved):
                for block in event.block_hashes:
                    del texts[block]
            else:
                _store(texts, event)
    return set(texts.values())


def _store(texts: dict[object, tuple[int, ...]], event: BlocksStored) -> None:
    assert event.block_size == PAGE
    scope = (SALT.hex(),)  # a request without a tenant has another salt
    assert event.extra_keys == (None if event.parent is not None else (scope, *[None] * len(event.block_hashes[1:])))
    before = () if event.parent is None else texts[event.parent]
    for index, block in enumerate(event.block_hashes):
        before = (*before, *event.token_ids[index * PAGE : (index + 1) * PAGE])
        texts[block] = before


def prefixes(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)}


async def test_both_roles_publish_what_they_hold(model: Path) -> None:
    pool = {"engine": {"num_pages": 12}}
    async with workers(
        with_events(worker_config(Role.PREFILL, model, **pool)), with_events(worker_config(Role.DECODE, model, **pool))
    ) as (prefill, decode):
        assert isinstance(prefill, PrefillServer)
        assert isinstance(decode, DecodeServer)
        computed, received = publisher_of(prefill), publisher_of(decode)
        with (
            ZmqSubscriber(computed.port, computed.replay_port) as at_prefill,
            ZmqSubscriber(received.port, received.replay_port) as at_decode,
        ):
            async with caller(decode) as router:
                answer = await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
                whole = PROMPT + answer.token_ids[:-1]  # the last token has no KV
                await until(lambda: held_texts(at_prefill) == prefixes(PROMPT))
                await until(lambda: held_texts(at_decode) == prefixes(whole))
                other = [token + 1 for token in PROMPT]  # has no room beside the first prompt
                answer = await router.answer(router.submit(other, GREEDY, [prefill]))
                await until(lambda: prefixes(other + answer.token_ids[:-1]) <= held_texts(at_decode))
                await until(lambda: len(held_texts(at_decode)) == decode.shell.replica.engine.prefix_cache.num_cached)
                assert not prefixes(whole) <= held_texts(at_decode)
        metrics = decode.shell.service.load.metrics
        assert metrics["kv_event_batches"] >= 3
        assert metrics["kv_event_unnamed_pages"] == 0
