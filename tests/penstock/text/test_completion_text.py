"""Tests detokenizers and stop strings, however the text is split into tokens and pieces."""

from __future__ import annotations

import itertools

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.text.completion_text import CompletionText
from penstock.text.completions import CompletionDelta, Emitted
from penstock.text.detokenizer import WindowDetokenizer
from penstock.text.spelling import Spelling
from penstock.text.stop_strings import StopMatcher, StopStrings
from penstock.types import SamplingParams
from tests.support.suite.examples import examples

_CORPUS = ["the cat sat on the mat", "naïve café: 日本語 and emoji 🙂🙂 again", "日本語 🙂 the end"]


def _byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens(["[über]"])  # an ordinary added token, not spelled in the byte alphabet
    return tokenizer


def _byte_fallback() -> tokenizers.Tokenizer:
    """Returns a tokenizer like those of Llama 2 and Mistral: metaspace words, unknown characters as byte tokens."""
    words = ["▁", "▁the", "▁cat", "s", "a", "t", "▁日本", "é"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: len(vocabulary) + rank for rank, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


_COMPILED = _byte_level()
BYTE_LEVEL = Spelling(_COMPILED)
BYTE_FALLBACK = Spelling(_byte_fallback())
BYTE_LEVEL_IDS = st.lists(st.integers(0, 320), max_size=40)


def _cut(items, borders):
    edges = [0, *sorted({border % (len(items) + 1) for border in borders}), len(items)]
    return [items[start:end] for start, end in itertools.pairwise(edges)]


@given(token_ids=BYTE_LEVEL_IDS, borders=st.lists(st.integers(0, 1000), max_size=10))
@examples(200)
def test_pieces_of_byte_level_text_add_up_to_the_whole(token_ids, borders):
    detokenizer = BYTE_LEVEL.detokenizer()
    pieces = [detokenizer.add(part) for part in _cut(token_ids, borders)] + [detokenizer.finish()]
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids)


@given(text=st.text(max_size=40), borders=st.lists(st.integers(0, 1000), max_size=10))
@examples(100)
def test_no_piece_of_valid_text_holds_part_of_a_character(text, borders):
    text = text.replace("\ufffd", "?")
    token_ids = _COMPILED.encode(text, add_special_tokens=False).ids
    for detokenizer in (BYTE_LEVEL.detokenizer(), WindowDetokenizer(BYTE_LEVEL.decode, frozenset({0, 1}))):
        pieces = [detokenizer.add(part) for part in _cut(token_ids, borders)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + detokenizer.finish() == BYTE_LEVEL.decode(token_ids)


@given(token_ids=BYTE_LEVEL_IDS, borders=st.lists(st.integers(0, 1000), max_size=10))
@examples(100)
def test_pieces_with_special_tokens_add_up_to_the_whole(token_ids, borders):
    detokenizer = BYTE_LEVEL.detokenizer(keep_special_tokens=True)
    pieces = [detokenizer.add(part) for part in _cut(token_ids, borders)] + [detokenizer.finish()]
    assert "".join(pieces) == BYTE_LEVEL.decode_all(token_ids)


def test_special_tokens_are_kept_on_request():
    for spelling, start in ((BYTE_LEVEL, 0), (BYTE_FALLBACK, 1)):
        the = spelling._compiled.get_vocab()["a"]
        kept, plain = spelling.detokenizer(keep_special_tokens=True), spelling.detokenizer()
        assert kept.add([start, the, start + 1]) + kept.finish() == "<s>a</s>"
        assert plain.add([start, the, start + 1]) + plain.finish() == "a"


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    borders=st.lists(st.integers(0, 1000), max_size=12),
)
@examples(100)
def test_an_included_stop_string_ends_the_text(text, stops, borders):
    matcher = StopMatcher(StopStrings(stops), includes_match=True)
    shown = "".join(matcher.add(part) for part in _cut(text, borders))
    shown += "" if matcher.stopped else matcher.finish()
    ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops) or ("\0",))]
    assert (shown, matcher.stopped) == (text[: ends[0]] if ends else text, bool(ends))


_CHARACTERS = [[3 + byte for byte in char.encode()] for char in "é日🙂a"]
_FALLBACK_GROUPS = st.one_of(st.sampled_from(_CHARACTERS), st.integers(259, 266).map(lambda word: [word]), st.just([2]))


@given(groups=st.lists(_FALLBACK_GROUPS, max_size=30), borders=st.lists(st.integers(0, 1000), max_size=10))
@examples(150)
def test_pieces_of_byte_fallback_text_add_up_to_the_whole(groups, borders):
    token_ids = [token_id for group in groups for token_id in group]
    detokenizer = BYTE_FALLBACK.detokenizer()
    pieces = [detokenizer.add(part) for part in _cut(token_ids, borders)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == BYTE_FALLBACK.decode(token_ids)


def test_invalid_utf8_cannot_grow_the_window():
    detokenizer = WindowDetokenizer(BYTE_LEVEL.decode, frozenset())
    invalid = _COMPILED.token_to_id("Ģ")  # byte 0x80
    shown = "".join(detokenizer.add([invalid]) for _ in range(1000)) + detokenizer.finish()
    assert shown == "\ufffd" * 1000
    assert len(detokenizer._window) <= 16


def test_an_unfinished_character_is_held_and_shown_at_the_end():
    smile = _COMPILED.encode("🙂", add_special_tokens=False).ids
    detokenizer = BYTE_LEVEL.detokenizer()
    first = BYTE_LEVEL.token_bytes(smile[0])
    assert detokenizer.add(smile[:1]) == first.decode(errors="ignore")
    assert detokenizer.add(smile[1:]) == ("🙂" if len(smile) > 1 else "")
    broken = _COMPILED.token_to_id("ð")  # byte 0xF0
    assert detokenizer.add([broken]) == ""
    assert detokenizer.finish() == "\ufffd"


def _expected(text, stops):
    """Returns the longest of the matches that end first, found by brute force."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    borders=st.lists(st.integers(0, 1000), max_size=12),
)
@examples(250)
def test_stop_strings_match_however_the_text_is_split(text, stops, borders):
    matcher = StopMatcher(StopStrings(stops))
    pieces = [matcher.add(part) for part in _cut(text, borders)]
    shown = "".join(pieces) + ("" if matcher.stopped else matcher.finish())
    assert (shown, matcher.stopped) == _expected(text, stops)
    if matcher.matched is not None:
        assert matcher.matched in stops
        assert text.startswith(shown + matcher.matched)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
@examples(100)
def test_text_is_held_no_longer_than_needed(text, stops):
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for position, char in enumerate(text):
        shown += matcher.add(char)
        if matcher.stopped:
            return
        held = text[len(shown) : position + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(text=st.text("ab", max_size=24), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
@examples(150)
def test_a_match_is_the_same_at_every_split_of_the_text(text, stops):
    compiled = StopStrings(stops)
    for cut in range(len(text) + 1):
        matcher = StopMatcher(compiled)
        shown = matcher.add(text[:cut]) + matcher.add(text[cut:])
        assert (shown + matcher.finish(), matcher.stopped) == _expected(text, stops)


@given(token_ids=BYTE_LEVEL_IDS, stops=st.lists(st.text("the ca日🙂", min_size=1, max_size=4), min_size=1, max_size=3))
@examples(100)
def test_a_resumed_completion_continues_as_if_uninterrupted(token_ids, stops):
    sampling = SamplingParams(max_tokens=100, min_tokens=len(token_ids) // 3, stop=tuple(stops))
    compiled = StopStrings(stops)
    whole = CompletionText(BYTE_LEVEL, sampling, compiled)
    outputs = [whole.feed(CompletionDelta(0, [token_id])) for token_id in token_ids]
    num_streamed = next((rank for rank, output in enumerate(outputs) if output.finish_reason), len(outputs))
    for cut in range(num_streamed + 1):
        resumed = CompletionText(BYTE_LEVEL, sampling, compiled)
        resumed.resume(Emitted(tuple(token_ids[:cut]), False))
        rest = [resumed.feed(CompletionDelta(0, [token_id])) for token_id in token_ids[cut:]]
        assert [output.text for output in rest[: num_streamed - cut + 1]] == [
            output.text for output in outputs[cut : num_streamed + 1]
        ]
        assert (resumed.stopped, resumed.ended) == (whole.stopped, whole.ended)


class _CountedSteps(dict):
    """Holds the edges of all states, and counts lookups."""

    num_lookups = 0

    def get(self, char, default=None):
        _CountedSteps.num_lookups += 1
        return super().get(char, default)


def test_crafted_stop_strings_take_at_most_two_steps_per_character():
    """Sixteen stop strings that almost match at each character would otherwise need a comparison for each prefix."""
    compiled = StopStrings(["a" * (255 - rank) + "b" for rank in range(16)])
    assert len(compiled._edges) <= 16 * 256
    compiled._edges = _CountedSteps(compiled._edges)
    matcher = StopMatcher(compiled)
    text = ("a" * 239 + "c") * 50
    _CountedSteps.num_lookups = 0
    shown = "".join(matcher.add(char) for char in text) + matcher.finish()
    assert shown == text
    assert _CountedSteps.num_lookups <= 2 * len(text)


def test_resuming_reads_only_the_tail_of_the_text():
    compiled = StopStrings(["the mat"])
    compiled._edges = _CountedSteps(compiled._edges)
    text = CompletionText(BYTE_LEVEL, SamplingParams(max_tokens=10_000, stop=("the mat",)), compiled)
    _CountedSteps.num_lookups = 0
    text.resume(Emitted(tuple(_COMPILED.encode("the cat " * 500 + "the m", add_special_tokens=False).ids), False))
    assert _CountedSteps.num_lookups <= 2 * len("the mat")
    output = text.feed(CompletionDelta(0, _COMPILED.encode("at", add_special_tokens=False).ids))
    assert (output.text, text.stopped) == ("", True)
