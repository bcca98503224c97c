"""Tests engines with lower cache tiers: their tokens, freed pages, settings, and statistics in messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock import wire
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.types import CacheStats, PageId, SamplingParams, WorkerLoad
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint

SALT = b"0123456789abcdef"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("tiers") / "llama")


def load(checkpoint: Path, **settings: object) -> Engine:
    config = {"model": str(checkpoint), "num_threads": 1, "dtype": "float32", "device": "cpu", **settings}
    return Engine.load(EngineConfig.model_validate(config))


@pytest.mark.parametrize("with_disk", [False, True])
def test_tokens_equal_those_of_an_engine_without_tiers(checkpoint: Path, tmp_path: Path, with_disk: bool) -> None:
    plain = load(checkpoint, num_pages=16)
    page_bytes = plain.layout.page_bytes
    disk = {"disk_bytes": 64 * page_bytes, "disk_path": str(tmp_path)} if with_disk else {}
    tiered = load(checkpoint, num_pages=8, host_memory_bytes=(4 if with_disk else 64) * page_bytes, **disk)
    prompts = [[seed % VOCAB_SIZE] * 50 + [seed + 1] * 20 for seed in range(2, 8)]
    wanted = [generate(plain, prompt, GREEDY, SALT, use_prefix_cache=False) for prompt in prompts]
    for _ in range(3):
        assert [generate(tiered, prompt, GREEDY, SALT) for prompt in prompts] == wanted
    stats = tiered.prefix_cache.stats
    assert (stats.disk_hits if with_disk else stats.host_hits) >= 2 * len(prompts) * 4 - 8
    assert tiered.pool.num_available == 8


def test_freed_pages_are_zero(checkpoint: Path) -> None:
    for zeroed, prefix_caching in ((True, False), (True, True), (False, False)):
        engine = load(checkpoint, num_pages=8, zero_freed_pages=zeroed, prefix_caching=prefix_caching)
        engine.warm_up()
        generate(engine, list(range(2, 60)), GREEDY, SALT, use_prefix_cache=prefix_caching)
        used = {page for page in range(8) if engine.kv_pages[page].any()}
        cached = {page for page in range(8) if engine.pool.is_cached(PageId(page))}
        assert used == cached if zeroed else len(used) >= 4
        assert len(cached) == (3 if prefix_caching else 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_memory_bytes": 100}, r"engine\.host_memory_bytes = 100 is less than one page, \d+ bytes; give more"),
        ({"host_memory_bytes": 1 << 55}, r"engine\.host_memory_bytes = \d+ cannot be allocated; give less"),
        (
            {"host_memory_bytes": 10**6, "disk_bytes": 9, "disk_path": "/tmp"},
            "disk_bytes = 9 is less than one page",
        ),
    ],
)
def test_an_impossible_tier_size_is_refused(checkpoint: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoint, num_pages=8, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disk_bytes": 9, "disk_path": "/tmp"}, "engine.host_memory_bytes is 0; set it too"),
        ({"host_memory_bytes": 9, "disk_bytes": 9}, "set both or neither"),
        ({"host_memory_bytes": 9, "disk_path": "/tmp"}, "set both or neither"),
        ({"host_memory_bytes": 9, "prefix_caching": False}, "set one of them"),
    ],
)
def test_contradictory_tier_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.model_validate({"model": "m", **settings})


def test_stats_survive_their_wire_format() -> None:
    stats = CacheStats(*range(1, 11))
    assert wire.load_from_wire(wire.load_to_wire(WorkerLoad(cache=stats))).cache == stats
