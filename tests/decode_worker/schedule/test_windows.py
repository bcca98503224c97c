"""Tests streams of a model in which every layer has a window: they hold only its pages, and no token changes.

The real engine and scheduler run without servers. The test holds page 0, which stands in for dropped pages, and fills
it with large numbers: what kernels read there must not count.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from decode_worker.schedule.scheduler import DecodeScheduler
from engine.engine import Engine
from engine.generate import generate
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import DecodeConfig, EngineConfig
from penstock.kv.page_hash import hash_pages
from penstock.types import Lane, PageHash, RequestId, SamplingParams
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.engine.fake_engine import FakeEngine

WINDOW, PAGE_SIZE, CHUNK = 40, 16, 24
BOUND = 6  # in pages: a window, a chunk, and one partly read page at either end
SALT = b"salt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mistral", tmp_path_factory.mktemp("mistral"), sliding_window=WINDOW)


@functools.cache
def load(model: Path, dtype: str, num_pages: int, prefix_caching: bool = True, kv_dtype: str = "auto") -> Engine:
    return Engine.load(
        EngineConfig.model_validate(
            {
                "model": str(model),
                "num_pages": num_pages,
                "num_threads": 1,
                "dtype": dtype,
                "page_size": PAGE_SIZE,
                "prefix_caching": prefix_caching,
                "kv_dtype": kv_dtype,
            }
        )
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed) % (VOCAB_SIZE - 2) + 2 for i in range(length)]


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class Streams:
    """Runs sequences with one scheduler over one engine."""

    def __init__(self, engine: Engine, **config: object) -> None:
        self.engine = engine
        defaults: dict[str, object] = {"max_batch_tokens": CHUNK, "max_batch_sequences": 4, "watermark": 0.0}
        settings = DecodeConfig.model_validate(defaults | config)
        self.scheduler = DecodeScheduler(engine.pool, engine.prefix_cache, PAGE_SIZE, settings, RowTable(PAGE_SIZE))
        self.running: list[Sequence] = []
        self.most_held = 0  # by one sequence

    def num_held(self, sequence: Sequence) -> int:
        return len(sequence.held_pages)

    def submit(self, prompt: list[int], max_tokens: int, lane: Lane = Lane.STANDARD) -> Sequence:
        name = RequestId(f"r{len(self.running)}")
        sequence = Sequence(name, list(prompt), len(prompt), sampling(max_tokens), SALT, lane=lane)
        self.scheduler.track(sequence)
        self.scheduler.compute_here(sequence)
        self.running.append(sequence)
        return sequence

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.most_held = max(self.most_held, *(self.num_held(item.sequence) for item in plan))
        self.scheduler.commit(plan, self.engine.step(plan))
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.engine.prefix_cache.check_integrity()

    def run(self, sequence: Sequence) -> list[int]:
        """Steps until the sequence has its whole output, and returns it."""
        while sequence.num_output_tokens < sequence.sampling.max_tokens:
            self.step()
        self.scheduler.forget(sequence)
        return sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")], ids=str
)
def test_a_long_stream_equals_a_run_that_frees_no_page(model: Path, dtype: str, kv_dtype: str) -> None:
    prompt, count = prompt_of(150), 200
    wanted = generate(load(model, dtype, 64, kv_dtype=kv_dtype), prompt, sampling(count), SALT, use_prefix_cache=False)
    engine = load(model, dtype, BOUND + 1, kv_dtype=kv_dtype)
    [stand_in] = engine.pool.allocate(1)
    assert stand_in == 0
    try:
        if kv_dtype == "auto":
            engine.kv_pages[stand_in].fill_(1e4)
        streams = Streams(engine)
        assert streams.run(streams.submit(prompt, count)) == wanted
        assert streams.most_held <= BOUND < len([*prompt, *wanted]) // PAGE_SIZE
    finally:
        engine.pool.release([stand_in])
    assert engine.pool.num_available == engine.pool.num_pages


def test_a_prefix_is_found_after_its_first_pages_are_dropped(model: Path) -> None:
    prompt, engine = prompt_of(150, seed=1), load(model, "float32", BOUND)
    plain = load(model, "float32", 64)
    streams = Streams(engine)
    answer = streams.run(streams.submit(prompt, 20))
    text = [*prompt, *answer, 5]
    again = streams.submit(text, 20)
    wanted = generate(plain, text, sampling(20), SALT, use_prefix_cache=False)
    assert streams.run(again) == wanted
    assert engine.prefix_cache.num_cached <= BOUND < len(prompt) // PAGE_SIZE
    assert engine.prefix_cache.stats.device_hits == 160 // PAGE_SIZE
    # The single process finds the prefix too, and also frees the pages that it held.
    assert generate(engine, text, sampling(4), SALT, chunk_tokens=16) == wanted[:4]
    assert engine.pool.num_available == engine.pool.num_pages


def test_preemption_changes_no_token(model: Path) -> None:
    engine = load(model, "float32", 2 * BOUND, False)
    prompts = [prompt_of(17, seed=seed) for seed in (2, 3, 4, 5)]
    wanted = [
        generate(load(model, "float32", 64), prompt, sampling(100), SALT, use_prefix_cache=False) for prompt in prompts
    ]
    streams = Streams(engine, max_batch_sequences=4)
    sequences = [streams.submit(prompt, 100) for prompt in prompts]
    while any(sequence.num_output_tokens < 100 for sequence in sequences):
        streams.step()
        for sequence in sequences:
            if sequence.num_output_tokens == 100 and sequence.pages:
                streams.scheduler.pause(sequence)
                streams.scheduler.drop_pages(sequence)
    assert sum(streams.scheduler.num_preemptions(sequence) for sequence in sequences) > 0
    assert [sequence.token_ids[17:] for sequence in sequences] == wanted
    assert engine.pool.num_available == engine.pool.num_pages


def test_a_model_with_one_full_attention_layer_keeps_every_page(tmp_path: Path) -> None:
    model = make_checkpoint("gemma2", tmp_path, sliding_window=WINDOW)
    engine = load(model, "float32", 16)
    assert engine.prefix_cache.window.tokens is None
    streams = Streams(engine)
    sequence = streams.submit(prompt_of(150), 40)
    while sequence.num_output_tokens < 40:
        streams.step()
    assert len(sequence.held_pages) == -(-189 // PAGE_SIZE)
    streams.scheduler.forget(sequence)


def make_host_hold(engine: FakeEngine, token_ids: list[int]) -> list[PageHash]:
    """Leaves the KV of a text in host memory only, and returns the hashes of its pages."""
    text = Sequence(RequestId("before"), [*token_ids, 1], len(token_ids) + 1, sampling(1), SALT)
    text.pages = engine.pool.allocate(len(token_ids) // 4 + 1)
    engine.step([ScheduledSequence(text, len(token_ids))])
    hashes = text.hash_full_pages(4)
    engine.prefix_cache.insert(hashes, text.pages)
    engine.pool.release(text.pages)
    engine.pool.release(engine.pool.allocate(engine.pool.num_pages))
    assert engine.prefix_cache.num_cached == 0
    return hashes


def test_unfilled_pages_are_not_cached() -> None:
    """A prefix is loaded from its last window on: the pages before the window stay empty and are not cached."""
    engine, prompt = FakeEngine(40, 4, num_host_pages=20, window=9), prompt_of(48)
    hashes = make_host_hold(engine, prompt)
    settings = DecodeConfig(max_batch_tokens=CHUNK, max_batch_sequences=4, watermark=0.0)
    scheduler = DecodeScheduler(engine.pool, engine.prefix_cache, 4, settings, RowTable(4))
    sequence = Sequence(RequestId("r"), [*prompt, 5], len(prompt), sampling(8), SALT)
    scheduler.track(sequence)
    reservation = scheduler.reserve(sequence, 52)
    assert reservation is not None
    assert (len(reservation.held), reservation.num_dropped) == (12, 10)
    sequence.pages, sequence.num_dropped = [*reservation.held, *reservation.fresh], reservation.num_dropped
    assert len(sequence.held_pages) == engine.pool.num_pages - engine.pool.num_available == 3
    scheduler.join(sequence, 48)
    assert [page.page_hash for page in engine.prefix_cache.find(hashes[10:])] == hashes[10:]
    assert engine.prefix_cache.num_cached == 2
    scheduler.forget(sequence)
    assert engine.pool.num_available == engine.pool.num_pages


def test_cached_pages_that_nothing_reads_are_no_hits() -> None:
    """Pages before `num_unneeded` count neither as queries nor as hits, although all are cached."""
    engine, prompt = FakeEngine(40, 4, window=9), prompt_of(48)
    settings = DecodeConfig(max_batch_tokens=CHUNK, max_batch_sequences=4, watermark=0.0)
    scheduler = DecodeScheduler(engine.pool, engine.prefix_cache, 4, settings, RowTable(4))
    pages = engine.pool.allocate(11)
    engine.prefix_cache.insert(hash_pages(prompt, 4, SALT)[:11], pages)
    engine.pool.release(pages)
    for num_unneeded, num_found in ((10, 1), (11, 0), (0, 11)):
        before = engine.prefix_cache.stats
        sequence = Sequence(RequestId("r"), prompt, 48, sampling(8), SALT)
        scheduler.track(sequence)
        reservation = scheduler.reserve(sequence, 48, num_unneeded=num_unneeded)
        assert reservation is not None
        assert scheduler.num_cached_tokens(sequence) == 4 * num_found
        stats = engine.prefix_cache.stats
        assert stats.device_hits - before.device_hits == num_found
        assert stats.queries - before.queries == 11 - num_unneeded
        sequence.pages, sequence.num_dropped = [*reservation.held, *reservation.fresh], reservation.num_dropped
        scheduler.forget(sequence)
    assert engine.pool.num_available == engine.pool.num_pages


def test_the_single_process_caches_no_unfilled_page(model: Path) -> None:
    settings = {"model": str(model), "num_pages": 16, "num_threads": 1, "dtype": "float32", "page_size": PAGE_SIZE}
    engine = Engine.load(EngineConfig.model_validate(settings | {"host_memory_bytes": 1 << 20}))
    text = prompt_of(200, seed=7)
    wanted = generate(engine, text, sampling(4), SALT)
    engine.pool.release(engine.pool.allocate(16))  # moves everything to host memory
    assert generate(engine, text, sampling(4), SALT) == wanted
    assert engine.prefix_cache.num_cached < 200 // PAGE_SIZE
    # A shorter text reads pages before that window.
    short = text[:100]
    plain = generate(load(model, "float32", 64), short, sampling(4), SALT, use_prefix_cache=False)
    assert generate(engine, short, sampling(4), SALT) == plain
    engine.close()
