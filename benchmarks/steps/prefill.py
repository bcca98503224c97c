"""Measures what a prefill worker's step costs besides the model, as a part of `benchmarks.steps`.

A step here is queueing and scheduling chunks, laying out the batch, hashing and caching pages, passing pages to the
sender, and encoding the outcomes for decode workers. Every prompt that ends is replaced by a new one.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.common.report import Row
from benchmarks.steps.null_engine import PAGE_SIZE, PREFILL_STEP_TOKENS, VOCAB_SIZE, NullEngine
from engine.step.sequence import Sequence
from penstock.config import PrefillConfig, TransferConfig
from penstock.types import Epoch, PageId, RequestId, SamplingParams, TransferId, TransferKey
from prefill_worker.job import PrefillJob, PrefillOutcome, ReservePages
from prefill_worker.service import _outcome_to_wire
from prefill_worker.worker import PrefillWorker

NUM_PAGES = 8192
# Prompts in a step and tokens of each: the first is a quarter of a prompt, the others are whole.
SHAPES = ((1, 2048), (1, 512), (8, 64))
QUEUED = (0, 1000)


class NullSender:
    """Stands in for `kv_transfer.endpoints.KvSender`: every push lands at once."""

    def __init__(self) -> None:
        self.finished: list[TransferKey] = []

    def open(self, key: TransferKey, offer: bytes, lane: object) -> object:
        return SimpleNamespace(target=SimpleNamespace(page_size=PAGE_SIZE))

    def num_layer_groups(self, key: TransferKey) -> int:
        return 1

    def push_tokens(self, *push: object) -> None: ...

    def finish(self, key: TransferKey) -> None:
        self.finished.append(key)


class BusyPrefillWorker:
    """A prefill worker that always has `num_open` prompts: a step's worth in progress, the others in its queue."""

    def __init__(self, num_tokens: int, num_open: int) -> None:
        self.sender = NullSender()
        config = SimpleNamespace(
            transfer=TransferConfig(checksums=False), prefill=PrefillConfig(max_batch_tokens=PREFILL_STEP_TOKENS)
        )
        self.worker = PrefillWorker(cast(Any, NullEngine(NUM_PAGES)), cast(Any, self.sender), cast(Any, config), 8192)
        self._num_tokens = num_tokens
        self._num_open = num_open
        self._open: dict[TransferKey, PrefillJob] = {}
        self._outcomes: deque[tuple[TransferKey, PrefillOutcome]] = deque()
        self._count = 0
        self._num_bytes = 0

    def fill(self) -> None:
        """Replaces sent prompts by new ones."""
        for key in self.sender.finished:
            self.worker.on_sent(key)
            del self._open[key]
        self.sender.finished.clear()
        while len(self._open) < self._num_open:
            self._count += 1
            tokens = [(self._count * 7919 + i) % VOCAB_SIZE for i in range(self._num_tokens)]
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            sequence = Sequence(RequestId(str(self._count)), tokens, len(tokens), sampling, b"salt")
            key = TransferKey(TransferId(str(self._count)), Epoch(1), Epoch(2))
            job = self._open[key] = PrefillJob(key, sequence, partial(self._emit, key), time.monotonic())
            self.worker.submit(job, b"")

    def _emit(self, key: TransferKey, outcome: PrefillOutcome) -> None:
        self._outcomes.append((key, outcome))

    def step(self) -> float:
        """Runs one step, after which decode workers name pages at once, and returns its microseconds."""
        started_s = time.thread_time()
        self.worker.step()
        while self._outcomes:
            key, outcome = self._outcomes.popleft()
            self._num_bytes += len(_outcome_to_wire(outcome).SerializeToString())
            if isinstance(outcome, ReservePages):
                self.worker.set_destination(key, 0, [PageId(page) for page in range(outcome.num_pages)])
        return (time.thread_time() - started_s) * 1e6


def row(num_prompts: int, num_tokens: int, num_queued: int, us: float) -> Row:
    chunk = min(num_tokens, PREFILL_STEP_TOKENS)
    behind = f", {num_queued} waiting" if num_queued else ""
    return Row(f"prefill step, {num_prompts} x {chunk} of {num_tokens} tokens{behind}", us, "us")
