"""Computes the hashes of full KV pages, in the same way for routers and workers.

A page's hash chains over everything its KV depends on: the salt (model revision, tokenizer revision, adapter, tenant),
every token before it, and its own tokens. It has no seed, so that every process computes the same, and it resists
collisions (BLAKE2b, 128 bits), since colliding prompts would read each other's KV and anybody can write prompts. It
takes about 0.4 us for a page of 16 tokens.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from penstock.types import PageHash

HASH_VERSION = 1
HASH_BYTES = 16
_FRESH = blake2b(digest_size=HASH_BYTES)  # copying this is a quarter cheaper than a new state for each page


def make_salt(model_revision: str, *, adapter: str = "", tenant: str = "", key: bytes = b"") -> bytes:
    """Returns the root of a hash chain. Parts are length-prefixed, so that different tuples give different salts.

    With a `key` (at most 64 bytes) the root is a MAC: without the key, a hash does not reveal whose pages it names.
    """
    digest = blake2b(digest_size=HASH_BYTES, person=b"penstock-page", key=key)
    for part in (str(HASH_VERSION), model_revision, adapter, tenant):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def hash_pages(
    token_ids: Sequence[int], page_size: int, salt: bytes, parents: Sequence[PageHash] = ()
) -> list[PageHash]:
    """Returns one hash for each full page of `token_ids`, `len(token_ids) // page_size` in all.

    `parents` are the known hashes of leading pages, which are not recomputed. A partial last page has no hash.
    """
    num_full = len(token_ids) // page_size
    hashes = list(parents[:num_full])
    parent = hashes[-1] if hashes else PageHash(salt)
    fresh = _FRESH.copy
    for (tokens,) in _pages(token_ids[len(hashes) * page_size : num_full * page_size], page_size):
        state = fresh()
        state.update(parent + tokens)
        parent = state.digest()  # type: ignore[assignment]  # PageHash() itself would cost 10 % of the loop
        hashes.append(parent)
    return hashes


def hash_next_pages(token_ids: Sequence[int], page_size: int, parents: Sequence[PageHash]) -> list[PageHash]:
    """Returns the hash of one page after each of `parents` (or salts), which belong to unrelated chains.

    `token_ids` holds the pages' tokens end to end.
    """
    hashes: list[PageHash] = []
    fresh = _FRESH.copy
    for parent, (tokens,) in zip(parents, _pages(token_ids, page_size), strict=True):
        state = fresh()
        state.update(parent + tokens)
        hashes.append(state.digest())  # type: ignore[arg-type]
    return hashes


def _pages(token_ids: Sequence[int], page_size: int) -> Iterator[tuple[bytes]]:
    return struct.iter_unpack(f"{4 * page_size}s", array("I", token_ids).tobytes())  # type: ignore[return-value]
