"""Computes the hits of prefix caches of every size: the stack distances of prompts' blocks in one pass. Pure.

The cache is the ideal of a deployment's caches: one pool that serves the requests one after another and evicts the
least recently used leaf first, as `engine.cache.prefix_cache` does. A request touches all blocks of its prompt at once,
and a block can hit only while the blocks before it are cached. So blocks rank by (last request, depth), whatever the
cache's size: a cache of C tokens holds the first C tokens of this ranking, and a block hits if and only if the blocks
that rank up to it, its stack distance, fit (Mattson, Gecsei, Slutz, Traiger: Evaluation techniques for storage
hierarchies, IBM Systems Journal 9(2), 1970).

Blocks that one request touched last are the end of its prompt, because a request that touches a block touches all
before it. So a prompt that is touched again meets few runs of blocks of equal last request, and the distances in a run
are successive. Thus n requests with m runs take O(m log n), and every block is only compared and marked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.bench.traces.record import TraceRecord

_ROOT = -1  # in place of a node before the first block


@dataclass(frozen=True, slots=True)
class ReuseRun:
    """Successive blocks of one prompt that one earlier request touched last.

    The block at index k of the run hits in caches of at least `tokens_ahead + (k + 1) * block_tokens` tokens.
    """

    request: int
    last_request: int
    tokens_ahead: int  # tokens that rank before the run
    num_blocks: int
    block_tokens: int
    num_tokens: int  # tokens in the blocks, of which the last may be incomplete

    def hit_tokens(self, cache_tokens: float) -> int:
        """Returns the tokens that hit in a cache of this size."""
        num_held = int(max(0.0, cache_tokens - self.tokens_ahead) // self.block_tokens)
        return self.num_tokens if num_held >= self.num_blocks else num_held * self.block_tokens


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """The runs of a trace, from which the hit rate of every cache follows."""

    runs: tuple[ReuseRun, ...]
    num_prompt_tokens: int
    num_distinct_tokens: int  # a cache of this size evicts nothing

    @property
    def ceiling(self) -> float:
        """The share of prompt tokens that one unlimited cache hits."""
        return sum(run.num_tokens for run in self.runs) / max(1, self.num_prompt_tokens)

    def hit_rate(self, cache_tokens: float) -> float:
        """Returns the share of prompt tokens that a cache of this size hits."""
        return sum(run.hit_tokens(cache_tokens) for run in self.runs) / max(1, self.num_prompt_tokens)

    def cache_tokens_for(self, share: float) -> int:
        """Returns the size in tokens of the smallest cache that reaches `share` of the ceiling."""
        wanted = share * sum(run.num_tokens for run in self.runs)
        low, high = 0, self.num_distinct_tokens
        while low < high:
            middle = (low + high) // 2
            if sum(run.hit_tokens(middle) for run in self.runs) >= wanted:
                high = middle
            else:
                low = middle + 1
        return low

    def curve(self, num_points: int = 60) -> list[tuple[int, float]]:
        """Returns (tokens, hit rate) for sizes that grow by equal factors up to where nothing is evicted."""
        if not self.runs:
            return []
        first = min(run.block_tokens for run in self.runs)
        growth = (self.num_distinct_tokens / first) ** (1 / max(1, num_points - 1))
        sizes = sorted({round(first * growth**index) for index in range(num_points)} | {self.num_distinct_tokens})
        return [(size, self.hit_rate(size)) for size in sizes]

    def hits_by_request(self, num_requests: int) -> list[int]:
        """Returns the tokens of each request that one unlimited cache hits."""
        hits = [0] * num_requests
        for run in self.runs:
            hits[run.request] += run.num_tokens
        return hits


def measure_reuse(records: Sequence[TraceRecord]) -> ReuseReport:
    """Finds every reuse of a block within the requests, taken in order."""
    prompts = _Prompts()
    ranked = _RankedTokens(len(records))
    runs: list[ReuseRun] = []
    for number, record in enumerate(records):
        size, start = record.block_tokens, 0
        found = []
        for owner, num_blocks in prompts.add(record):
            end = start + num_blocks
            num_tokens = min(end * size, record.num_input_tokens, records[owner].num_input_tokens) - start * size
            found.append(ReuseRun(number, owner, ranked.after(owner), num_blocks, size, num_tokens))
            start = end
        runs += found
        for run in found:
            ranked.add(run.last_request, -run.num_blocks * size)
        ranked.add(number, record.num_blocks * size)
    return ReuseReport(tuple(runs), sum(record.num_input_tokens for record in records), ranked.total())


class _Prompts:
    """The prompts so far as a tree of blocks, where a block is identified by its id and all blocks before it.

    Nodes are found by (node before, id) where a prompt leaves another one; along that prompt ids are compared in bulk.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._last_request: list[int] = []  # by node
        self._ids: list[array[int]] = []  # by request, as are the nodes
        self._paths: list[array[int]] = []

    def add(self, record: TraceRecord) -> list[tuple[int, int]]:
        """Adds the next prompt. Returns (last request, number of blocks) of the runs that earlier requests touched."""
        ids = array("q", record.block_ids())
        path = array("q")
        runs: list[tuple[int, int]] = []
        while len(path) < len(ids):
            node = self._nodes.get((path[-1] if path else _ROOT, ids[len(path)]))
            if node is None:
                break
            # The request that touched this block last was also the last to touch all later blocks of its own prompt.
            owner, start = self._last_request[node], len(path)
            end = start + _num_common(ids[start:], self._ids[owner][start:])
            path += self._paths[owner][start:end]
            runs.append((owner, end - start))
        for block in ids[len(path) :]:
            node = self._nodes[path[-1] if path else _ROOT, block] = len(self._nodes)
            path.append(node)
            self._last_request.append(0)
        for node in path:
            self._last_request[node] = len(self._ids)
        self._ids.append(ids)
        self._paths.append(path)
        return runs


def _num_common(ids: array[int], others: array[int]) -> int:
    """Returns the length of the common prefix, at least 1 for arrays that begin alike."""
    low, high = 0, min(len(ids), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class _RankedTokens:
    """The number of tokens that each request was the last to touch: a Fenwick tree over requests."""

    def __init__(self, num_requests: int) -> None:
        self._sums = [0] * (num_requests + 1)

    def add(self, request: int, num_tokens: int) -> None:
        index = request + 1
        while index < len(self._sums):
            self._sums[index] += num_tokens
            index += index & -index

    def after(self, request: int) -> int:
        """Returns the tokens last touched by later requests."""
        return self.total() - self._up_to(request)

    def total(self) -> int:
        return self._up_to(len(self._sums) - 2)

    def _up_to(self, request: int) -> int:
        index, found = request + 1, 0
        while index > 0:
            found += self._sums[index]
            index -= index & -index
        return found
