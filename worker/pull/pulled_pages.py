"""Lets prompts continue with pages that are pulled while the tokens before them are computed. Schedulers call it."""

from __future__ import annotations

from engine.cache.prefix_cache import PrefixCache
from engine.step.sequence import Sequence


def take_pulled_pages(sequence: Sequence, cache: PrefixCache, page_size: int) -> int:
    """Lets a prompt that holds pages continue with pulled ones. Returns how many tokens it need not compute.

    No step in flight may write its pages from `num_computed_tokens` on.
    """
    first, num_begun = divmod(sequence.num_computed_tokens, page_size)
    if num_begun or not cache.is_awaiting:
        return 0
    hashes = sequence.reusable_hashes(page_size)
    num_taken = cache.swap_in(hashes, sequence.pages, first)
    if num_taken:
        sequence.num_computed_tokens += num_taken * page_size
        cache.note_found_texts(sequence, hashes[: first + num_taken])
    return num_taken * page_size


def num_tokens_to_pulled(sequence: Sequence, start: int, cache: PrefixCache, page_size: int) -> int:
    """Returns how many tokens from position `start` on to compute until the prompt ends or can continue with pulled
    pages.
    """
    num_left = len(sequence.token_ids) - start
    if num_left == 1 or not cache.is_awaiting:
        return num_left
    first = -(-start // page_size)
    ahead = sequence.reusable_hashes(page_size)[first:]
    num_lacking = cache.num_lacking(ahead)
    return num_left if num_lacking == len(ahead) else (first + num_lacking) * page_size - start
