"""Steps of a replica in two ranks: scheduled ahead, with tokens fed back between them, and replayed from graphs.

Ranks are threads here; CUDA's part of the graphs is doubled.
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
from hypothesis import given
from hypothesis import strategies as st

from engine import drawing
from engine.cuda_graphs import GraphRunner
from engine.engine import Engine
from engine.generate import generate
from engine.part import Part
from engine.rank_member import RankMember
from engine.rank_process import serve_rank
from engine.rank_progress import RankProgress
from kv_transfer.rank import extend
from penstock.config import EngineConfig
from penstock.errors import InternalError
from penstock.types import Role, SamplingParams
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.serving import caller, wait_until_empty, worker_config, workers
from tests.test_engine_graphs import GraphDouble, decode
from tests.test_tensor_parallel import launch_threads

NUM_RANKS = 2


def config(model: Path, **settings: object) -> EngineConfig:
    defaults = {"model": str(model), "dtype": "float32", "num_pages": 64, "num_threads": 1}
    return EngineConfig.model_validate({**defaults, **settings})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    """What one rank draws, one step at a time."""
    return decode(Engine.load(config(model)), ahead=False)


@pytest.fixture
def members() -> list[RankMember]:
    """The ranks that were launched, but for the first."""
    return []


@pytest.fixture
def launch(members: list[RankMember]) -> Callable[[Path, int], None]:
    def note(member: RankMember) -> Any:
        members.append(member)
        return extend(member)

    def launch(control: Path, num_ranks: int) -> None:
        for _ in range(num_ranks):
            serve = partial(serve_rank, control, note, on_orphaned=lambda: None)
            threading.Thread(target=serve, name="rank", daemon=True).start()

    return launch


@pytest.fixture
def split(model: Path, launch: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Two ranks that would capture graphs."""
    monkeypatch.setattr(Part, "captures_graphs", True)
    monkeypatch.setattr("engine.ranked_graphs.CudaCapture", GraphDouble)
    engine = Engine.load(config(model, tensor_parallel=NUM_RANKS, cuda_graphs=5), launch=launch)
    try:
        yield engine
    finally:
        engine.close()


def test_steps_ahead_and_steps_from_graphs_draw_what_one_rank_draws(
    split: Engine, members: list[RankMember], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
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
    split.ranks.ask("zero", [])  # once they are through with their steps
    ranks = [split._graphs, *(member.graphs for member in members)]
    replays = {(graphs.num_replays, graphs.num_eager) for graphs in ranks if graphs is not None}
    assert len(ranks) == NUM_RANKS
    assert len(replays) == 1, "a step is replayed on all ranks or on none"
    ((num_replays, num_eager),) = replays
    assert num_replays > 0
    assert num_eager > 0


def test_a_rank_that_cannot_capture_keeps_all_from_it(
    split: Engine, members: list[RankMember], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
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


class Event:
    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


@given(with_event=st.lists(st.booleans(), max_size=8), order=st.randoms(use_true_random=False))
def test_what_a_rank_was_told_is_done_when_its_device_is_past_it(with_event: list[bool], order: Random) -> None:
    progress, events = RankProgress(), [Event() if one else None for one in with_event]
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
            told = [(await router.answer(stream)).token_ids for stream in streams]
        await wait_until_empty(prefill, worker)
    return told


async def test_workers_of_two_ranks_run_ahead_and_get_over_steps_that_fail(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws that depend on the text fail whenever they are part of a batch. The step that was given behind one that
    fails is computed in vain, on every rank."""
    for role in ("prefill", "decode"):
        monkeypatch.setattr(f"{role}_worker.server.launch_ranks", launch_threads)
    kinds = [
        SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=19, temperature=0.9, top_p=0.9, seed=7, min_tokens=3, ignore_eos=True),
    ]
    expected = await _answers(model, 1, False, kinds)
    told = {"ahead": 0, "in vain": 0}
    compute, in_vain = Engine.compute, Engine.compute_in_vain

    def count(engine: Engine, step: drawing.LaidOutStep, before: Any) -> Any:
        told["ahead"] += step.awaited is not None
        return compute(engine, step, before)

    def count_in_vain(engine: Engine, step: drawing.LaidOutStep) -> None:
        told["in vain"] += 1
        in_vain(engine, step)

    monkeypatch.setattr(Engine, "compute", count)
    monkeypatch.setattr(Engine, "compute_in_vain", count_in_vain)
    assert await _answers(model, NUM_RANKS, True, kinds) == expected
    assert told["ahead"] > 0
    assert told["in vain"] == 0

    def fail(*arguments: object) -> None:
        raise InternalError("no finite distribution")

    monkeypatch.setattr(drawing, "sample", fail)
    assert await _answers(model, NUM_RANKS, True, kinds) == expected
    assert told["in vain"] > 0
