"""Stands in for the engine when only the host's work is measured: pages and caches are real, every token is canned."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace

import torch

from engine.cache.prefix_cache import PrefixCache
from engine.sampling.sampler import Sampled
from engine.step.batch import build_host_batch
from engine.step.compute import PreparedStep, SampledTokens
from engine.step.sequence import SampledToken, ScheduledSequence, StepOutput
from penstock.kv.events import KvEventLog
from penstock.kv.page_hash import hash_pages

PAGE_SIZE = 16
VOCAB_SIZE = 32000
PREFILL_STEP_TOKENS = 512


class NullEngine:
    """Stands in for `engine.engine.Engine`."""

    runs_ahead = False
    saturating_tokens = PREFILL_STEP_TOKENS

    def __init__(self, num_pages: int, max_batch: int = 0, prefix_caching: bool = True) -> None:
        """`max_batch` is the most tokens that `compute` returns."""
        self.layout = SimpleNamespace(page_size=PAGE_SIZE, page_bytes=1, layers=range(30))
        self.model = SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({2}), context_length=8192)
        self.prefix_cache = PrefixCache(num_pages, PAGE_SIZE, KvEventLog(), prefix_caching)
        self.pool = self.prefix_cache.pool
        self._token_ids = torch.arange(max_batch) + 1000
        self._valid = torch.ones(max_batch, dtype=torch.bool)

    def fill_cache(self) -> None:
        """Fills the prefix cache with pages that no prompt matches."""
        pages = self.pool.allocate(self.pool.num_free)
        self.prefix_cache.insert(hash_pages(range(len(pages)), 1, b"salt"), pages)
        self.pool.release(pages)

    def compute(self, step: PreparedStep) -> SampledTokens:
        """Returns a canned token of each sampled sequence, as a decode worker's step does."""
        count = len(step.host.sampled_places)
        return SampledTokens(step, Sampled(self._token_ids[:count], self._valid[:count]), {})

    def step(self, work: Seq[ScheduledSequence]) -> StepOutput:
        """Lays the step out and returns the same token for every sequence, as a prefill worker's step does."""
        build_host_batch(work, PAGE_SIZE)
        return StepOutput(tuple([SampledToken(1000) if item.is_sampled else None for item in work]))


class NullTransfers:
    """Stands in for `decode_worker.prefill.transfer_table.TransferTable`: no request waits for pages."""

    num_mismatches = 0
    num_open = 0

    def grant_reservations(self, scheduler: object) -> list[object]:
        return []

    def abandon(self, request: object) -> None: ...
