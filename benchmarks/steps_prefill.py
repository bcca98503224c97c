"""What a prefill worker's step costs besides the model: see `benchmarks.steps`.

Queueing and scheduling chunks, laying out the batch, hashing and caching pages, handing pages to the sender, and what
is said to decode workers to its last byte. Prompts follow one another, and others wait behind them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.report import Row
from engine.batch import lay_out
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.config import PrefillConfig, TransferConfig
from penstock.kv_events import KvEventLog
from penstock.types import Epoch, PageId, RequestId, SamplingParams, TransferId, TransferKey
from prefill_worker.job import PrefillJob, PrefillOutcome
from prefill_worker.service import _outcome_to_wire
from prefill_worker.worker import PrefillWorker

PAGE_SIZE = 16
STEP_TOKENS = 512
NUM_PAGES = 8192
# Prompts in a step and tokens of each: the first is a quarter of a prompt, the others are whole.
SHAPES = ((1, 2048), (1, 512), (8, 64))
QUEUED = (0, 1000)


class NullEngine:
    """Stands in for `engine.engine.Engine`: lays a step out and draws the same token for everyone."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(page_size=PAGE_SIZE, page_bytes=1, layers=range(30))
        self.model = SimpleNamespace(vocab_size=32000)
        self.pool = PagePool(NUM_PAGES)
        self.prefix_cache = PrefixCache(self.pool, PAGE_SIZE, KvEventLog())
        self.saturating_tokens = STEP_TOKENS
        self.runs_ahead = False

    def step(self, work: Seq[ScheduledSequence]) -> StepOutput:
        lay_out(work, PAGE_SIZE)
        return StepOutput(tuple([SampledToken(1000) if item.draws else None for item in work]))


class NullSender:
    """Stands in for `kv_transfer.group_sender.GroupSender`: what is pushed has landed."""

    def __init__(self) -> None:
        self.finished: list[TransferKey] = []

    def open(self, key: TransferKey, offer: bytes, lane: object) -> object:
        return SimpleNamespace(target=SimpleNamespace(page_size=PAGE_SIZE))

    def num_parts(self, key: TransferKey) -> int:
        return 1

    def push_tokens(self, *push: object) -> None: ...

    def finish(self, key: TransferKey) -> None:
        self.finished.append(key)


class PrefillBench:
    """A worker with as many prompts under way as a step holds, and some more that wait."""

    def __init__(self, num_tokens: int, num_open: int) -> None:
        self.sender = NullSender()
        config = SimpleNamespace(transfer=TransferConfig(), prefill=PrefillConfig(max_batch_tokens=STEP_TOKENS))
        self.worker = PrefillWorker(cast(Any, NullEngine()), cast(Any, self.sender), cast(Any, config), 8192)
        self._num_tokens = num_tokens
        self._num_open = num_open
        self._open: dict[TransferKey, PrefillJob] = {}
        self._said: deque[PrefillOutcome] = deque()
        self._count = 0
        self._num_bytes = 0

    def fill(self) -> None:
        """What has been sent is over, and other prompts come, whose decode workers have pages at once."""
        for key in self.sender.finished:
            self.worker.on_sent(key)
            del self._open[key]
        self.sender.finished.clear()
        while len(self._open) < self._num_open:
            self._count += 1
            tokens = [(self._count * 7919 + i) % 32000 for i in range(self._num_tokens)]
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            sequence = Sequence(RequestId(str(self._count)), tokens, len(tokens), sampling, b"salt")
            key = TransferKey(TransferId(str(self._count)), Epoch(1), Epoch(2))
            job = self._open[key] = PrefillJob(key, sequence, self._said.append, time.monotonic())
            self.worker.submit(job, b"")
            self.worker.set_destination(key, 0, [PageId(page) for page in range(job.num_pages)])

    def step(self) -> float:
        """Microseconds."""
        started_s = time.thread_time()
        self.worker.step()
        while self._said:
            self._num_bytes += len(_outcome_to_wire(self._said.popleft()).SerializeToString())
        return (time.thread_time() - started_s) * 1e6


def bench_of(num_prompts: int, num_tokens: int, num_queued: int) -> PrefillBench:
    return PrefillBench(num_tokens, num_prompts + num_queued)


def row(num_prompts: int, num_tokens: int, num_queued: int, us: float) -> Row:
    chunk = min(num_tokens, STEP_TOKENS)
    behind = f", {num_queued} waiting" if num_queued else ""
    return Row(f"prefill step, {num_prompts} x {chunk} of {num_tokens} tokens{behind}", us, "us")
