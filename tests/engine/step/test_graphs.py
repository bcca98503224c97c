"""Tests that replayed decode steps equal computed ones: buckets, padding, static buffers. A double stands in for
CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from decode_worker.schedule.scheduler import DecodeScheduler
from engine.engine import Engine
from engine.graphs.cuda_graphs import GraphRunner, buckets_up_to
from engine.memory.device_memory import DeviceMemory
from engine.memory.plan import plan_memory
from engine.step.batch import build_host_batch, upload_step
from engine.step.plan import EndConditions
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import DecodeConfig, EngineConfig
from penstock.types import PageId, RequestId, SamplingParams
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint

PROMPTS = [[(5 * i + 3 * j) % (VOCAB_SIZE - 2) + 2 for j in range(3 + 9 * i)] for i in range(6)]


class GraphDouble:
    """Replays by running the captured function again over the same buffers."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("graphs") / request.param)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(model), dtype="float32", num_pages=64, num_threads=1))


@pytest.fixture
def engine(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Yields the engine with one page reserved, which graphs use as their spare page."""
    monkeypatch.setattr("engine.graphs.cuda_graphs.CudaCapture", GraphDouble)
    spare = loaded.pool.allocate(1)
    yield loaded
    loaded._graphs = None
    loaded.pool.release(spare)


def make_graphs(engine: Engine, buckets: list[int]) -> GraphRunner:
    spare = next(page for page in range(64) if engine.pool.num_references(PageId(page)))
    engine._graphs = GraphRunner(engine.runner.run, buckets, 128, engine.layout.page_size, spare, torch.device("cpu"))
    return engine._graphs


def decode(engine: Engine, ahead: bool, counts: list[int] | None = None) -> list[list[int]]:
    """Returns the tokens of all prompts, which end at different times; appends the size of each step to `counts`."""
    rows = RowTable(engine.layout.page_size, EndConditions((), engine.model.context_length))
    scheduler = DecodeScheduler(
        engine.pool, engine.prefix_cache, engine.layout.page_size, DecodeConfig(max_batch_sequences=6), rows
    )
    sequences = []
    for i, prompt in enumerate(PROMPTS):
        penalty = 1.0 + 0.5 * (i % 3 == 2)
        sampling = SamplingParams(
            max_tokens=9 + 5 * i, temperature=0.8 * (i % 2), seed=i, repetition_penalty=penalty, ignore_eos=True
        )
        sequences.append(Sequence(RequestId(str(i)), list(prompt), len(prompt), sampling, b"salt"))
        scheduler.track(sequences[-1])
        scheduler.compute_here(sequences[-1])
    running = set(sequences)
    plan, before = scheduler.schedule(), None
    while plan:
        step = engine.prepare(plan)
        engine.announce(step)
        following = scheduler.schedule_ahead() if ahead else None
        step_ahead = engine.prepare(following) if following else None
        if step_ahead is not None:
            engine.announce(step_ahead)
        sampled = engine.compute(step, before)
        if counts is not None:
            counts.append(len(plan))
        sampled_ahead = engine.compute(step_ahead, sampled) if step_ahead is not None else None
        while True:
            tokens = sampled.wait()
            scheduler.record(plan, tokens.rows, tokens.chunks)
            for sequence in [each for each in running if each.num_output_tokens >= each.sampling.max_tokens]:
                running.discard(sequence)
                scheduler.forget(sequence)
            if following is None or sampled_ahead is None:
                break
            plan, sampled, following = following, sampled_ahead, None
        plan, before = scheduler.schedule(), None
    assert not running
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def test_replayed_steps_sample_the_same_tokens(engine: Engine) -> None:
    wanted = decode(engine, ahead=False)
    assert decode(engine, ahead=True) == wanted
    progress: list[tuple[int, int]] = []
    graphs = make_graphs(engine, [1, 2, 5, 9, 12])
    engine.capture_graphs(lambda done, of: progress.append((done, of)), max_sequences=8)
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]  # a bucket of 9 serves all batches up to 8
    engine.capture_graphs(lambda done, of: progress.append((done, of)), max_sequences=8)
    assert len(progress) == 4
    for ahead in (False, True):
        counts: list[int] = []
        assert decode(engine, ahead, counts) == wanted
        assert graphs.num_replays > 0
        assert graphs.num_eager > 0  # chunks of prompts
    assert {1, 2, 3, 4, 5, 6} <= set(counts)


def test_each_step_says_once_that_it_starts(engine: Engine) -> None:
    graphs, starts = make_graphs(engine, [1, 2]), 0

    def on_start() -> None:
        nonlocal starts
        starts += 1

    engine.capture_graphs()
    for count, wanted in ((2, (1, 0)), (3, (1, 1))):  # replayed, and not
        pages = [engine.pool.allocate(1) for _ in range(count)]
        work = [
            ScheduledSequence(Sequence(RequestId("r"), [5], 1, SamplingParams(max_tokens=2), b"", page), 1)
            for page in pages
        ]
        host = build_host_batch(work, engine.layout.page_size)
        graphs.forward(upload_step(host, torch.device("cpu"), graphs.tables).batch, on_start=on_start)
        for page in pages:
            engine.pool.release(page)
        assert starts == sum(wanted)
        assert (graphs.num_replays, graphs.num_eager) == wanted


def test_a_batch_above_the_largest_bucket_is_not_replayed(engine: Engine) -> None:
    wanted = decode(engine, ahead=False)
    graphs = make_graphs(engine, [1, 2, 5])
    engine.capture_graphs()
    num_steps = len(PROMPTS)
    counts: list[int] = []
    assert decode(engine, ahead=True, counts=counts) == wanted
    assert counts.count(num_steps) > 0
    assert graphs.num_eager > counts.count(num_steps)
    assert graphs.num_replays > 0


def test_padding_writes_only_to_the_spare_page(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    make_graphs(engine, [8])
    engine.capture_graphs()
    others = [page for page in range(64) if not engine.pool.num_references(PageId(page))]
    used: set[int] = set()
    allocate = engine.pool.allocate

    def note(count: int) -> list[PageId]:
        pages = allocate(count)
        used.update(pages)
        return pages

    monkeypatch.setattr(engine.pool, "allocate", note)
    engine.prefix_cache.clear()
    before = engine.kv_pages.clone()
    decode(engine, ahead=True)
    changed = {page for page in others if not torch.equal(engine.kv_pages[page], before[page])}
    assert changed <= used
    assert changed


def test_steps_run_without_graphs_if_the_device_refuses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = decode(engine, ahead=False)

    def refuse(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = make_graphs(engine, [8])
    monkeypatch.setattr("engine.graphs.cuda_graphs.CudaCapture", lambda: refuse)
    engine.capture_graphs()
    assert not graphs.is_captured
    assert decode(engine, ahead=True) == wanted


@pytest.mark.parametrize("largest", [1, 7, 64, 256, 500])
def test_buckets_waste_little(largest: int) -> None:
    buckets = buckets_up_to(largest)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == largest
    for smaller, size in itertools.pairwise(buckets):
        assert size <= 2 * smaller
        assert smaller < 32 or size - smaller <= size // 4


def test_the_memory_plan_counts_captured_steps(model: Path) -> None:
    device = DeviceMemory("a GPU", "cuda", 8 << 30)
    with_graphs, without = (
        plan_memory(EngineConfig(model=str(model), device="cuda", cuda_graphs=largest), device) for largest in (64, 0)
    )
    assert with_graphs.graph_bytes > without.graph_bytes == 0
    assert with_graphs.kv_bytes < without.kv_bytes
    captured = 0.9 * (with_graphs.graph_bytes + (32 << 20))  # the second term is the workspace of the capture stream
    assert abs(without.kv_bytes - with_graphs.kv_bytes - captured) <= with_graphs.layout.page_bytes
    split = plan_memory(EngineConfig(model=str(model), device="cuda", cuda_graphs=64, tensor_parallel=2), device)
    assert 0 < split.graph_bytes < with_graphs.graph_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_graphs_and_eager_steps_sample_the_same_on_a_gpu(model: Path) -> None:
    def load(largest: int) -> Engine:
        config = EngineConfig(model=str(model), dtype="float32", num_pages=64, device="cuda", cuda_graphs=largest)
        return Engine.load(config)

    wanted = decode(load(0), ahead=False)
    engine = load(5)
    engine.capture_graphs()
    assert engine._graphs is not None
    assert engine._graphs.is_captured
    assert decode(engine, ahead=False) == wanted
    assert decode(engine, ahead=True) == wanted
    assert engine._graphs.num_replays > 0
