"""Tests the thread that steps and captures of a GPU share: it outlives roles, and its current device is the
engine's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engine.engine import Engine
from engine.graphs.cuda_graphs import CudaCapture
from engine.parallel.collectives import TorchGroup
from engine.parallel.model_part import select_device
from engine.parallel.shard import Shard
from engine.step.compute import StepTokens
from engine.step.job_thread import JobThread
from engine.step.sequence import ScheduledSequence, Sequence
from engine.step.thread import StepThread
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.types import RequestId, SamplingParams
from tests.support.engine.checkpoints import make_checkpoint


class OneToken:
    def wait(self) -> StepTokens:
        return StepTokens(np.array([], np.int64), [7])


def test_a_job_thread_runs_calls_in_order_and_raises_what_they_raise() -> None:
    thread, seen = JobThread("test"), list[int]()
    for number in range(5):
        thread.post(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert thread.run(lambda: len(seen)) == 5
    with pytest.raises(ValueError, match="invalid literal"):
        thread.run(lambda: int("x"))
    assert seen == [0, 1, 2, 3, 4]
    assert thread.close()


def test_the_shared_thread_outlives_the_role_that_used_it() -> None:
    """A worker that flips its role gets a new step driver, but its graphs stay on the thread that captured them."""
    device_thread = JobThread("device")
    captured_on = device_thread.run(threading.get_ident)
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for _ in range(2):
        thread: StepThread[OneToken] = StepThread("test", calls.put, is_async=True, device_thread=device_thread)
        launched_on: list[int] = []

        def step(before: OneToken | None, launched_on: list[int] = launched_on) -> OneToken:
            launched_on.append(threading.get_ident())
            return OneToken()

        thread.start(step, lambda outcome: None, False)
        calls.get(timeout=60)()
        assert launched_on == [captured_on]
        assert thread.stop()
    assert device_thread.run(threading.get_ident) == captured_on
    assert device_thread.close()


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Pretends that torch has two GPUs; returns the current device by the name of the thread."""
    by_thread: dict[str, str] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: by_thread.update({threading.current_thread().name: str(device)})
    )
    return by_thread


def test_a_numbered_device_is_current_on_the_threads_that_launch(current: dict[str, str]) -> None:
    device = select_device("cuda:1")
    assert device == torch.device("cuda:1")
    JobThread("device", device).run(lambda: None)
    assert current == {threading.current_thread().name: "cuda:1", "device": "cuda:1"}


def test_a_missing_device_or_one_of_another_rank_is_refused(current: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"engine.device = 'cuda:2': this process sees 2 GPUs; give cuda:0 to cuda:1"):
        select_device("cuda:2")
    with pytest.raises(ConfigError, match=r"engine.device = 'cuda:1': each of the 2 ranks .* CUDA_VISIBLE_DEVICES"):
        select_device("cuda:1", Shard(0, 2))
    assert select_device("cuda", Shard(1, 2)) == torch.device("cuda:1")


def test_every_call_that_launches_sets_the_engines_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint("llama", tmp_path / "llama")
    engine = Engine.load(EngineConfig(model=str(model), dtype="float32", num_pages=8, num_threads=1))
    events: list[str] = []
    monkeypatch.setattr("engine.engine.use_device", lambda device: events.append(f"use {device}"))
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda *args, **kw: events.append("run") or run(*args, **kw))  # type: ignore[func-returns-value]
    sequence = Sequence(RequestId("r"), [2, 3, 4], 3, SamplingParams(max_tokens=2, temperature=0.0), b"salt")
    sequence.pages.extend(engine.pool.allocate(1))
    work = [ScheduledSequence(sequence, 3)]
    for call in (
        lambda: engine.step(work),
        lambda: engine.launch(work).wait(),
        lambda: engine.compute(engine.prepare(work)).wait(),
        engine.warm_up,
    ):
        events.clear()
        call()
        assert events[:2] == ["use cpu", "run"]
    engine.close()


def test_all_graphs_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream that multiplies matrices allocates a workspace of 32 MiB."""
    made: list[Any] = []
    captured_on: list[Any] = []

    def make_stream(*_: object) -> SimpleNamespace:
        made.append(SimpleNamespace(wait_stream=lambda other: None))
        return made[-1]

    def graph(graph: object, pool: object, stream: object = None, capture_error_mode: str = "") -> nullcontext[None]:
        captured_on.append(stream)
        return nullcontext()

    default = SimpleNamespace(wait_stream=lambda other: None)
    doubles: dict[str, Any] = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": make_stream,
        "stream": nullcontext,
        "current_stream": lambda *_: default,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": graph,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    capture = CudaCapture()
    for _ in range(3):
        capture(lambda: None)()
    assert len(made) == 1
    assert captured_on == made * 3


def test_ranks_reduce_on_the_current_stream() -> None:
    asked: list[bool] = []

    class GroupDouble:
        def _note(self, *arguments: Any) -> Any:
            asked.append(arguments[-1].asyncOp)
            return SimpleNamespace(wait=lambda: None)

        allreduce = broadcast = gather = _note

    group = object.__new__(TorchGroup)
    group.shard, group._group, group._one_shot = Shard(0, 2), GroupDouble(), None
    x = torch.zeros(2, 3)
    group.sum(x)
    group.from_first(x)
    group.join_columns(x)
    assert asked == [False] * 3
    assert dist.AllreduceOptions().asyncOp, "torch's default is NCCL's own stream"
