"""Records prompts that workers have yet to compute, so that their pages count as cached before they are announced.

The prefix index knows a page once its worker has announced it. With long queues that is seconds after the placement,
and meanwhile prompts with the same beginning would be computed on several workers. A prompt is recorded from its
placement until its first token, its failure or its end.

Pure and synchronous. A prompt is represented by the hashes of the pages at its *marks*, which are `MARK_TOKENS` apart:
a page's hash covers everything before it, so a shared mark is a shared prefix. Memory is bounded by `_MAX_MARKS`;
prompts beyond that are not recorded, nor are those of other routers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.types import PageHash, WorkerId
from router.routing.costs.inflight import WorkKey

MARK_TOKENS = 512
MAX_MARKS_PER_PROMPT = 128  # 65,536 tokens; the rest of a longer prompt is not recorded
_MAX_MARKS = 262_144  # over all prompts


def mark_pages(page_size: int) -> int:
    """Returns the number of pages from one mark to the next."""
    return max(1, MARK_TOKENS // page_size)


def marks_of(hashes: Sequence[PageHash], page_size: int) -> Sequence[PageHash]:
    """Returns those of a prompt's page hashes that are marks."""
    stride = mark_pages(page_size)
    return hashes[stride - 1 : stride * MAX_MARKS_PER_PROMPT : stride]


class PendingPrompts:
    """Counts the pending prompts of each worker by mark."""

    def __init__(self) -> None:
        self._counts: dict[PageHash, dict[WorkerId, int]] = {}
        self._prompts: dict[WorkKey, tuple[WorkerId, Sequence[PageHash]]] = {}
        self._num_marks = 0  # invariant: the number of marks in `_prompts`

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def add(self, key: WorkKey, worker_id: WorkerId, marks: Sequence[PageHash]) -> None:
        """Records a prompt that the worker will compute, until `release` is called with the key."""
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

        Consumes the iterable only up to the first unknown mark.
        """
        depths: dict[WorkerId, int] = {}
        for depth, mark in enumerate(marks, 1):
            counts = self._counts.get(mark)
            if counts is None:
                break
            depths.update(dict.fromkeys(counts, depth))
        return depths
