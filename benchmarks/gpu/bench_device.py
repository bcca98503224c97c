"""Times calls on the device that GPU benchmarks run on: a CUDA device, or a rehearsal without one.

A rehearsal uses toy shapes on the CPU, Triton's interpreter (TRITON_INTERPRET=1) and a clock in place of CUDA's events.
Its figures mean nothing; it shows that the benchmarks run before a device is available.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity

from engine.engine import Engine
from engine.graphs.cuda_graphs import GraphRunner

T = TypeVar("T")
_AHEAD_CYCLES = 2_000_000  # about 1 ms on a Hopper, in which the host launches what is timed
_FLUSH_BYTES = 256 << 20  # more than any cache


class BenchDevice:
    """A CUDA device and the ways to time calls on it."""

    is_rehearsal = False
    repeats, warm_ups, calls_in_graph = 30, 5, 20
    activity, event_type = ProfilerActivity.CUDA, torch.autograd.DeviceType.CUDA

    def __init__(self, device: str = "cuda", cuda: Any = torch.cuda) -> None:
        self.device = torch.device(device)
        self.cuda = cuda
        self._flush = torch.empty(self.pick(_FLUSH_BYTES, 64), dtype=torch.uint8, device=self.device)

    def pick(self, full: T, toy: T) -> T:
        """Returns `toy` in a rehearsal, else `full`."""
        return toy if self.is_rehearsal else full

    def seconds(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Returns the median device time with a flushed cache.

        The device is kept busy until the host has launched everything; otherwise the launches would be timed.
        """
        for _ in range(self.warm_ups):
            call()
        times = []
        for _ in range(min(repeats or self.repeats, self.repeats)):
            start, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
            self._flush.zero_()
            self.cuda._sleep(_AHEAD_CYCLES)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return median(times)

    def wall_seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Returns the median wall time of calls that synchronize with the device themselves."""
        for _ in range(min(self.warm_ups, 2)):
            call()
        times = []
        for _ in range(min(repeats, self.repeats)):
            self.cuda.synchronize()
            started_s = time.perf_counter()
            call()
            self.cuda.synchronize()
            times.append(time.perf_counter() - started_s)
        return median(times)

    def in_graph(self, call: Callable[[], object]) -> float:
        """Returns the device time of one call among many in a CUDA graph; its inputs should exceed the cache."""
        call()
        self.cuda.synchronize()
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph):
            for _ in range(self.calls_in_graph):
                call()
        return self.seconds(graph.replay) / self.calls_in_graph

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def free_bytes(self) -> int:
        return int(self.cuda.mem_get_info()[0])

    def warm_up(self, engine: Engine) -> None:
        engine.warm_up()

    def capture(self, engine: Engine) -> None:
        engine.capture_graphs()

    def engine_settings(self) -> dict[str, Any]:
        return {"device": "cuda"}


class ToyDevice(BenchDevice):
    """A CUDA device on which each call runs once at toy shapes, so that a slow tool can watch it."""

    repeats, warm_ups, calls_in_graph = 1, 0, 1

    def pick(self, full: T, toy: T) -> T:
        return toy


class RehearsalDevice(BenchDevice):
    """The CPU in place of a CUDA device."""

    is_rehearsal = True
    repeats, warm_ups, calls_in_graph = 1, 1, 2
    activity, event_type = ProfilerActivity.CPU, torch.autograd.DeviceType.CPU

    def __init__(self) -> None:
        super().__init__("cpu", _NoCuda())

    def warm_up(self, engine: Engine) -> None:
        """Does nothing: the interpreter compiles nothing, and a warm-up would be slow."""

    def capture(self, engine: Engine) -> None:
        size, spare = engine.layout.page_size, engine.pool.num_pages - 1
        engine._graphs = GraphRunner(engine.runner.run, [1, 2], engine.max_context, size, spare, self.device)
        for batch in engine._graphs.sizes():
            engine._graphs.capture(batch, _RunAgain)

    def engine_settings(self) -> dict[str, Any]:
        return {"device": "cpu", "attention": "triton", "share_weights": False}


class _RunAgain:
    """Stands in for a graph: replays run the captured function again."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


class _NoCuda:
    """The part of `torch.cuda` that benchmarks use, without a device."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self._at_s = 0.0

        def record(self) -> None:
            self._at_s = time.perf_counter()

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: _NoCuda.Event) -> float:
            return max(end._at_s - self._at_s, 1e-6) * 1e3

    class CUDAGraph:
        def replay(self) -> None:
            pass

    @contextmanager
    def graph(self, graph: _NoCuda.CUDAGraph) -> Iterator[None]:
        yield

    def _sleep(self, cycles: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self) -> tuple[int, int]:
        return 1 << 20, 1 << 20

    def get_device_name(self) -> str:
        return "no device, a rehearsal"
