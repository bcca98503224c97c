"""Tokenizing by segments is tokenizing the whole, for every kind of tokenizer; the cache keeps its bounds."""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from router.segments import AddedToken, Cutter, SegmentCache
from router.tokenizer import Tokenizer
from tests.router_fakes import MODEL

_CORPUS = ["the cat sat on the mat", "naïve café: 日本語 and 🙂🙂", "x = 12345; y<|e", "  two  spaces\n\n\nand lines"]
_SPECIALS = ["<|bos|>", "<|user|>", "<|end|>", "<|end|>!", "</s>"]


def _train(pre_tokenizer, seed: int) -> tokenizers.Tokenizer:
    """A BPE tokenizer of random merges: the corpus is drawn by the seed."""
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
    """Added tokens of every kind that a cut must beware of."""
    made = _train(pre_tokenizers.ByteLevel(add_prefix_space=True), 1)
    made.normalizer = normalizers.NFC()
    made.add_tokens(
        [
            tokenizers.AddedToken("<|mask|>", lstrip=True, normalized=False),
            tokenizers.AddedToken("<|r|>", rstrip=True, normalized=False),
            tokenizers.AddedToken("word", single_word=True, normalized=False),
            tokenizers.AddedToken("cat sat", normalized=True),
            tokenizers.AddedToken("at<|", normalized=False),  # may swallow the start of a special token
        ]
    )
    return made


def _metaspace() -> tokenizers.Tokenizer:
    """As Llama 2: the first word of a text gets a space, the first word after a special token does not."""
    return _train(pre_tokenizers.Metaspace(prepend_scheme="first"), 2)


def _wrapped() -> tokenizers.Tokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+(?!\S)|\s*[\r\n]+|\w+|\s|[^\s\w]+[\r\n]*"), "isolated")
    made = _train(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), 3
    )
    ids = [(one, made.token_to_id(one)) for one in ("<|bos|>", "</s>")]
    made.post_processor = processors.TemplateProcessing("<|bos|> $A </s>", special_tokens=ids)
    return made


_KINDS = {
    "bundled": tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")),
    "byte-level": _train(pre_tokenizers.ByteLevel(add_prefix_space=False), 0),
    "strange": _strange(),
    "metaspace": _metaspace(),
    "wrapped": _wrapped(),
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
    "日本",
]
_TEXTS = st.lists(st.one_of(st.sampled_from(_WORDS), st.text(max_size=6)), max_size=24).map("".join)


@pytest.mark.parametrize("kind", _KINDS)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=4), wrapped=st.booleans())
@settings(max_examples=150, deadline=None)
def test_segments_tokenize_as_the_whole(kind, texts, wrapped):
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


def test_unsafe_tokens_are_no_borders():
    tokens = [
        AddedToken("<a>"),
        AddedToken("<b>", normalized=True),
        AddedToken("<c>", single_word=True),
        AddedToken("<d>", strips=True),
        AddedToken("x<e"),
        AddedToken("<e>"),  # the token above may have its start
        AddedToken("word"),
    ]
    assert Cutter(tokens).cut("1<a>2<b>3<c>4<d>5<e>6word<a><a>") == ["1", "<a>2<b>3<c>4<d>5<e>6word", "<a>", "<a>"]
    assert Cutter([]).cut("all of it") == ["all of it"]
    assert Cutter([]).cut("") == []


@given(st.lists(st.tuples(st.sampled_from(["", "t"]), st.text(max_size=200), st.booleans()), max_size=60))
@settings(max_examples=100, deadline=None)
def test_the_cache_stays_below_its_bytes_and_within_scopes(steps):
    cache = SegmentCache(2000)
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
