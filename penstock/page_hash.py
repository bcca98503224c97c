"""Names of full KV pages, computed alike by routers and workers.

A page's hash chains over everything its KV depends on: the salt (model revision, tokenizer revision, adapter, tenant),
every token before it, and its own tokens. Seedless, so that it means the same in every process, and collision
resistant (BLAKE2b, 128 bits): two prompts that collide would read each other's KV, and prompts are written by
strangers. About 0.4 us a page of 16 tokens.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from penstock.types import PageHash

HASH_VERSION = 1
_DIGEST_BYTES = 16
_FRESH = blake2b(digest_size=_DIGEST_BYTES)  # to copy it is a quarter cheaper than to set up each page's state anew


def make_salt(model_revision: str, *, adapter: str = "", tenant: str = "", key: bytes = b"") -> bytes:
    """The root of a hash chain. Parts are length-prefixed: no two different tuples give the same salt.

    With a `key` (at most 64 bytes) it is a MAC: nobody without that key can tell whose pages a hash names.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"penstock-page", key=key)
    for part in (str(HASH_VERSION), model_revision, adapter, tenant):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def hash_pages(
    token_ids: Sequence[int], page_size: int, salt: bytes, parents: Sequence[PageHash] = ()
) -> list[PageHash]:
    """Hashes of the full pages of `token_ids`, those in `parents` taken as known for the leading ones.

    Returns one hash a full page, `len(token_ids) // page_size` in all; a partial last page has none.
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
    """One page after each of `parents` (or salts), of chains that have nothing to do with one another; `token_ids` has
    their tokens end to end."""
    hashes: list[PageHash] = []
    fresh = _FRESH.copy
    for parent, (tokens,) in zip(parents, _pages(token_ids, page_size), strict=True):
        state = fresh()
        state.update(parent + tokens)
        hashes.append(state.digest())  # type: ignore[arg-type]
    return hashes


def _pages(token_ids: Sequence[int], page_size: int) -> Iterator[tuple[bytes]]:
    return struct.iter_unpack(f"{4 * page_size}s", array("I", token_ids).tobytes())  # type: ignore[return-value]
