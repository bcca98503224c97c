"""Prompts that a worker has yet to compute: their pages count as cached there before the worker announces them.

The prefix index knows a page once its worker has announced it. Where queues are long that is seconds after the choice,
and prompts with the same beginning would be computed on several workers meanwhile. A prompt is known here from its
placement until its first token, its failure or its end.

Pure and synchronous. A prompt is represented by the hashes of the pages at its *marks*, which are `MARK_TOKENS` apart:
a page's hash names everything before it, so a shared mark is a shared prefix. Memory is bounded by `_MAX_MARKS`;
prompts beyond that are not recorded. Other routers' prompts are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.types import PageHash, WorkerId
from router.routing.costs.inflight import WorkKey

MARK_TOKENS = 512
MAX_MARKS_PER_PROMPT = 128  # 65,536 tokens; the rest of a longer prompt is not recorded
_MAX_MARKS = 262_144  # of all prompts


def mark_pages(page_size: int) -> int:
    """Returns the distance of two marks in pages."""
    return max(1, MARK_TOKENS // page_size)


def marks_of(hashes: Sequence[PageHash], page_size: int) -> Sequence[PageHash]:
    """Returns the marks among the hashes of a prompt's leading pages."""
    stride = mark_pages(page_size)
    return hashes[stride - 1 : stride * MAX_MARKS_PER_PROMPT : stride]


class PendingPrompts:
    """Counts, for each mark, the pending prompts by worker."""

    def __init__(self) -> None:
        self._counts: dict[PageHash, dict[WorkerId, int]] = {}
        self._prompts: dict[WorkKey, tuple[WorkerId, Sequence[PageHash]]] = {}
        self._num_marks = 0  # invariant: the sum over `_prompts`

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def add(self, key: WorkKey, worker_id: WorkerId, marks: Sequence[PageHash]) -> None:
        """Records a prompt that the worker will compute, until `release` of the key."""
        if not marks or key in self._prompts or self._num_marks + len(marks) > _MAX_MARKS:
            return
        self._prompts[key] = worker_id, marks
        self._num_marks += len(marks)
        for mark in marks:
            counts = self._counts.setdefault(mark, {})
            counts[worker_id] = counts.get(worker_id, 0) + 1

    def release(self, key: WorkKey) -> None:
        """Forgets a prompt. Idempotent."""
        worker_id, marks = self._prompts.pop(key, (None, ()))
        if worker_id is None:
            return
        self._num_marks -= len(marks)
        for mark in marks:
            counts = self._counts[mark]
            counts[worker_id] -= 1
            if not counts[worker_id]:
                del counts[worker_id]
                if not counts:
                    del self._counts[mark]

    def match(self, marks: Iterable[PageHash]) -> dict[WorkerId, int]:
        """Returns how many leading marks of a prompt each worker will have computed; leaves out workers with none.

        Takes marks from the iterable no further than the first one that is unknown.
        """
        depths: dict[WorkerId, int] = {}
        for depth, mark in enumerate(marks, 1):
            counts = self._counts.get(mark)
            if counts is None:
                break
            depths.update(dict.fromkeys(counts, depth))
        return depths
