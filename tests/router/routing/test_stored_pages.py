"""Tests what a router knows of shared stores, and how many leading tokens of a prompt it finds there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.page_hash import hash_pages, make_salt
from router.dispatch.placement import PromptPages
from router.routing.index.stored_pages import StoredPages, StoreKey
from tests.support.suite.examples import examples

SIZE, RUN = 16, 4
STORE, OTHER = (StoreKey(url, "layout", RUN) for url in ("file:///a", "file:///b"))
SALT = make_salt("r1")


@examples(50)
@given(num_tokens=st.integers(0, 40 * SIZE), stored=st.sets(st.integers(0, 12)))
def test_a_prompt_is_stored_up_to_its_first_missing_run(num_tokens: int, stored: set[int]) -> None:
    tokens = list(range(num_tokens))
    hashes, index = hash_pages(tokens, SIZE, SALT), StoredPages()
    index.apply(STORE, [hashes[(run + 1) * RUN - 1] for run in stored if (run + 1) * RUN <= len(hashes)], [])
    leading = next(run for run in range(20) if run not in stored)
    wanted = min(leading, len(hashes) // RUN) * RUN * SIZE
    assert PromptPages(tokens, SALT).stored_tokens(index, STORE, SIZE) == wanted
    assert PromptPages(tokens, SALT).stored_tokens(index, OTHER, SIZE) == 0
    assert PromptPages(tokens, b"another tenant").stored_tokens(index, STORE, SIZE) == 0


def test_changes_add_and_remove_runs_of_one_store() -> None:
    pages, index = hash_pages(list(range(4 * SIZE)), SIZE, SALT), StoredPages()
    index.apply(STORE, pages[:3], [])
    index.apply(OTHER, pages[:1], [])
    index.apply(STORE, pages[3:], pages[:2])
    assert set(index.runs(STORE)) == set(pages[2:])
    assert set(index.runs(OTHER)) == set(pages[:1])
    index.drop(STORE)
    assert not index.runs(STORE)
    assert index.runs(OTHER)
