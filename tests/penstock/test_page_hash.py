"""Tests page hashes: chained, seedless, salted, and the same from any starting point."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.page_hash import hash_next_pages, hash_pages, make_salt
from penstock.types import PageHash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(tokens=TOKENS, page_size=st.integers(1, 20), known=st.integers(0, 10))
def test_starting_from_a_known_parent_changes_no_hash(tokens: list[int], page_size: int, known: int) -> None:
    salt = make_salt("revision")
    whole = hash_pages(tokens, page_size, salt)
    assert len(whole) == len(tokens) // page_size
    assert hash_pages(tokens, page_size, salt, whole[:known]) == whole


@given(tokens=TOKENS, page_size=st.integers(1, 20))
def test_next_pages_of_many_chains_equal_those_of_each_chain(tokens: list[int], page_size: int) -> None:
    count = len(tokens) // page_size
    salts = [make_salt("revision", tenant=str(number)) for number in range(count)]
    known = [hash_pages(tokens, page_size, salt) for salt in salts]
    parents = [chain[number - 1] if number else PageHash(salts[0]) for number, chain in enumerate(known)]
    wanted = [chain[number] for number, chain in enumerate(known)]
    assert hash_next_pages(tokens[: count * page_size], page_size, parents) == wanted


@given(tokens=st.lists(st.integers(0, 100), min_size=8, max_size=40), changed=st.integers(0, 39))
def test_a_changed_token_changes_its_page_and_every_later_one(tokens: list[int], changed: int) -> None:
    changed %= len(tokens)
    salt = make_salt("revision")
    before = hash_pages(tokens, 4, salt)
    tokens[changed] += 1
    after = hash_pages(tokens, 4, salt)
    page = changed // 4
    assert before[:page] == after[:page]
    assert all(old != new for old, new in zip(before[page:], after[page:], strict=True))


def test_salts_differ_by_revision_adapter_and_tenant_but_not_by_how_their_text_is_split() -> None:
    salts = {
        make_salt("a"),
        make_salt("b"),
        make_salt("a", tenant="x"),
        make_salt("a", adapter="x"),
        make_salt("ax"),
        make_salt("a", adapter="x", tenant="y"),
        make_salt("a", adapter="xy"),
    }
    assert len(salts) == 7


@pytest.mark.processes
def test_another_process_computes_the_same_hash() -> None:
    code = "from penstock.kv.page_hash import *; print(hash_pages(range(32), 16, make_salt('m'))[-1].hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == hash_pages(range(32), 16, make_salt("m"))[-1].hex()
