"""Compares one engine in one process with its lower bounds and with the alternatives that people would run.

It measures decode steps of 1, 16 and 64 sequences at 512 tokens of context, prompts of 512 and 2048 tokens, 16 requests
from prompt to last token, and the start of a process to its first token; 135M shape, bf16, greedy. Steps are compared
with the bare-torch floor, plain eager torch and `transformers`. A "whole loop" includes scheduling: requests are
submitted all at once to this engine's worker loop and to vLLM's `LLM.generate`, which runs in its own process if its
interpreter is named (`benchmarks/common/vllm_process.py`). "Its bare step" is the same engine's step without that loop.

Each instruction set has its own result, `engine_ISA.json`. `--isa` limits this engine, torch and oneDNN to a lower one
of this machine; vLLM is not limited. `--only` measures a part and keeps the last figures of the rest; a part without
starts and whole loops starts no vLLM.

Subjects alternate round by round, and the quickest call of each counts, since other work on the machine only adds time.
While one is measured, the others are idle.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.floor import FloorStep
from benchmarks.common.process_group import PipedProcess
from benchmarks.common.report import RESULTS, Row, hardware, publish
from benchmarks.common.shapes import random_llama
from benchmarks.common.timing import elapsed_s
from benchmarks.common.vllm_process import Vllm, VllmEngine, parse_with_vllm
from benchmarks.engine.aims import BARE, BATCHING, COLD, FLOOR, OURS, VLLM, WARM, aim_rows, rows_of, seconds_of
from benchmarks.engine.loop import EngineLoop
from benchmarks.engine.peers import EagerTorch, Transformers
from benchmarks.engine.workload import (
    BATCHES,
    CONTEXT,
    KV_TOKENS,
    PROMPTS,
    REQUESTS_NAME,
    Answer,
    LoopWorkload,
    RequestBurst,
    loop_workloads,
    time_in_turns,
)
from engine.cpu import isa
from engine.engine import Engine
from engine.models.config import ModelConfig
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams

_SHORT_S = 0.2  # shorter calls are timed four times a round, others once
_FIRST_TOKEN_TIMEOUT_S = 300.0

# What limits oneDNN and torch's own loops to an instruction set.
_ONEDNN = {"avx512_bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE", "avx2": "AVX2"}
_ATEN = {"avx2": "avx2"}

Call = Callable[[], object]


class OwnEngine:
    """Calls this engine; a step is all that `Engine.step` does, from the work list to tokens."""

    def __init__(self, folder: Path, num_threads: int, *, share_weights: bool = True) -> None:
        config = EngineConfig(
            model=str(folder), num_threads=num_threads, num_pages=KV_TOKENS // 16, share_weights=share_weights
        )
        self._engine = Engine.load(config)
        self._engine.kv_pages.normal_()
        self.loop = EngineLoop(self._engine)

    def decode(self, batch: int, context: int) -> Call:
        work = [ScheduledSequence(self._sequence(context + 1, context), 1) for _ in range(batch)]
        return self._holding(work, lambda: self._engine.step(work))

    def prefill(self, num_tokens: int) -> Call:
        sequence = self._sequence(num_tokens, 0)
        return self._holding([ScheduledSequence(sequence, 1)], lambda: self._compute(sequence))

    def answer_bare(self, burst: RequestBurst) -> float:
        """Returns the seconds of the decode steps after the first token, with the context of the middle one."""
        call = self.decode(burst.batch, burst.prompt_tokens + burst.new_tokens // 2)
        return sum(elapsed_s(call) for _ in range(burst.new_tokens - 1))

    def _compute(self, sequence: Sequence) -> None:
        """Computes the prompt chunk by chunk, as a prefill worker does for a single prompt."""
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
        """Returns `call` after releasing its pages: nothing else runs until the next call is prepared."""
        for item in work:
            self._engine.pool.release(item.sequence.pages)
        return call


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """The calls that compute the same step, by subject."""

    name: str
    calls: Mapping[str, Call]


def in_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Returns the seconds of each subject's quickest call.

    The first call of each turn does not count: it brings back what other subjects have evicted from the CPU cache.
    """
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(4 if elapsed_s(call) < _SHORT_S else 1):
                best[name] = min(best[name], elapsed_s(call))
    return best


def workloads(
    own: OwnEngine, eager: EagerTorch, hf: Transformers, model: ModelConfig
) -> list[Callable[[], StepWorkload]]:
    """Returns functions that prepare each workload in its turn: the KV of all would not fit into memory.

    The floor is in float32 where oneDNN has no products of bf16.
    """
    floor_dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32

    def decode(batch: int) -> StepWorkload:
        calls: dict[str, Call] = {
            OURS: own.decode(batch, CONTEXT),
            FLOOR: FloorStep(model, batch, batch, batch * CONTEXT, floor_dtype),
            "eager torch": eager.decode(batch, CONTEXT),
            "transformers, static cache": hf.decode(batch, CONTEXT),
        }
        return StepWorkload(f"decode step, {batch} at {CONTEXT}", calls)

    def prefill(num_tokens: int) -> StepWorkload:
        calls: dict[str, Call] = {
            OURS: own.prefill(num_tokens),
            FLOOR: FloorStep(model, num_tokens, 1, 0, floor_dtype),
            "eager torch": eager.prefill(num_tokens),
            "transformers, static cache": hf.prefill(num_tokens),
        }
        return StepWorkload(f"prompt of {num_tokens}", calls)

    return [
        *(lambda batch=batch: decode(batch) for batch in BATCHES),  # type: ignore[misc]
        *(lambda num_tokens=num_tokens: prefill(num_tokens) for num_tokens in PROMPTS),  # type: ignore[misc]
    ]


def starts(folder: Path, num_threads: int) -> dict[str, dict[str, float]]:
    """Returns the seconds from process start to first token; cold means that nothing is built or compiled yet.

    It must run before this process loads the model, since replicas of a host share weights.
    """
    with tempfile.TemporaryDirectory() as cache:
        cold_s = first_token_s("penstock", folder, num_threads, Path(cache))
        warm_s = min(first_token_s("penstock", folder, num_threads, Path(cache)) for _ in range(2))
    hf_s = min(first_token_s("transformers", folder, num_threads) for _ in range(2))
    return {COLD: {OURS: cold_s}, WARM: {OURS: warm_s, "transformers": hf_s}}


def first_token_s(subject: str, folder: Path, num_threads: int, cache: Path | None = None) -> float:
    """Returns the seconds from the start of a process to its first token; `subject` is penstock or transformers."""
    command = [sys.executable, "-m", "benchmarks.engine.first_token", subject, str(folder), str(num_threads)]
    environment = {**os.environ, **({} if cache is None else {"XDG_CACHE_HOME": str(cache)})}
    started_s = time.perf_counter()
    with PipedProcess(command, environment) as process:
        process.read_line(_FIRST_TOKEN_TIMEOUT_S)
        return time.perf_counter() - started_s


@contextmanager
def started_vllm(
    vllm: Vllm | None, folder: Path, num_threads: int, is_timed: bool
) -> Iterator[tuple[VllmEngine | None, float, float]]:
    """Yields vLLM, stopped until it is called, or None, and the seconds of its first and its second start. Unless
    `is_timed` it starts only once, with the code that an earlier run has compiled.
    """
    if vllm is None:
        yield None, 0.0, 0.0
        return
    if not is_timed:
        with VllmEngine(vllm, folder, num_threads) as only:
            yield only, only.start_s, only.start_s
        return
    with tempfile.TemporaryDirectory() as cache:
        with VllmEngine(vllm, folder, num_threads, Path(cache)) as first:
            cold_s = first.start_s
        with VllmEngine(vllm, folder, num_threads, Path(cache)) as second:
            yield second, cold_s, second.start_s


def whole_loop(
    workload: LoopWorkload, own: OwnEngine, hf: Transformers, peer: VllmEngine | None, rounds: int
) -> dict[str, float]:
    answers: dict[str, Answer] = {OURS: own.loop.answer}
    if workload.less is not None:
        answers[BARE] = own.answer_bare
    if peer is not None:
        answers[VLLM] = peer.answer
    if workload.name == REQUESTS_NAME:
        answers[BATCHING] = hf.answer
        rounds = min(2, rounds)
    return time_in_turns(workload, answers, rounds)


def measure(
    folder: Path, peer: VllmEngine | None, num_threads: int, rounds: int, only: re.Pattern[str]
) -> dict[str, dict[str, float]]:
    """Returns seconds by workload and subject."""
    own, eager, hf = OwnEngine(folder, num_threads), EagerTorch(folder), Transformers(folder)
    found: dict[str, dict[str, float]] = {}

    def keep(name: str, seconds: dict[str, float]) -> None:
        found[name] = seconds
        print(*(f"{row.metric}: {row.value:.1f} {row.unit}" for row in rows_of(name, seconds)), sep="\n", flush=True)

    for make in workloads(own, eager, hf, ModelConfig.from_folder(str(folder))):
        workload = make()
        if only.search(workload.name):
            keep(workload.name, in_turns(workload.calls, rounds))
    for loop_workload in loop_workloads():
        if only.search(loop_workload.name):
            keep(loop_workload.name, whole_loop(loop_workload, own, hf, peer, rounds))
    own.loop.close()
    return found


def limit_to(name: str) -> None:
    """Limits what this process has not run yet to the named instruction set. Raises ConfigError for one that this
    machine lacks.
    """
    isa.require(name)
    os.environ[isa.VARIABLE] = name
    for variable, limits in (("ONEDNN_MAX_CPU_ISA", _ONEDNN), ("ATEN_CPU_CAPABILITY", _ATEN)):
        if name in limits:
            os.environ[variable] = limits[name]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which all subjects are measured")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of every subject")
    parser.add_argument("--only", type=re.compile, default="", help="regular expression of the workloads to measure")
    names = [each.name for each in isa.supported()]
    parser.add_argument("--isa", choices=names, help="instruction set to be limited to")
    arguments, vllm, vllm_description = parse_with_vllm(parser)
    if arguments.isa:
        limit_to(arguments.isa)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    began_s, folder, only = time.perf_counter(), random_llama(), arguments.only
    has_starts = not arguments.isa and any(map(only.search, (COLD, WARM)))
    found = starts(folder, arguments.threads) if has_starts else {}
    if not has_starts and not any(only.search(each.name) for each in loop_workloads()):
        vllm = None
    with started_vllm(vllm, folder, arguments.threads, has_starts) as (peer, cold_s, warm_s):
        if peer is not None and has_starts:
            found[COLD][VLLM], found[WARM][VLLM] = cold_s, warm_s
        found |= measure(folder, peer, arguments.threads, arguments.rounds, only)
    name = f"engine_{hardware()['instruction_set']}"
    last = RESULTS / f"{name}.json"
    if only.pattern and last.exists():
        found = seconds_of(json.loads(last.read_text())["rows"]) | found
    rows: list[Row] = [row for workload, seconds in found.items() for row in rows_of(workload, seconds)]
    workload = f"135M shape, bf16, {arguments.threads} threads; compared with {vllm_description}"
    publish(name, workload, rows + aim_rows(found))
    print(f"took {time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
