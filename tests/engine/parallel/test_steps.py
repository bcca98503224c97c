"""Tests steps of a replica of two ranks that run ahead, feed tokens back between ranks, and are replayed from graphs.

Ranks are threads here, and a double stands in for CUDA's graphs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.generate import generate
from engine.graphs.cuda_graphs import GraphRunner
from engine.parallel.model_part import ModelPart
from engine.parallel.spawn import serve_rank
from engine.parallel.worker_rank import RankProgress, WorkerRank
from engine.sampling.sampler import Sampled, sample_step
from engine.sampling.step_sampling import StepSampling
from engine.step.compute import PreparedStep
from kv_transfer.ranks.rank_main import extend
from penstock.config import EngineConfig
from penstock.errors import InternalError
from penstock.types import Role, SamplingParams
from tests.engine.parallel.test_tensor_parallel import launch_threads
from tests.engine.step.test_graphs import GraphDouble, decode
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.serving import caller, wait_until_empty, worker_config, workers

NUM_RANKS = 2


def config(model: Path, **settings: object) -> EngineConfig:
    defaults = {"model": str(model), "dtype": "float32", "num_pages": 64, "num_threads": 1}
    return EngineConfig.model_validate({**defaults, **settings})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    """Returns the tokens that a single rank samples, one step at a time."""
    return decode(Engine.load(config(model)), ahead=False)


@pytest.fixture
def members() -> list[WorkerRank]:
    """Returns the launched ranks, without the first."""
    return []


@pytest.fixture
def launch(members: list[WorkerRank]) -> Callable[[Path, int], None]:
    def keep(member: WorkerRank) -> Any:
        members.append(member)
        return extend(member)

    def launch(control: Path, num_ranks: int) -> None:
        for _ in range(num_ranks):
            serve = partial(serve_rank, control, keep, on_orphaned=lambda: None)
            threading.Thread(target=serve, name="rank", daemon=True).start()

    return launch


@pytest.fixture
def split(model: Path, launch: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Yields an engine of two ranks that can capture graphs."""
    monkeypatch.setattr(ModelPart, "captures_graphs", True)
    monkeypatch.setattr("engine.graphs.cuda_graphs.CudaCapture", GraphDouble)
    engine = Engine.load(config(model, tensor_parallel=NUM_RANKS, cuda_graphs=5), launch=launch)
    try:
        yield engine
    finally:
        engine.close()


def test_run_ahead_and_replayed_steps_sample_the_tokens_of_one_rank(
    split: Engine, members: list[WorkerRank], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decode(split, ahead=True) == wanted
    captured: dict[int, list[int]] = {}
    capture = GraphRunner.capture

    def note(graphs: GraphRunner, size: int, make_capture: Any) -> None:
        capture(graphs, size, make_capture)
        captured.setdefault(id(graphs), []).append(size)

    monkeypatch.setattr(GraphRunner, "capture", note)
    split.capture_graphs(max_sequences=4)
    assert list(captured.values()) == [[4, 2, 1]] * NUM_RANKS
    for ahead in (False, True):
        assert decode(split, ahead) == wanted
    generate(split, [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))  # by `Engine.step`, which has no graphs
    assert split.ranks is not None
    split.ranks.call_all("zero", [])  # returns after the ranks' steps
    ranks = [split._graphs, *(member.graphs for member in members)]
    replays = {(graphs.num_replays, graphs.num_eager) for graphs in ranks if graphs is not None}
    assert len(ranks) == NUM_RANKS
    assert len(replays) == 1, "a step is replayed on all ranks or on none"
    ((num_replays, num_eager),) = replays
    assert num_replays > 0
    assert num_eager > 0


def test_no_rank_keeps_graphs_if_one_cannot_capture(
    split: Engine, members: list[WorkerRank], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = GraphRunner.capture

    def refuse(graphs: GraphRunner, size: int, make_capture: Any) -> None:
        capture(graphs, size, make_capture)
        if size == 2 and graphs is not split._graphs:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(GraphRunner, "capture", refuse)
    split.capture_graphs()
    for graphs in (split._graphs, *(member.graphs for member in members)):
        assert graphs is not None
        assert not graphs.is_captured
    assert decode(split, ahead=True) == wanted


class EventDouble:
    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


@given(with_event=st.lists(st.booleans(), max_size=8), order=st.randoms(use_true_random=False))
def test_messages_count_as_done_once_the_device_has_passed_them(with_event: list[bool], order: Random) -> None:
    progress, events = RankProgress(), [EventDouble() if has_event else None for has_event in with_event]
    for event in events:
        progress.add(event)
    waiting = [event for event in events if event is not None]
    order.shuffle(waiting)
    while True:
        undone = (place for place, event in enumerate(events) if event is not None and not event.happened)
        assert progress.num_done == next(undone, len(events))
        if not waiting:
            return
        waiting.pop().happened = True


async def _answers(model: Path, num_ranks: int, run_ahead: bool, kinds: list[SamplingParams]) -> list[list[int]]:
    settings = {"dtype": "float32", "num_pages": 40, "tensor_parallel": num_ranks, "run_ahead": run_ahead}
    prompts = [[(7 * i + j) % (VOCAB_SIZE - 2) + 2 for j in range(3 + 11 * i)] for i in range(6)]
    async with workers(
        worker_config(Role.PREFILL, model, engine=settings), worker_config(Role.DECODE, model, engine=settings)
    ) as (prefill, worker):
        async with caller(worker) as router:
            streams = [
                router.submit(prompt, kinds[i % len(kinds)], [prefill] if i in (1, 4) else [])
                for i, prompt in enumerate(prompts)
            ]
            gone = router.submit(prompts[2], kinds[0], [])
            await asyncio.sleep(0)
            router.cancel(gone)
            answers = [(await router.answer(stream)).token_ids for stream in streams]
        await wait_until_empty(prefill, worker)
    return answers


async def test_workers_of_two_ranks_run_ahead_and_recover_from_failed_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes sampling fail in every step that edits logits and is computed with others.

    The step behind a failed one is computed on every rank and discarded.
    """
    monkeypatch.setattr("worker.shell.launch_ranks", launch_threads)
    kinds = [
        SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=19, temperature=0.9, top_p=0.9, seed=7, min_tokens=3, ignore_eos=True),
    ]
    expected = await _answers(model, 1, False, kinds)
    counts = {"ahead": 0, "discarded": 0}
    compute, compute_discarded = Engine.compute, Engine.compute_discarded

    def count(engine: Engine, step: PreparedStep, before: Any) -> Any:
        counts["ahead"] += step.awaited_rows is not None
        return compute(engine, step, before)

    def count_discarded(engine: Engine, step: PreparedStep) -> None:
        counts["discarded"] += 1
        compute_discarded(engine, step)

    monkeypatch.setattr(Engine, "compute", count)
    monkeypatch.setattr(Engine, "compute_discarded", count_discarded)
    assert await _answers(model, NUM_RANKS, True, kinds) == expected
    assert counts["ahead"] > 0
    assert counts["discarded"] == 0

    def fail(logits: torch.Tensor, sampling: StepSampling, *others: Any) -> Sampled:
        if sampling.edits is not None:
            raise InternalError("no finite distribution")
        return sample_step(logits, sampling, *others)

    monkeypatch.setattr("engine.step.compute.sample_step", fail)
    assert await _answers(model, NUM_RANKS, True, kinds) == expected
    assert counts["discarded"] > 0
