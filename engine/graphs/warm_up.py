"""Makes steps that together use every variant of every Triton kernel, so that no request waits for a compiler.

Triton compiles a kernel per tile size and per way to split a context. Which variants a step uses follows from its
number of tokens and the bound of its contexts, by powers of two; `Engine.warm_up` therefore computes one step of each.
Their results are meaningless: every token is written into one scratch page and read from there. Compiled kernels are
kept on disk (TRITON_CACHE_DIR, ~/.triton/cache), where the next start finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from engine.kernels.attention_interface import MAX_SPLITS, MIN_SPLIT_TOKENS
from engine.step.batch import HostBatch
from penstock.types import PageId

log = logging.getLogger(__name__)


def warm_up_batches(page: PageId, page_size: int, max_context: int, most_tokens: int) -> Iterator[HostBatch]:
    """Yields one batch per kernel variant, all over the scratch page `page`.

    No step has more than `most_tokens` tokens, no sequence more than `max_context`. If nothing is compiled, pass
    `most_tokens` 0: a short prompt and a decode are enough.
    """
    contexts = contexts_up_to(max_context) if most_tokens else [1]
    kinds = [(1, 1, context) for context in contexts]  # sequences, tokens of each, their context
    largest = max(most_tokens, 2)
    for num_tokens in dict.fromkeys((*(2 << power for power in range(largest.bit_length() - 1)), largest)):
        length = min(num_tokens, max_context)
        for context in dict.fromkeys((length, max(length, contexts[-1]))):
            kinds.append((num_tokens // length, length, context))
    for done, kind in enumerate(kinds):
        if done and done % 8 == 0:
            log.info("compiled the kernels of %d of %d kinds of step", done, len(kinds))
        yield _batch(page, page_size, *kind)


def contexts_up_to(max_context: int) -> list[int]:
    """Returns contexts that attention splits into one part, two, four and so on, up to the most for one sequence."""
    contexts = [1]
    while contexts[-1] < max_context and contexts[-1] < MAX_SPLITS * MIN_SPLIT_TOKENS:
        contexts.append(min(max(2 * contexts[-1], 2 * MIN_SPLIT_TOKENS), max_context))
    return contexts


def _batch(page: PageId, page_size: int, num_sequences: int, length: int, context: int) -> HostBatch:
    num_tokens = num_sequences * length
    position_T = np.tile(np.arange(context - length, context), num_sequences)
    return HostBatch(
        token_ids_T=np.zeros(num_tokens, np.int64),
        positions_T=position_T,
        query_start_B1=np.arange(0, num_tokens + 1, length),
        context_B=np.full(num_sequences, context),
        page_table_BW=np.full((num_sequences, -(-context // page_size)), page, np.int32),
        slot_page_T=np.full(num_tokens, page, np.int64),
        slot_offset_T=position_T % page_size,
        max_query_len=length,
        num_decodes=num_sequences if length == 1 else 0,
        sampled_places=np.zeros(1, np.int64),
        logit_rows_R=np.zeros(1, np.int64),
    )
