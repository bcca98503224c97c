"""Hashes the pages of simulated prompts: the product's hashes, computed once for each block of a trace."""

from __future__ import annotations

from array import array

from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash
from simulator.request import TraceRequest

_MAX_BLOCKS = 200_000  # remembered; then all are forgotten, and hashed again if they return


class PromptHasher:
    """Remembers the hashes of each block after the pages before it, since most blocks of a trace recur."""

    def __init__(self, page_size: int, salt: bytes) -> None:
        self._page_size = page_size
        self._salt = salt
        self._known: dict[tuple[bytes, int], list[PageHash]] = {}

    def hashes(self, request: TraceRequest) -> list[PageHash]:
        """Returns one hash for each full page of the prompt."""
        size = self._page_size
        if request.block_tokens % size:
            return hash_pages(request.token_ids(), size, self._salt)
        num_full, parent, hashes = request.num_input_tokens // size, self._salt, list[PageHash]()
        for block in request.block_ids[: -(-num_full * size // request.block_tokens)]:
            run = self._known.get((parent, block)) or self._hash(parent, block, request.block_tokens)
            hashes += run
            parent = run[-1]
        del hashes[num_full:]
        return hashes

    def _hash(self, parent: bytes, block: int, num_tokens: int) -> list[PageHash]:
        if len(self._known) >= _MAX_BLOCKS:
            self._known.clear()
        tokens = array("I", [block]) * num_tokens
        run = self._known[parent, block] = hash_pages(tokens, self._page_size, parent)
        return run
