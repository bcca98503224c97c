"""Tests the language of the project: no word that docs/glossary.md bans, no docstring that begins as a fragment."""

from __future__ import annotations

from tests.support.repository import house


def test_no_banned_word_is_used() -> None:
    assert not house.banned_uses()


def test_no_docstring_begins_as_a_fragment() -> None:
    assert not house.fragments()
