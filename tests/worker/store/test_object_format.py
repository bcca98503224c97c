"""Tests objects of the shared store: what a reader accepts, and that nothing else is ever read as pages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.page_hash import hash_pages, make_salt
from penstock.types import PageHash
from tests.support.suite.examples import examples
from worker.pull.store.object_format import RunFormat, UnusableObject

FORM = RunFormat("layout", 192, 16, b"k" * 32)
OPEN = replace(FORM, key=b"")
HASHES = hash_pages(list(range(16 * FORM.run_pages)), 16, b"salt")
PAGES = memoryview(bytearray(random.Random(1).randbytes(FORM.run_bytes)))


def packed(form: RunFormat = FORM) -> bytes:
    return form.pack(HASHES, PAGES) + PAGES


@pytest.mark.parametrize("form", [FORM, OPEN])
def test_a_packed_object_is_unpacked(form: RunFormat) -> None:
    content = packed(form)
    assert form.unpack(memoryview(content), HASHES) == PAGES
    assert len(content) <= form.max_object_bytes


@pytest.mark.parametrize("form", [FORM, OPEN])
@examples(200)
@given(where=st.floats(0, 1, exclude_max=True), flipped=st.integers(1, 255))
def test_an_object_with_a_changed_byte_is_refused(form: RunFormat, where: float, flipped: int) -> None:
    content = bytearray(packed(form))
    content[int(where * len(content))] ^= flipped
    with pytest.raises(UnusableObject):
        form.unpack(memoryview(content), HASHES)


@examples(100)
@given(length=st.integers(0, len(packed()) - 1), longer=st.booleans())
def test_a_truncated_or_extended_object_is_refused(length: int, longer: bool) -> None:
    content = packed()
    content = content + content[:length] + b"." if longer else content[:length]
    with pytest.raises(UnusableObject):
        FORM.unpack(memoryview(content), HASHES)


@examples(100)
@given(content=st.binary(max_size=4096))
def test_foreign_content_is_refused(content: bytes) -> None:
    for form in (FORM, OPEN):
        with pytest.raises(UnusableObject):
            form.unpack(memoryview(content), HASHES)


@pytest.mark.parametrize("form", [FORM, OPEN])
def test_an_object_under_another_name_is_refused(form: RunFormat) -> None:
    others: list[PageHash] = hash_pages(list(range(1, 1 + 16 * form.run_pages)), 16, b"salt")
    with pytest.raises(UnusableObject, match="other pages than its name says"):
        form.unpack(memoryview(packed(form)), others)


def test_a_writer_without_the_secret_cannot_add_objects() -> None:
    for stranger in (OPEN, replace(FORM, key=b"x" * 32)):
        assert stranger.folder != FORM.folder
        with pytest.raises(UnusableObject, match="a stranger has written it"):
            FORM.unpack(memoryview(packed(stranger)), HASHES)
    with pytest.raises(UnusableObject):
        OPEN.unpack(memoryview(packed()), HASHES)


def test_layouts_keys_and_tenants_have_different_names() -> None:
    forms = [FORM, OPEN, replace(FORM, layout="other"), replace(FORM, page_bytes=96), replace(FORM, page_tokens=8)]
    assert len({form.folder for form in forms}) == len(forms)
    tokens = list(range(16))
    salts = [make_salt("a"), make_salt("b"), make_salt("a", tenant="t"), make_salt("a", adapter="t")]
    assert len({FORM.name(hash_pages(tokens, 16, salt)[-1]) for salt in salts}) == len(salts)


@pytest.mark.parametrize(("page_bytes", "run_pages"), [(1 << 14, 16), (1 << 20, 8), (2 << 20, 4), (64 << 20, 1)])
def test_objects_are_a_few_megabytes_at_most(page_bytes: int, run_pages: int) -> None:
    assert replace(FORM, page_bytes=page_bytes).run_pages == run_pages
