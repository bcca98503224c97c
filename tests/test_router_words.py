"""Texts by their words: the same ids as the library's, for whatever text, known words or new ones."""

import json
import string

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tokenizer import Tokenizer
from router.words import _KNOWN, Words, word_rules
from tests.router_fakes import MODEL

ASCII = "".join(map(chr, range(128)))
# What rules differ in: letters, digits, marks, contractions, runs of each kind of white space.
PIECES = [
    "a",
    "Be",
    "sta",
    "1",
    "234",
    "5678",
    "'",
    "'s",
    "'LL",
    "'re",
    "!",
    "?!",
    "_",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\v",
    "\x1c",
]
TEXTS = st.one_of(st.text(alphabet=ASCII, max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join))


def library(pre_tokenizer: dict | None = None) -> tokenizers.Tokenizer:
    """The bundled tokenizer, with other rules where given."""
    description = json.loads((MODEL / "tokenizer.json").read_text())
    description["pre_tokenizer"] = pre_tokenizer or description["pre_tokenizer"]
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def split_by(pattern: str) -> dict:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}


LIBRARIES = [library(), *(library(split_by(pattern)) for pattern in _KNOWN)]


def words_of(library: tokenizers.Tokenizer) -> Words:
    rules = word_rules(json.loads(library.to_str()))
    assert rules is not None
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    return Words(rules, added, lambda texts: [library.encode(text, add_special_tokens=False).ids for text in texts])


@pytest.mark.parametrize("library", LIBRARIES, ids=["bundled", "gpt2", "llama3", "qwen2"])
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_ids_are_the_library_s(library, texts):
    words = words_of(library)
    for text in [*texts, *texts]:  # the second time from what the first has taught
        ids = words.ids(text)
        assert ids is None or ids == library.encode(text, add_special_tokens=False).ids
        again = words.ids(text)
        assert again is None or again == library.encode(text, add_special_tokens=False).ids


def test_a_text_of_known_words_needs_no_library():
    bundled, calls = library(), []
    rules = word_rules(json.loads(bundled.to_str()))

    def encode(texts):
        calls.append(list(texts))
        return [bundled.encode(text, add_special_tokens=False).ids for text in texts]

    words = Words(rules, [], encode)
    words.ids("the cat sat on the mat. the")
    calls.clear()
    ids = words.ids("the mat sat. the cat on the mat")
    assert ids == bundled.encode("the mat sat. the cat on the mat", add_special_tokens=False).ids
    assert not calls


def test_mostly_new_texts_go_through_the_library_until_their_words_are_known():
    words = words_of(library())
    text = " ".join(f"{one}{other}" for one in string.ascii_lowercase for other in "xy")
    turns = 0
    while (ids := words.ids(text)) is None:
        turns += 1
        assert turns < 10
    assert turns > 0
    assert ids == library().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["naïve", "<|user|>Hello", "a <|end|> b"])
def test_other_characters_and_added_tokens_are_left_to_the_library(text):
    assert words_of(library()).ids(text) is None


def test_words_too_long_to_remember_are_left_to_the_library():
    words = words_of(library())
    assert words.ids("a" * 65) is None
    assert words.ids("a" * 65) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("router.words._MAX_WORDS", 8)
    bundled = library()
    words = words_of(bundled)
    for text in ("a b c d", "e f g h", "i j", "a b c d"):
        ids = words.ids(text)
        assert ids is None or ids == bundled.encode(text, add_special_tokens=False).ids
        assert len(words._ids) <= 8


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": split_by("[a-z]+")},
    ],
)
def test_rules_that_are_not_known_are_not_guessed(change):
    description = json.loads((MODEL / "tokenizer.json").read_text())
    assert word_rules(description) is not None
    assert word_rules({**description, **change}) is None


async def test_the_router_s_tokenizer_puts_special_tokens_around():
    tokenizer = Tokenizer.load(MODEL)
    try:
        expected = library().encode("the cat sat on the mat").ids
        assert await tokenizer.encode("the cat sat on the mat") == expected
        assert await tokenizer.encode("the cat sat on the mat") == expected
    finally:
        tokenizer.close()
