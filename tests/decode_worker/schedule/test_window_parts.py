"""Tests streams of models in which windowed layers alternate with others: they hold the windowed parts of only the
pages in their window, and no token changes.

The real engine and scheduler run without servers. The test holds page 0 and its windowed part, which stands in for
those that were given up, and fills them with large numbers: what kernels read there must not count.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from engine.cache.windows.window_parts import WindowParts
from engine.engine import Engine
from engine.generate import generate
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId
from tests.decode_worker.schedule import test_windows
from tests.decode_worker.schedule.test_windows import PAGE_SIZE, SALT, WINDOW, prompt_of, sampling
from tests.support.engine.checkpoints import make_checkpoint

BOUND = 6  # in slots: a window, a chunk, and one partly read page at either end
NUM_PAGES = 64


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), sliding_window=WINDOW)


@functools.cache
def load(model: Path, num_slots: int | None = None, dtype: str = "float32", prefix_caching: bool = True) -> Engine:
    """Without `num_slots`, pages are whole."""
    return Engine.load(
        EngineConfig(
            model=str(model),
            num_pages=NUM_PAGES,
            num_threads=1,
            dtype=dtype,
            page_size=PAGE_SIZE,
            prefix_caching=prefix_caching,
            window_share=1.0 if num_slots is None else num_slots / NUM_PAGES,
        )
    )


def parts_of(engine: Engine) -> WindowParts:
    assert engine.pool.parts is not None
    return engine.pool.parts


class Streams(test_windows.Streams):
    """Counts the windowed parts that sequences hold, which are slots, and not their pages."""

    def num_held(self, sequence: Sequence) -> int:
        return len(sequence.windowed_pages)


def check_unused(engine: Engine) -> None:
    assert engine.pool.num_available == engine.pool.num_pages
    assert parts_of(engine).num_held == 0


def whole(model: Path, prompt: list[int], max_tokens: int, dtype: str = "float32") -> list[int]:
    """Returns the answer of an engine whose pages are whole."""
    return generate(load(model, None, dtype), prompt, sampling(max_tokens), SALT, use_prefix_cache=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_stream_equals_one_with_whole_pages(model: Path, dtype: str) -> None:
    prompt, count = prompt_of(150), 200
    wanted = whole(model, prompt, count, dtype)
    engine = load(model, BOUND + 1, dtype)
    pages, parts = engine.pool.allocate(1), parts_of(engine)
    parts.attach(pages)
    assert engine.window_kv is not None
    assert (pages[0], parts.slot_of_P[0]) == (0, 0)
    try:
        engine.window_kv[0].fill_(1e4)
        streams = Streams(engine)
        assert streams.run(streams.submit(prompt, count)) == wanted
        assert streams.most_held <= BOUND < len([*prompt, *wanted]) // PAGE_SIZE
    finally:
        engine.pool.release(pages, pages)
    check_unused(engine)


def test_triton_kernels_read_windowed_parts_by_their_own_page_table(model: Path) -> None:
    prompt = prompt_of(60, seed=7)
    engine = Engine.load(
        EngineConfig(model=str(model), num_pages=NUM_PAGES, page_size=PAGE_SIZE, window_share=0.15, attention="triton")
    )
    streams = Streams(engine)
    assert streams.run(streams.submit(prompt, 8)) == whole(model, prompt, 8)
    assert engine.runner.attention.name == "triton"


def test_a_prefix_is_found_only_where_its_last_window_is_kept(model: Path) -> None:
    prompt, engine = prompt_of(150, seed=1), load(model, BOUND)
    streams = Streams(engine)
    answer = streams.run(streams.submit(prompt, 20))
    text = [*prompt, *answer, 5]
    before = engine.prefix_cache.stats.device_hits
    wanted = whole(model, text, 20)
    assert streams.run(streams.submit(text, 20)) == wanted
    assert engine.prefix_cache.stats.device_hits - before == 160 // PAGE_SIZE
    # Few windowed parts are left, so a shorter prefix is not found, although all its pages are cached.
    short = prompt[:100]
    hashes = Sequence(RequestId("peek"), short, 100, sampling(1), SALT).hash_full_pages(PAGE_SIZE)
    assert engine.prefix_cache.peek(hashes) == 0
    num_cached = engine.prefix_cache.num_cached
    assert streams.run(streams.submit(short, 4)) == whole(model, short, 4)
    # What it has computed takes the place of pages that had lost their windowed part.
    assert engine.prefix_cache.num_cached == num_cached
    assert engine.prefix_cache.peek(hashes) == 100 // PAGE_SIZE
    assert generate(engine, text, sampling(4), SALT, chunk_tokens=16) == wanted[:4]
    streams.check()
    check_unused(engine)


def test_a_lack_of_slots_preempts_and_changes_no_token(model: Path) -> None:
    engine = load(model, 2 * BOUND, "float32", False)
    prompts = [prompt_of(17, seed=seed) for seed in (2, 3, 4, 5)]
    streams = Streams(engine)
    sequences = [streams.submit(prompt, 100) for prompt in prompts]
    while any(sequence.num_output_tokens < 100 for sequence in sequences):
        streams.step()
        for sequence in sequences:
            if sequence.num_output_tokens == 100 and sequence.pages:
                streams.scheduler.pause(sequence)
                streams.scheduler.drop_pages(sequence)
    assert sum(streams.scheduler.num_preemptions(sequence) for sequence in sequences) > 0
    assert [sequence.token_ids[17:] for sequence in sequences] == [whole(model, prompt, 100) for prompt in prompts]
    check_unused(engine)


def test_a_landing_prompt_holds_the_windowed_parts_that_later_tokens_read(model: Path) -> None:
    engine = load(model, BOUND)
    streams, prompt = Streams(engine), prompt_of(150, seed=9)
    sequence = Sequence(RequestId("r"), [*prompt, 5], 150, sampling(8), SALT)
    streams.scheduler.track(sequence)
    reservation = streams.scheduler.reserve(sequence, 160)
    assert reservation is not None
    assert (len(reservation.fresh), reservation.num_stripped, reservation.num_attached) == (10, 6, 10)
    sequence.pages = [*reservation.held, *reservation.fresh]
    sequence.num_stripped, sequence.num_attached = reservation.num_stripped, reservation.num_attached
    streams.scheduler.forget(sequence)
    check_unused(engine)


def test_a_step_without_windowed_parts_is_refused(model: Path) -> None:
    engine = load(model, BOUND)
    pages = engine.pool.allocate(1)
    sequence = Sequence(RequestId("r"), prompt_of(8), 8, sampling(1), SALT, pages)
    with pytest.raises(Exception, match="no room for windowed layers"):
        engine.step([ScheduledSequence(sequence, 8)])
    engine.pool.release(pages)
