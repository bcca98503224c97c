"""Tests that a hand-off is accepted only if its manifest fits the request and the pages that arrived."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from decode_worker.prefill.transfer_table import TransferAttempt
from decode_worker.request import DecodeRequest
from engine.step.sequence import Sequence
from kv_transfer.endpoints import KvReceiver
from kv_transfer.session.lease import Lease
from kv_transfer.session.transfer_session import Manifest, TransferSession
from penstock.types import PageHash, PageId, RequestId, SamplingParams, TransferKey
from tests.support.transfer.transfer_pair import key

PAGE_SIZE = 4
NUM_TOKENS = 14  # three full pages and a part of a fourth
NUM_HELD = 1  # the first page is already cached here
PAGES = [PageId(page) for page in (7, 5, 6)]


class FakeChecksums:
    """Stands in for the receiver: the checksum of a page is its number."""

    def checksums(self, key: TransferKey, pages: tuple[PageId, ...]) -> list[int]:
        return [int(page) for page in pages]


def hashes() -> list[PageHash]:
    return sequence().hash_full_pages(PAGE_SIZE)


def sequence() -> Sequence:
    return Sequence(RequestId("r"), list(range(NUM_TOKENS)), NUM_TOKENS, SamplingParams(max_tokens=4), b"salt")


RIGHT = Manifest(NUM_TOKENS, len(PAGES), tuple(hashes()[NUM_HELD:]), tuple(int(page) for page in PAGES))


def mismatch(manifest: Manifest, *, with_checksums: bool = True, num_reserved: int = len(PAGES)) -> str | None:
    session = TransferSession(key(1), Lease(10.0, 0.0))
    session.on_reserved([*PAGES, *map(PageId, range(10, 20))][:num_reserved], 0.0)
    session.on_manifest(manifest)
    request = cast(DecodeRequest, SimpleNamespace(sequence=sequence()))
    attempt = TransferAttempt(session, request, sender=None, num_tokens=NUM_TOKENS, num_held=NUM_HELD)  # type: ignore[arg-type]
    return attempt.mismatch(PAGE_SIZE, cast(KvReceiver, FakeChecksums()) if with_checksums else None)


def test_a_manifest_that_fits_is_accepted() -> None:
    assert mismatch(RIGHT) is None
    assert mismatch(RIGHT, num_reserved=5) is None  # a migrating sequence reserves pages for later tokens
    assert mismatch(replace(RIGHT, checksums=()), with_checksums=False) is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_tokens": NUM_TOKENS - 1}, "13 tokens in 3 pages; expected 14 in 3"),
        ({"num_tokens": NUM_TOKENS + 1}, "15 tokens in 3 pages; expected 14 in 3"),
        ({"num_pages": 2}, "14 tokens in 2 pages; expected 14 in 3"),
        ({"num_pages": 4}, "14 tokens in 4 pages; expected 14 in 3"),
        ({"page_hashes": ()}, "the page hashes differ"),
        ({"page_hashes": tuple(hashes()[NUM_HELD:-1])}, "the page hashes differ"),
        ({"page_hashes": tuple(hashes())}, "the page hashes differ"),
        ({"page_hashes": tuple(reversed(hashes()[NUM_HELD:]))}, "the page hashes differ"),
        ({"checksums": ()}, "checksums differ"),
        ({"checksums": (7, 6, 5)}, "checksums differ"),
    ],
)
def test_a_manifest_that_contradicts_the_request_or_the_pages_is_refused(wrong: dict[str, object], says: str) -> None:
    found = mismatch(replace(RIGHT, **wrong))  # type: ignore[arg-type]
    assert found is not None
    assert says in found


def test_a_hand_off_with_fewer_pages_than_the_prompt_needs_is_refused() -> None:
    assert mismatch(RIGHT, num_reserved=2) is not None
