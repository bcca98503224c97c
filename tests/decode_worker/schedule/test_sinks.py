"""Tests streams with attention sinks: each holds only its first pages and those of its window, and no token changes.

The real engine and scheduler run without servers. The test holds page 0, which stands in for dropped pages, and fills
it with large numbers: kernels must not read it.
"""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path

import pytest

from decode_worker.schedule.scheduler import DecodeScheduler
from engine.engine import Engine
from engine.generate import generate
from engine.step.compute import SampledTokens
from engine.step.plan import StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import Sequence
from penstock.config import DecodeConfig, EngineConfig
from penstock.types import RequestId
from tests.decode_worker.schedule.test_windows import SALT, Streams, prompt_of, sampling
from tests.support.engine.checkpoints import make_checkpoint
from worker.metrics.page_use import measure_pages

SINKS, WINDOW, PAGE_SIZE, CHUNK = 20, 40, 16, 24
BOUND = 8  # in pages: the sinks' two, a window, a chunk, and one partly read page at either end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048)


@functools.cache
def load(model: Path, dtype: str, num_pages: int, prefix_caching: bool = True, kv_dtype: str = "auto") -> Engine:
    return Engine.load(
        EngineConfig(
            model=str(model),
            num_pages=num_pages,
            num_threads=1,
            dtype=dtype,  # type: ignore[arg-type]
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
            page_size=PAGE_SIZE,
            prefix_caching=prefix_caching,
            attention_sinks=SINKS,
            attention_window=WINDOW,
        )
    )


def whole(model: Path, prompt: list[int], max_tokens: int, dtype: str = "float32", kv_dtype: str = "auto") -> list[int]:
    """Returns the answer of a process that frees no page."""
    engine = load(model, dtype, 128, kv_dtype=kv_dtype)
    return generate(engine, prompt, sampling(max_tokens), SALT, use_prefix_cache=False)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")], ids=str
)
def test_a_long_stream_holds_its_sinks_and_its_window(model: Path, dtype: str, kv_dtype: str) -> None:
    prompt, count = prompt_of(150), 1000
    wanted = whole(model, prompt, count, dtype, kv_dtype)
    engine = load(model, dtype, BOUND + 1, kv_dtype=kv_dtype)
    [stand_in] = engine.pool.allocate(1)
    assert stand_in == 0
    try:
        if kv_dtype == "auto":
            engine.kv_pages[stand_in].fill_(1e4)
        streams = Streams(engine)
        sequence = streams.submit(prompt, count)
        assert streams.run(sequence) == wanted
        assert streams.most_held <= BOUND < len([*prompt, *wanted]) // PAGE_SIZE
    finally:
        engine.pool.release([stand_in])
    assert engine.pool.num_available == engine.pool.num_pages


def test_a_stream_keeps_its_first_pages(model: Path) -> None:
    engine = load(model, "float32", 64, False)
    streams = Streams(engine)
    sequence = streams.submit(prompt_of(150), 40)
    first: list[int] = []
    while sequence.num_output_tokens < 40:
        streams.step()
        first = first or sequence.pages[:2]
    assert sequence.has_gap
    assert sequence.held_pages[:2] == first == sequence.pages[:2]
    assert len(sequence.held_pages) <= 2 + -(-WINDOW // PAGE_SIZE) + 1
    used = measure_pages(engine.pool, [sequence], PAGE_SIZE)
    num_held = len(sequence.held_pages) * PAGE_SIZE
    num_filled = num_held - (len(sequence.pages) * PAGE_SIZE - sequence.num_computed_tokens)
    assert used.fragmentation == pytest.approx(1 - num_filled / num_held)
    streams.scheduler.forget(sequence)
    assert engine.pool.num_available == engine.pool.num_pages


def test_a_cached_prefix_is_continued(model: Path) -> None:
    prompt, engine = prompt_of(150, seed=1), load(model, "float32", 128)
    streams = Streams(engine)
    text = [*prompt, *streams.run(streams.submit(prompt, 20)), 5]
    hits = engine.prefix_cache.stats.device_hits
    again = streams.submit(text, 20)
    assert streams.run(again) == whole(model, text, 20)
    assert engine.prefix_cache.stats.device_hits - hits == 160 // PAGE_SIZE
    assert generate(engine, text, sampling(4), SALT, chunk_tokens=16) == whole(model, text, 4)
    assert engine.pool.num_available == engine.pool.num_pages


def test_pages_behind_evicted_ones_are_not_cached(model: Path) -> None:
    """Entries of dropped pages must not enter the cache in place of those that were evicted."""
    engine = load(model, "float32", 2 * BOUND)
    streams = Streams(engine)
    answers = [streams.run(streams.submit(prompt_of(150, seed=seed), 300)) for seed in (2, 3, 2)]
    assert answers == [whole(model, prompt_of(150, seed=seed), 300) for seed in (2, 3, 2)]
    text = [*prompt_of(150, seed=2), *answers[0]]
    assert streams.run(streams.submit(text, 20)) == whole(model, text, 20)
    assert engine.pool.num_available == engine.pool.num_pages


def test_preemption_changes_no_token(model: Path) -> None:
    engine = load(model, "float32", 2 * BOUND, False)
    prompts = [prompt_of(17, seed=seed) for seed in (2, 3, 4, 5)]
    streams = Streams(engine, max_batch_sequences=4)
    sequences = [streams.submit(prompt, 100) for prompt in prompts]
    while any(sequence.num_output_tokens < 100 for sequence in sequences):
        streams.step()
        for sequence in sequences:
            if sequence.num_output_tokens == 100 and sequence.pages:
                streams.scheduler.pause(sequence)
                streams.scheduler.drop_pages(sequence)
    assert sum(streams.scheduler.num_preemptions(sequence) for sequence in sequences) > 0
    assert [sequence.token_ids[17:] for sequence in sequences] == [whole(model, prompt, 100) for prompt in prompts]
    assert engine.pool.num_available == engine.pool.num_pages


def test_steps_ahead_change_no_token(model: Path) -> None:
    engine, prompt = load(model, "float32", 2 * BOUND, False), prompt_of(70, seed=6)
    settings = DecodeConfig(max_batch_tokens=CHUNK, max_batch_sequences=4, watermark=0.0)
    scheduler = DecodeScheduler(engine.pool, engine.prefix_cache, PAGE_SIZE, settings, RowTable(PAGE_SIZE))
    sequence = Sequence(RequestId("r"), list(prompt), len(prompt), sampling(200), SALT)
    scheduler.track(sequence)
    scheduler.compute_here(sequence)
    while sequence.num_uncomputed_tokens > 1 or sequence.num_output_tokens == 0:
        plan = scheduler.schedule()
        scheduler.commit(plan, engine.step(plan))
    launched: deque[tuple[StepPlan, SampledTokens]] = deque()
    num_ahead = 0
    while sequence.num_output_tokens < 200:
        plan = scheduler.schedule_ahead() if launched else scheduler.schedule()
        if plan:
            num_ahead += len(launched)
            launched.append((plan, engine.compute(engine.prepare(plan), launched[-1][1] if launched else None)))
        if len(launched) == 2 or not plan:
            oldest, sampled = launched.popleft()
            tokens = sampled.wait()
            scheduler.record(oldest, tokens.rows, tokens.chunks)
    assert num_ahead > 150
    assert sequence.token_ids[70:] == whole(model, prompt, 200)
    scheduler.forget(sequence)
    assert engine.pool.num_available == engine.pool.num_pages
