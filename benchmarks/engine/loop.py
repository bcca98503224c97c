"""Runs this engine's whole loop as a worker does, from scheduling to delivering tokens, over the real model.

It runs in one process without gRPC, comparable with other engines' `generate`. Requests come from another thread, to
which all tokens return.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.engine.workload import BATCH_TOKENS, BATCHES, RequestBurst
from benchmarks.steps.null_engine import NullTransfers
from decode_worker.drafting.load_draft import Draft
from decode_worker.events import DecodeEvents
from decode_worker.request import DecodeRequest, Delta, TokenDelta, split_plain
from decode_worker.schedule.step_driver import StepDriver
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.step.loop import StepLoop
from engine.step.sequence import Sequence
from penstock.config import DecodeConfig
from penstock.types import RequestId, SamplingParams, WorkerId

_ANSWER_TIMEOUT_S = 300.0


_CONFIG = DecodeConfig(max_batch_sequences=max(BATCHES), max_batch_tokens=BATCH_TOKENS, placement="local")


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens of a batch of requests, and the seconds from the submission of the first to its last token."""

    seconds: float
    outputs: list[list[int]]


class EngineLoop:
    """Owns a step loop over an engine, which must not be used otherwise while `answer` or `generate` waits."""

    def __init__(
        self,
        engine: Engine,
        config: DecodeConfig = _CONFIG,
        draft: Draft | None = None,
        events: DecodeEvents | None = None,
    ) -> None:
        transfers = cast(Any, NullTransfers())
        context = engine.model.context_length
        self._worker = DecodeWorker(WorkerId("bench"), engine, transfers, config, context, draft=draft, events=events)
        self._loop = StepLoop("bench", self._step, self._fail)
        self._driver = StepDriver(self._worker, engine, "bench", self._loop.post)
        self._deltas: queue.SimpleQueue[list[Delta] | BaseException] = queue.SimpleQueue()
        self._loop.start()

    def answer(self, burst: RequestBurst) -> float:
        """Returns the seconds from the submission of the first request to the return of the last token."""
        return self.generate(burst.prompts(), burst.new_tokens).seconds

    def generate(self, prompts: Seq[Seq[int]], new_tokens: int) -> Generated:
        """Returns the greedy continuations of all prompts, in their order; none ends early."""
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        begun_s = time.perf_counter()
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        for number, prompt in enumerate(prompts):
            sequence = Sequence(RequestId(str(number)), list(prompt), len(prompt), sampling, b"bench")
            request = DecodeRequest(number, sequence, self, deque(), deadline_s)
            self._loop.post(lambda request=request: self._worker.submit(request))  # type: ignore[misc]
        outputs = self._await(len(prompts), new_tokens)
        return Generated(time.perf_counter() - begun_s, outputs)

    def send(self, deltas: list[Delta]) -> None:  # called by the worker, on the step loop
        self._deltas.put(deltas)

    def _await(self, num_open: int, num_tokens: int) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in range(num_open)]
        while num_open:
            deltas = self._deltas.get(timeout=_ANSWER_TIMEOUT_S)
            if isinstance(deltas, BaseException):
                raise deltas
            for delta in split_plain(deltas):
                num_open -= self._keep(delta, outputs)
        counts = {len(output) for output in outputs}
        assert counts == {num_tokens}, f"{counts} tokens came instead of {num_tokens}"
        return outputs

    def _keep(self, delta: TokenDelta, outputs: list[list[int]]) -> bool:
        """Keeps the token and returns whether it was the last of its sequence."""
        if delta.error is not None:
            raise delta.error
        if delta.token is not None:
            outputs[delta.stream_id].append(delta.token.token_id)
        return delta.finish_reason is not None

    def _step(self) -> bool:
        self._driver.turn()
        return False  # the driver posts the end of a step to the loop

    def _fail(self, error: BaseException) -> None:
        self._deltas.put(error)

    def close(self) -> None:
        self._loop.stop()
        self._driver.stop()
