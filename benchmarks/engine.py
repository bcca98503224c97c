"""One engine in one process beside what bounds it and what people would run instead, in turns, in one run.

Decode steps of 1, 16 and 64 sequences at 512 tokens of context, prompts of 512 and 2048 tokens, 16 requests from prompt
to last token, and the start of a process to its first token; 135M shape, bf16, greedy. Held against the bare-torch
floor, plain eager torch, `transformers` and, where it is installed, vLLM's CPU build (in a process of its own, while
this one stands still).

Subjects take turns, round after round, and the quickest call of each counts: other work on the machine only adds time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine_rivals import EagerTorch, Transformers
from benchmarks.floor import FloorStep
from benchmarks.report import Row, publish
from benchmarks.shapes import random_llama
from engine.engine import Engine
from engine.model_config import ModelConfig
from engine.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams

BATCHES = (1, 16, 64)
CONTEXT = 512
PROMPTS = (512, 2048)
REQUESTS, REQUEST_TOKENS, NEW_TOKENS = 16, 256, 32
OURS, FLOOR = "this engine", "bare-torch floor"
_SHORT_S = 0.2  # calls that take less are made several times in a round
_START_TIMEOUT_S = 300.0

Call = Callable[[], object]


class Ours:
    """Calls of the engine itself: a step is all that `Engine.step` does, from the work list to tokens."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        most = max(max(BATCHES) * (CONTEXT + 1), max(PROMPTS), REQUESTS * (REQUEST_TOKENS + NEW_TOKENS))
        num_pages = most // 16 + 2 * max(BATCHES)
        self._engine = Engine.load(EngineConfig(model=str(folder), num_threads=num_threads, num_pages=num_pages))
        self._engine.kv_pages.normal_()

    def decode(self, batch: int, context: int) -> Call:
        work = [ScheduledSequence(self._sequence(context + 1, context), 1) for _ in range(batch)]
        return self._holding(work, lambda: self._engine.step(work))

    def prefill(self, num_tokens: int) -> Call:
        sequence = self._sequence(num_tokens, 0)
        return self._holding([ScheduledSequence(sequence, 1)], lambda: self._compute(sequence))

    def serve(self) -> Call:
        """All requests of a burst, prompts first."""

        def call() -> None:
            sequences = [self._sequence(REQUEST_TOKENS, 0, NEW_TOKENS) for _ in range(REQUESTS)]
            for sequence in sequences:
                self._compute(sequence)
            for _ in range(NEW_TOKENS - 1):
                for sequence in sequences:
                    sequence.token_ids.append(5)
                self._engine.step([ScheduledSequence(sequence, 1) for sequence in sequences])
                for sequence in sequences:
                    sequence.num_computed_tokens += 1
            for sequence in sequences:
                self._engine.pool.release(sequence.pages)

        return call

    def _compute(self, sequence: Sequence) -> None:
        """The prompt, chunk by chunk, as a prefill worker does by itself."""
        sequence.num_computed_tokens = 0
        while count := min(sequence.num_uncomputed_tokens, self._engine.saturating_tokens):
            self._engine.step([ScheduledSequence(sequence, count)])
            sequence.num_computed_tokens += count

    def _sequence(self, num_tokens: int, num_computed: int, num_more: int = 0) -> Sequence:
        pages = self._engine.pool.allocate(-(-(num_tokens + num_more) // self._engine.layout.page_size))
        sampling = SamplingParams(max_tokens=max(1, num_more), temperature=0.0, ignore_eos=True)
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
    num_tokens: int  # that a call computes


def in_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Seconds of each subject's quickest call. One call of each turn goes before, which brings back what the others
    have pushed out of the cache."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            repeats = 1
            for repeat in range(8):
                started_s = time.perf_counter()
                call()
                took_s = time.perf_counter() - started_s
                if repeat == 0:
                    repeats = 5 if took_s < _SHORT_S else 1
                if repeat > 0 or repeats == 1:
                    best[name] = min(best[name], took_s)
                if repeat >= repeats - 1:
                    break
    return best


def workloads(ours: Ours, eager: EagerTorch, rival: Transformers, model: ModelConfig) -> list[Callable[[], Workload]]:
    """Each made when its turn comes: their KV would not fit side by side."""

    def decode(batch: int) -> Workload:
        calls: dict[str, Call] = {
            OURS: ours.decode(batch, CONTEXT),
            FLOOR: FloorStep(model, batch, batch, batch * CONTEXT, torch.bfloat16),
            "eager torch": eager.decode(batch, CONTEXT),
            "transformers, static cache": rival.decode(batch, CONTEXT),
        }
        return Workload(f"decode step, {batch} at {CONTEXT}", calls, batch)

    def prefill(num_tokens: int) -> Workload:
        calls: dict[str, Call] = {
            OURS: ours.prefill(num_tokens),
            FLOOR: FloorStep(model, num_tokens, 1, 0, torch.bfloat16),
            "eager torch": eager.prefill(num_tokens),
            "transformers, static cache": rival.prefill(num_tokens),
        }
        return Workload(f"prompt of {num_tokens}", calls, num_tokens)

    def serve() -> Workload:
        prompts = [[5 + row] * REQUEST_TOKENS for row in range(REQUESTS)]
        calls = {
            OURS: ours.serve(),
            "transformers, continuous batching": rival.continuous_batching(prompts, NEW_TOKENS),
        }
        return Workload(f"{REQUESTS} requests, {REQUEST_TOKENS} in, {NEW_TOKENS} out", calls, REQUESTS * NEW_TOKENS)

    return [
        *(lambda batch=batch: decode(batch) for batch in BATCHES),  # type: ignore[misc]
        *(lambda num_tokens=num_tokens: prefill(num_tokens) for num_tokens in PROMPTS),  # type: ignore[misc]
        serve,
    ]


def rows_of(workload: Workload, rounds: int) -> list[Row]:
    best = in_turns(workload.calls, rounds)
    return [
        Row(f"{workload.name}: {name}", took_s * 1e3, "ms", OURS, best[OURS] * 1e3)
        for name, took_s in sorted(best.items(), key=lambda item: item[1])
    ]


def start_rows(folder: Path, rounds: int, num_threads: int) -> list[Row]:
    """From the start of a process to its first token, of a prompt of 16 tokens, imports and weights included."""
    names = {OURS: "penstock", "transformers": "transformers"}
    best = dict.fromkeys(names, float("inf"))
    for _ in range(rounds):
        for name, subject in names.items():
            command = [sys.executable, "-m", "benchmarks.first_token", subject, str(folder), str(num_threads)]
            started_s = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, timeout=_START_TIMEOUT_S)
            best[name] = min(best[name], time.perf_counter() - started_s)
    return [Row(f"start to first token: {name}", took_s, "s", OURS, best[OURS]) for name, took_s in best.items()]


def vllm_rows(folder: Path, num_threads: int, ours: Mapping[str, float]) -> list[Row]:
    """Empty where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return []
    command = [sys.executable, "-m", "benchmarks.engine_vllm", str(folder), str(num_threads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_START_TIMEOUT_S * 4)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return [
        Row(f"{name}: vLLM", value, "s" if name.startswith("start") else "ms", OURS, ours.get(name))
        for name, value in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each subject")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every subject")
    parser.add_argument("--only", default="", help="workloads whose name contains this; writes no result")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    started_s, folder = time.perf_counter(), random_llama()
    model = ModelConfig.from_folder(str(folder))
    subjects = Ours(folder, arguments.threads), EagerTorch(folder), Transformers(folder)
    rows: list[Row] = []
    for make in workloads(*subjects, model):
        workload = make()
        if arguments.only in workload.name:
            long = "requests" in workload.name
            rows += rows_of(workload, min(2, arguments.rounds) if long else arguments.rounds)
            print(*(f"{row.metric}: {row.value:.1f} {row.unit}" for row in rows[-len(workload.calls) :]), sep="\n")
    if arguments.only:
        return
    rows += start_rows(folder, 2, arguments.threads)
    ours = {row.metric.removesuffix(f": {OURS}"): row.value for row in rows if row.metric.endswith(f": {OURS}")}
    peers = vllm_rows(folder, arguments.threads, ours)
    if not peers:
        print("vLLM: not installed")
    said = "vLLM beside it" if peers else "vLLM not installed"
    publish("engine", f"135M shape, bf16, {arguments.threads} threads; {said}", rows + peers)
    print(f"took {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
