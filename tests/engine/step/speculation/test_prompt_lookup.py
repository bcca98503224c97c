"""Tests that prompt lookup equals a search of the whole text, in whatever pieces the text arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.step.speculation.acceptance import AcceptanceRate, num_accepted
from engine.step.speculation.prompt_lookup import _MAX_SLOTS, LENGTHS, PromptLookup
from engine.step.speculation.proposal import ProposalKind


def search(text: list[int], count: int) -> tuple[tuple[int, ...], ProposalKind] | None:
    """Returns the tokens after the latest earlier occurrence of the text's end, wrapping around, and the kind of
    match."""
    for kind, length in LENGTHS.items():
        for end in range(len(text) - 1, length - 1, -1):
            if len(text) >= length and text[end - length : end] == text[-length:]:
                followed = list(text[end:])
                while len(followed) < count:
                    followed.append(followed[len(followed) - (len(text) - end)])
                return tuple(followed[:count]), kind
    return None


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=300), count=st.integers(1, 12), parts=st.integers(1, 5))
def test_lookup_equals_a_search_of_the_whole_text(text: list[int], count: int, parts: int) -> None:
    lookup = PromptLookup(len(text) + 100)
    for part in range(1, parts + 1):  # short and long additions are read in different ways
        known = text[: -(-len(text) * part // parts)]
        found = lookup.propose(known, count)
        assert (found and (found.token_ids, found.kind)) == search(known, count)


def test_memory_is_bounded_and_overwritten_text_is_never_proposed() -> None:
    text = [(i * i * 7919 + i) % 50_000 for i in range(200_000)]
    lookup = PromptLookup(len(text))
    assert lookup.propose(text, 4) is None
    assert sum(index._ends.size for _, index in lookup._indexes) == 2 * _MAX_SLOTS
    text += text[-500:-100]
    found = lookup.propose(text, 4)
    assert found is not None
    assert found.token_ids == tuple(text[-500:-496])


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=7))
def test_a_proposal_is_accepted_up_to_the_first_difference(proposed: list[int], sampled: list[int]) -> None:
    count = num_accepted(proposed, sampled)
    assert proposed[:count] == sampled[:count]
    assert count == min(len(proposed), len(sampled)) or proposed[count] != sampled[count]


def test_the_acceptance_rate_follows_recent_observations() -> None:
    rate = AcceptanceRate()
    assert rate.given(0.5) == 0.5
    for _ in range(60):
        rate.observe(4, 4)
    assert rate.given(0.5) > 0.95
    for _ in range(60):
        rate.observe(4, 0)
    assert rate.given(0.5) < 0.15
