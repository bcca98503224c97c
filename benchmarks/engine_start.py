"""From the start of a process to its first token: with nothing built or compiled yet, and as every time after.

Of this engine, `transformers` and, where it is at hand, vLLM; prompt of 16 tokens, imports and weights included. What
is built goes to a folder of each subject's own. To be run before anything else holds the model, since replicas of a
host share weights.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.vllm_process import PipedProcess, Vllm, VllmEngine

_TIMEOUT_S = 300.0


def first_token_s(subject: str, folder: Path, num_threads: int, cache: Path | None = None) -> float:
    """Of this engine ("penstock") or of "transformers"."""
    command = [sys.executable, "-m", "benchmarks.first_token", subject, str(folder), str(num_threads)]
    environment = {**os.environ, **({} if cache is None else {"XDG_CACHE_HOME": str(cache)})}
    started_s = time.perf_counter()
    with PipedProcess(command, environment) as process:
        process.read_line(_TIMEOUT_S)
        return time.perf_counter() - started_s


@contextmanager
def started_vllm(vllm: Vllm, folder: Path, num_threads: int, cache: Path) -> Iterator[tuple[VllmEngine, float, float]]:
    """vLLM in its second life, and seconds of its first and its second start."""
    with VllmEngine(vllm, folder, num_threads, cache) as first:
        cold_s = first.start_s
    with VllmEngine(vllm, folder, num_threads, cache) as second:
        yield second, cold_s, second.start_s
