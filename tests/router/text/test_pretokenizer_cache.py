"""Tests that cached segments tokenize like the whole text, for every kind of tokenizer, within the cache's bounds."""

from __future__ import annotations

import asyncio
import json
import random
from array import array

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from router.text.pretokenizer_cache import AddedToken, PretokenizerCache, SegmentCutter
from router.text.tokenizer import Tokenizer
from tests.support.router.router_fakes import MODEL
from tests.support.suite.examples import examples

_CORPUS = ["the cat sat on the mat", "naïve café: 日本語 and 🙂🙂", "x = 12345; y<|e", "  two  spaces\n\n\nand lines"]
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIALS = ["<|bos|>", "<|user|>", "<|end|>", "<|end|>!", "</s>"]


def _train(pre_tokenizer, seed: int) -> tokenizers.Tokenizer:
    """Returns a BPE tokenizer with random merges, learned from a corpus that the seed selects."""
    rng = random.Random(seed)
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    made.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["".join(rng.choices("ab <|>eos\n", k=200)) for _ in range(20)] + _CORPUS, trainer)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(_SPECIALS)
    return made


def _strange() -> tokenizers.Tokenizer:
    """Returns a tokenizer with added tokens of every kind that must not be split."""
    made = _train(pre_tokenizers.ByteLevel(add_prefix_space=True), 1)
    made.normalizer = normalizers.NFC()
    made.add_tokens(
        [
            tokenizers.AddedToken("<|mask|>", lstrip=True, normalized=False),
            tokenizers.AddedToken("<|r|>", rstrip=True, normalized=False),
            tokenizers.AddedToken("word", single_word=True, normalized=False),
            tokenizers.AddedToken("cat sat", normalized=True),
            tokenizers.AddedToken("at<|", normalized=False),  # may consume the start of a special token
        ]
    )
    return made


def _metaspace() -> tokenizers.Tokenizer:
    """Returns a tokenizer like Llama 2's, which puts a space before the first word of a text, but not of a segment."""
    return _train(pre_tokenizers.Metaspace(prepend_scheme="first"), 2)


def _split_by(pattern: str) -> tokenizers.Tokenizer:
    """Returns the bundled tokenizer with another model family's rule for splitting words."""
    description = json.loads((MODEL / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _wrapped() -> tokenizers.Tokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+(?!\S)|\s*[\r\n]+|\w+|\s|[^\s\w]+[\r\n]*"), "isolated")
    made = _train(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), 3
    )
    ids = [(token, made.token_to_id(token)) for token in ("<|bos|>", "</s>")]
    made.post_processor = processors.TemplateProcessing("<|bos|> $A </s>", special_tokens=ids)
    return made


_KINDS = {
    "bundled": tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")),
    "byte-level": _train(pre_tokenizers.ByteLevel(add_prefix_space=False), 0),
    "strange": _strange(),
    "metaspace": _metaspace(),
    "wrapped": _wrapped(),
    "gpt2": _split_by(_GPT2),
    "llama3": _split_by(_LLAMA3),
    "qwen2": _split_by(_LLAMA3.replace("{1,3}", "")),
}
_WORDS = [
    *_SPECIALS,
    "<|assistant|>",
    "<|mask|>",
    "<|r|>",
    "word",
    "words",
    "cat sat",
    "at<|",
    " ",
    "  ",
    "\n\n",
    "a",
    "<|",
    "|>",
    "é",
    "e\u0301",
    # Pieces that rules for words treat differently.
    *("Be", "1", "5678", "'s", "'LL", "?!", "_", "\r\n", "\t", "\v", "\x1c"),
    "日本",
]
_TEXTS = st.lists(st.one_of(st.sampled_from(_WORDS), st.text(max_size=6)), max_size=24).map("".join)


@pytest.mark.parametrize("kind", _KINDS)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=4), wrapped=st.booleans())
@examples(60)
def test_segments_tokenize_like_the_whole_text(kind, texts, wrapped):
    library = _KINDS[kind]
    tokenizer = Tokenizer(library, None)

    async def encode_all() -> None:
        conversation = ""
        for text in texts:
            conversation += text
            whole = library.encode(conversation, add_special_tokens=wrapped).ids
            assert await tokenizer.encode(conversation, add_special_tokens=wrapped) == whole
            assert await tokenizer.encode(conversation, add_special_tokens=wrapped) == whole

    asyncio.run(encode_all())


async def test_special_tokens_surround_a_plain_prompt():
    tokenizer, library = Tokenizer.load(MODEL), _KINDS["bundled"]
    try:
        expected = library.encode("the cat sat on the mat").ids
        assert await tokenizer.encode("the cat sat on the mat") == expected
        assert await tokenizer.encode("the cat sat on the mat") == expected
    finally:
        tokenizer.close()


async def test_only_the_new_turn_of_a_conversation_is_tokenized():
    tokenizer = Tokenizer.load(MODEL)
    asked: list[list[str]] = []
    encode = tokenizer._encode
    tokenizer._encode = lambda parts, add: asked.append(list(parts)) or encode(parts, add)
    chat = [{"role": "user", "content": "Hello there"}]
    await tokenizer.encode_chat(chat)
    chat += [{"role": "assistant", "content": "General"}, {"role": "user", "content": "Go on"}]
    await tokenizer.encode_chat(chat)
    assert asked[1] == ["<|assistant|>General", "<|user|>Go on"]
    await tokenizer.encode_chat(chat, scope="another tenant")
    assert "<|user|>Hello there" in asked[2]


def test_texts_are_not_split_at_unsafe_tokens():
    tokens = [
        AddedToken("<a>"),
        AddedToken("<b>", normalized=True),
        AddedToken("<c>", single_word=True),
        AddedToken("<d>", strips=True),
        AddedToken("x<e"),
        AddedToken("<e>"),  # the token above may contain its start
        AddedToken("word"),
    ]
    assert SegmentCutter(tokens).cut("1<a>2<b>3<c>4<d>5<e>6word<a><a>") == [
        "1",
        "<a>2<b>3<c>4<d>5<e>6word",
        "<a>",
        "<a>",
    ]
    assert SegmentCutter([]).cut("all of it") == ["all of it"]
    assert SegmentCutter([]).cut("") == []


@given(st.lists(st.tuples(st.sampled_from(["", "t"]), st.text(max_size=200), st.booleans()), max_size=60))
@examples(40)
def test_the_cache_stays_within_its_bytes_and_scopes(steps):
    cache = PretokenizerCache(2000)
    put = {}
    for rank, (scope, text, reads) in enumerate(steps):
        if reads:
            found = cache.get(scope, text)
            assert found is None or found == put[scope, text]
        elif (scope, text) not in put:
            put[scope, text] = array("I", [rank])
            cache.put(scope, text, put[scope, text])
        assert 0 <= cache.num_bytes <= 2000
    if not cache._entries:
        assert cache.num_bytes == 0
