"""Divides the contexts of a batch's decodes into a list of work items, on the device (Triton).

An item is up to `SPLIT_TOKENS` tokens of one sequence. A fixed number of programs takes the items in turn
(`engine.kernels.triton.attention.paged_decode`), so one long context among many short ones occupies the whole device
instead of a single program. The host reads nothing: a CUDA graph computes the list from the lengths of each replay.

A sequence is split only by its own length, so its attention does not depend on the batch. Only if a batch needs more
than `NUM_SPARE_ITEMS` items beyond one per sequence, which is half a million tokens, are all its splits twice as long,
or four times, and so on.

Shapes: `B` sequences, `W` items.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_interface import SPLIT_TOKENS

NUM_SPARE_ITEMS = 1024
_BLOCK = 256


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """The items of one step's decodes for one window; every layer with that window uses it."""

    start_B1: torch.Tensor  # int32, the first item of each sequence; the last entry is the number of items
    size_1: torch.Tensor  # int32, tokens of an item
    sequence_W: torch.Tensor  # int32, the sequence of each item; undefined past the last
    split_tokens: int  # sequences of up to that many tokens have one item

    @property
    def max_items(self) -> int:
        return self.sequence_W.shape[0]


def plan_decodes(
    context_lens_B: torch.Tensor,
    window: int | None,
    *,
    split_tokens: int = SPLIT_TOKENS,
    num_spare_items: int = NUM_SPARE_ITEMS,
    block: int = _BLOCK,
) -> DecodePlan:
    """Returns the items of sequences with these lengths, int32. Never waits for the device.

    A sequence of context 0 has one item, without tokens. `block` is how many lengths or items a program holds at once.
    """
    num_sequences = context_lens_B.shape[0]

    def new(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=context_lens_B.device)

    plan = DecodePlan(new(num_sequences + 1), new(1), new(num_sequences + num_spare_items), split_tokens)
    _plan_kernel[(num_sequences,)](
        context_lens_B, plan.start_B1, plan.size_1, plan.sequence_W, window or 0, num_sequences, plan.max_items,
        SPLIT_TOKENS=split_tokens, BLOCK=block, num_warps=2,
    )  # fmt: skip
    return plan


def plan_decodes_reference(
    context_lens: list[int], window: int | None, split_tokens: int, num_spare_items: int
) -> tuple[list[int], int, list[int]]:
    """Returns the plan's columns, computed on the host."""
    seen = [min(length, window or length) for length in context_lens]
    size = split_tokens
    while sum(max(1, -(-length // size)) for length in seen) > len(seen) + num_spare_items:
        size *= 2
    counts = [max(1, -(-length // size)) for length in seen]
    starts = [sum(counts[:place]) for place in range(len(counts) + 1)]
    return starts, size, [sequence for sequence, count in enumerate(counts) for _ in range(count)]


@triton.jit(
    do_not_specialize=["num_sequences", "max_items", "window"], do_not_specialize_on_alignment=["context_lens_ptr"]
)
def _plan_kernel(
    context_lens_ptr,  # int32 [B]
    start_ptr,  # int32 [B + 1]
    size_ptr,  # int32 [1]
    sequence_ptr,  # int32 [W]
    window,  # 0: none
    num_sequences,
    max_items,  # W, at least B
    SPLIT_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # grid: (B,), each program for one sequence; all of them add up the same totals
    sequence = tl.program_id(0)
    size = tl.full([], SPLIT_TOKENS, tl.int32)
    total = _count(context_lens_ptr, num_sequences, window, size, num_sequences, BLOCK)
    while total > max_items:
        size *= 2
        total = _count(context_lens_ptr, num_sequences, window, size, num_sequences, BLOCK)
    first = _count(context_lens_ptr, num_sequences, window, size, sequence, BLOCK)
    past = _count(context_lens_ptr, num_sequences, window, size, sequence + 1, BLOCK)
    tl.store(start_ptr + sequence, first)
    if sequence == 0:
        tl.store(size_ptr, size)
        tl.store(start_ptr + num_sequences, total)
    item_W = tl.arange(0, BLOCK)
    for start in range(first, past, BLOCK):
        tl.store(sequence_ptr + start + item_W, sequence + tl.zeros([BLOCK], tl.int32), mask=start + item_W < past)


@triton.jit
def _count(context_lens_ptr, num_sequences, window, size, stop, BLOCK: tl.constexpr):
    """Returns the number of items of the sequences before `stop`."""
    counted = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, BLOCK):
        place_B = start + tl.arange(0, BLOCK)
        seen_B = tl.load(context_lens_ptr + place_B, mask=place_B < stop, other=0)
        seen_B = tl.where(window > 0, tl.minimum(seen_B, window), seen_B)
        items_B = tl.maximum((seen_B + size - 1) // size, 1)
        counted += tl.sum(tl.where(place_B < stop, items_B, 0), 0)
    return counted
