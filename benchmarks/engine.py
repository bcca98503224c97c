"""One engine in one process beside what bounds it and what people would run instead, in turns, in one run.

Decode steps of 1, 16 and 64 sequences at 512 tokens of context, prompts of 512 and 2048 tokens, 16 requests from prompt
to last token, and the start of a process to its first token; 135M shape, bf16, greedy. Steps are held against the
bare-torch floor, plain eager torch and `transformers`. What is called "whole loop" is asked of everybody from outside,
as requests that are all there at once, schedulers and all: of this engine's worker loop, and of vLLM's `LLM.generate`
where its interpreter is named (`benchmarks/vllm_process.py`), in a process of its own.

Subjects take turns, round after round, and the quickest call of each counts: other work on the machine only adds time.
While one is asked, the others stand still.
"""

from __future__ import annotations

import argparse
import logging
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine_aims import BATCHING, COLD, FLOOR, OURS, VLLM, WARM, aim_rows, rows_of
from benchmarks.engine_asks import (
    BATCHES,
    CONTEXT,
    KV_TOKENS,
    PROMPTS,
    REQUESTS_NAME,
    Answer,
    LoopWorkload,
    ask_in_turns,
    loop_workloads,
)
from benchmarks.engine_loop import EngineLoop
from benchmarks.engine_rivals import EagerTorch, Transformers
from benchmarks.engine_start import first_token_s, started_vllm
from benchmarks.floor import FloorStep
from benchmarks.report import Row, publish
from benchmarks.shapes import random_llama
from benchmarks.vllm_process import NoVllm, Vllm, VllmEngine, add_option, find_vllm
from engine.engine import Engine
from engine.model_config import ModelConfig
from engine.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams

_SHORT_S = 0.2  # of calls that take less, four count in a round, of others one

Call = Callable[[], object]


class Ours:
    """Calls of the engine itself: a step is all that `Engine.step` does, from the work list to tokens."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        config = EngineConfig(model=str(folder), num_threads=num_threads, num_pages=KV_TOKENS // 16)
        self._engine = Engine.load(config)
        self._engine.kv_pages.normal_()
        self.loop = EngineLoop(self._engine)

    def decode(self, batch: int, context: int) -> Call:
        work = [ScheduledSequence(self._sequence(context + 1, context), 1) for _ in range(batch)]
        return self._holding(work, lambda: self._engine.step(work))

    def prefill(self, num_tokens: int) -> Call:
        sequence = self._sequence(num_tokens, 0)
        return self._holding([ScheduledSequence(sequence, 1)], lambda: self._compute(sequence))

    def _compute(self, sequence: Sequence) -> None:
        """The prompt, chunk by chunk, as a prefill worker does by itself."""
        sequence.num_computed_tokens = 0
        while count := min(sequence.num_uncomputed_tokens, self._engine.saturating_tokens):
            self._engine.step([ScheduledSequence(sequence, count)])
            sequence.num_computed_tokens += count

    def _sequence(self, num_tokens: int, num_computed: int) -> Sequence:
        pages = self._engine.pool.allocate(-(-num_tokens // self._engine.layout.page_size))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        sequence = Sequence(RequestId("bench"), [5] * num_tokens, num_tokens, sampling, b"", pages)
        sequence.num_computed_tokens = num_computed
        return sequence

    def _holding(self, work: list[ScheduledSequence], call: Call) -> Call:
        """`call`; the pages go back at once, because nothing else runs until another call is asked for."""
        for item in work:
            self._engine.pool.release(item.sequence.pages)
        return call


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    calls: Mapping[str, Call]


def in_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Seconds of each subject's quickest call. One call of each turn goes before, which brings back what the others
    have pushed out of the cache."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(4 if _seconds(call) < _SHORT_S else 1):
                best[name] = min(best[name], _seconds(call))
    return best


def _seconds(call: Call) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def workloads(ours: Ours, eager: EagerTorch, rival: Transformers, model: ModelConfig) -> list[Callable[[], Workload]]:
    """Each made when its turn comes: their KV would not fit side by side."""

    def decode(batch: int) -> Workload:
        calls: dict[str, Call] = {
            OURS: ours.decode(batch, CONTEXT),
            FLOOR: FloorStep(model, batch, batch, batch * CONTEXT, torch.bfloat16),
            "eager torch": eager.decode(batch, CONTEXT),
            "transformers, static cache": rival.decode(batch, CONTEXT),
        }
        return Workload(f"decode step, {batch} at {CONTEXT}", calls)

    def prefill(num_tokens: int) -> Workload:
        calls: dict[str, Call] = {
            OURS: ours.prefill(num_tokens),
            FLOOR: FloorStep(model, num_tokens, 1, 0, torch.bfloat16),
            "eager torch": eager.prefill(num_tokens),
            "transformers, static cache": rival.prefill(num_tokens),
        }
        return Workload(f"prompt of {num_tokens}", calls)

    return [
        *(lambda batch=batch: decode(batch) for batch in BATCHES),  # type: ignore[misc]
        *(lambda num_tokens=num_tokens: prefill(num_tokens) for num_tokens in PROMPTS),  # type: ignore[misc]
    ]


def starts(folder: Path, num_threads: int) -> dict[str, dict[str, float]]:
    """Seconds to the first token; before anything here holds the model, since replicas share weights."""
    with tempfile.TemporaryDirectory() as cache:
        cold_s = first_token_s("penstock", folder, num_threads, Path(cache))
        warm_s = min(first_token_s("penstock", folder, num_threads, Path(cache)) for _ in range(2))
    rival_s = min(first_token_s("transformers", folder, num_threads) for _ in range(2))
    return {COLD: {OURS: cold_s}, WARM: {OURS: warm_s, "transformers": rival_s}}


@contextmanager
def beside(vllm: Vllm | None, folder: Path, num_threads: int) -> Iterator[tuple[VllmEngine | None, float, float]]:
    """vLLM, waiting, and what its first and its second start took; None where there is none."""
    if vllm is None:
        yield None, 0.0, 0.0
        return
    with tempfile.TemporaryDirectory() as cache, started_vllm(vllm, folder, num_threads, Path(cache)) as started:
        yield started


def whole_loop(
    workload: LoopWorkload, ours: EngineLoop, rival: Transformers, peer: VllmEngine | None, rounds: int
) -> dict[str, float]:
    answers: dict[str, Answer] = {OURS: ours.answer}
    if peer is not None:
        answers[VLLM] = peer.answer
    if workload.name == REQUESTS_NAME:
        answers[BATCHING] = rival.answer
        rounds = min(2, rounds)
    return ask_in_turns(workload, answers, rounds)


def measure(
    folder: Path, peer: VllmEngine | None, num_threads: int, rounds: int, only: str
) -> dict[str, dict[str, float]]:
    """Seconds by workload and subject."""
    ours, eager, rival = Ours(folder, num_threads), EagerTorch(folder), Transformers(folder)
    found: dict[str, dict[str, float]] = {}

    def keep(name: str, seconds: dict[str, float]) -> None:
        found[name] = seconds
        print(*(f"{row.metric}: {row.value:.1f} {row.unit}" for row in rows_of(name, seconds)), sep="\n", flush=True)

    for make in workloads(ours, eager, rival, ModelConfig.from_folder(str(folder))):
        workload = make()
        if only in workload.name:
            keep(workload.name, in_turns(workload.calls, rounds))
    for asked in loop_workloads():
        if only in asked.name:
            keep(asked.name, whole_loop(asked, ours.loop, rival, peer, rounds))
    ours.loop.close()
    return found


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: whoever was started ends too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each subject")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every subject")
    parser.add_argument("--only", default="", help="workloads whose name contains this; writes no result")
    add_option(parser)
    arguments = parser.parse_args()
    try:
        vllm = find_vllm(arguments.vllm_python)
    except NoVllm as error:
        parser.error(str(error))
    said = vllm.describe() if vllm is not None else "no vLLM (--vllm-python, or make bench-vllm)"
    print(f"beside it: {said}", flush=True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    began_s, folder = time.perf_counter(), random_llama()
    found = {} if arguments.only else starts(folder, arguments.threads)
    with beside(vllm, folder, arguments.threads) as (peer, cold_s, warm_s):
        if peer is not None and not arguments.only:
            found[COLD][VLLM], found[WARM][VLLM] = cold_s, warm_s
        found |= measure(folder, peer, arguments.threads, arguments.rounds, arguments.only)
    if arguments.only:
        return
    rows: list[Row] = [row for name, seconds in found.items() for row in rows_of(name, seconds)]
    publish("engine", f"135M shape, bf16, {arguments.threads} threads; beside {said}", rows + aim_rows(found))
    print(f"took {time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
