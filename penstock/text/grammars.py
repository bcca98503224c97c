"""Compiles grammars for one checkpoint's tokens: for routers, which check them, and workers, which enforce them.

It uses llguidance, which reads tokenizer.json itself. The fuel, states and items that `_LIMITS` grants for each step
bound the cost of masking tokens; together with `MAX_SOURCE_BYTES` they bound most of the cost of compiling.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.errors import CheckpointError, InvalidInput
from penstock.text.schema_keywords import in_known_keywords
from penstock.text.schemas import closed
from penstock.text.structural_tags import structural_tag_to_lark
from penstock.types import Grammar, GrammarKind

FIELD = "sampling.grammar"
MAX_SOURCE_BYTES = 128 << 10
_CACHE_BYTES = 16 << 20
_MAX_CHOICES = 1_900  # each takes an item of the grammar's first row, limited by `max_items_in_row`
_ENTRY_BYTES = 64 << 10  # approximate size of a compiled grammar besides its source
_HIDDEN = "\u0001\ufdd0"  # occurs in no text: a control character and a noncharacter
_MAX_PROBLEM = 400  # most characters taken from llguidance's message
# White space between two tokens of JSON: one space, or a new line with its indentation. Without a limit a model could
# write white space forever.
_JSON_SPACE = r" |\r?\n[ \t]{0,32}"
# Measured 2026-11: within these limits a real schema of 130 kB compiles in 20 ms, and each of 500 random ones in at
# most 2 ms. Fuel does not bound everything: a `multipleOf` of large numbers or a regex of many optional classes takes
# seconds. So routers first compile each grammar in a process with limited processor time
# (`router.text.grammar_sandbox`).
_LIMITS = LLParserLimits(
    initial_lexer_fuel=30_000,
    step_lexer_fuel=30_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Owns the tokens' trie, built on first use, and a cache of recently used compiled grammars. Thread-safe."""

    def __init__(self, folder: str | Path, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """`vocab_size` is the number of logits; a checkpoint's tokenizer may know fewer tokens."""
        self._path = Path(folder) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._building = threading.Lock()
        self._tokenizer: LLTokenizer | None = None  # treats the names of special tokens as text
        self._naming_tokenizer: LLTokenizer | None = None  # knows the names of special tokens; built when needed
        self._special_tokens: Mapping[str, int] = {}
        self._changing = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher | InvalidInput] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The approximate size of the cached grammars; never above the cache's bound."""
        return self._num_bytes

    def prepare(self) -> None:
        """Builds the tokens' trie, which takes a second for a large vocabulary; does nothing if the checkpoint has no
        tokens.

        Blocks; raises CheckpointError.
        """
        if self._path.is_file():
            self._load_tokenizer()

    def cached(self, grammar: Grammar) -> LLMatcher | None:
        """Returns a matcher at the grammar's start, or None if the grammar is not cached. Takes microseconds.

        Raises InvalidInput for a grammar that was refused recently.
        """
        with self._changing:
            found = self._compiled.get(grammar)
            if found is None:
                return None
            self._compiled.move_to_end(grammar)
        if isinstance(found, InvalidInput):
            raise InvalidInput(found.field, found.problem)
        return found.deep_copy()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Returns a matcher at the grammar's start. Blocks for milliseconds without holding the interpreter's lock.

        Raises InvalidInput for a grammar that cannot be enforced, even if only its first step shows it, and
        CheckpointError if the checkpoint has no tokens.
        """
        known = self.cached(grammar)
        if known is not None:
            return known
        tokenizer = self._load_tokenizer()
        if grammar.kind is GrammarKind.LARK and any(name in grammar.source for name in self._special_tokens):
            tokenizer = self._load_naming_tokenizer()
        try:
            matcher = self._compile(tokenizer, grammar)
        except InvalidInput as problem:
            self._keep(grammar, problem)  # a repeated request is refused at once
            raise
        self._keep(grammar, matcher)
        return matcher.deep_copy()

    def _compile(self, tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(tokenizer, to_llguidance(grammar, self._special_tokens), limits=_LIMITS, log_level=0)
        if not matcher.is_error():
            _compute_mask(matcher, self._vocab_size)
        if matcher.is_error():
            raise InvalidInput(FIELD, f"cannot be enforced: {_first_lines(matcher.get_error())}")
        return matcher

    def _keep(self, grammar: Grammar, outcome: LLMatcher | InvalidInput) -> None:
        with self._changing:
            if grammar not in self._compiled:
                self._compiled[grammar] = outcome
                self._num_bytes += _size(grammar)
            while self._num_bytes > _CACHE_BYTES:
                oldest, _ = self._compiled.popitem(last=False)
                self._num_bytes -= _size(oldest)

    def _load_tokenizer(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                text = self._read_tokenizer()
                try:
                    self._special_tokens = _special_tokens(text)
                    self._tokenizer = self._build(_without_names(text))
                except Exception as error:  # the library raises no narrower type
                    raise CheckpointError(f"{self._path}: grammars cannot use it: {error}") from error
            return self._tokenizer

    def _load_naming_tokenizer(self) -> LLTokenizer:
        with self._building:
            if self._naming_tokenizer is None:
                self._naming_tokenizer = self._build(self._read_tokenizer())
            return self._naming_tokenizer

    def _read_tokenizer(self) -> str:
        if not self._path.is_file():
            raise CheckpointError(f"{self._path}: is missing, and grammars need it; copy it from the model")
        return self._path.read_text()

    def _build(self, text: str) -> LLTokenizer:
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None)


def to_llguidance(grammar: Grammar, special_tokens: Mapping[str, int]) -> str:
    """Returns the grammar in llguidance's own form. Raises InvalidInput for a source that does not match its kind.

    `special_tokens` (text to id) may occur in the texts of a structural tag.
    """
    num_bytes = len(grammar.source.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        raise InvalidInput(FIELD, f"has {num_bytes} bytes; give {MAX_SOURCE_BYTES} or fewer")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _schema_to_llguidance(grammar.source)
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(grammar.source))
        case GrammarKind.LARK:
            return str(LLMatcher.grammar_from_lark(grammar.source))
        case GrammarKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(_choice_to_lark(grammar.source)))
        case GrammarKind.STRUCTURAL_TAG:
            lark = structural_tag_to_lark(grammar.source, special_tokens, FIELD, _JSON_SPACE)
            return str(LLMatcher.grammar_from_lark(lark))


def _special_tokens(tokenizer: str) -> dict[str, int]:
    """Returns the ids of the special tokens in a tokenizer.json."""
    added = json.loads(tokenizer).get("added_tokens") or []
    return {str(token["content"]): int(token["id"]) for token in added if token.get("special")}


def _without_names(tokenizer: str) -> str:
    """Returns a tokenizer.json whose special tokens have names that occur in no text.

    llguidance uses the tokenizer to split a text that the grammar requires next. The tokenizer would turn a special
    token's name in it into that token, which does not match the grammar's text, so no token at all could follow.
    """
    data = json.loads(tokenizer)
    model = data.get("model") or {}
    vocabulary = model.get("vocab")
    for token in data.get("added_tokens") or []:
        name = token["content"]
        if not token.get("special") or name == model.get("unk_token"):
            continue
        token["content"] = _HIDDEN + name
        if isinstance(vocabulary, dict) and name in vocabulary:
            vocabulary[token["content"]] = vocabulary.pop(name)
        elif isinstance(vocabulary, list):  # a list of pieces with their scores
            for piece in vocabulary:
                piece[0] = token["content"] if piece[0] == name else piece[0]
    return json.dumps(data)


def _schema_to_llguidance(source: str) -> str:
    schema = _read_json(source)
    if schema is False:
        raise InvalidInput(FIELD, "is false, which no text satisfies; give another schema")
    if not isinstance(schema, dict | bool):
        raise InvalidInput(FIELD, f"is {source[:100]!r}; a JSON schema is an object, true or false")
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    chooses_space = isinstance(own, dict) and "whitespace_flexible" in own
    options: Any = {} if chooses_space else {"whitespace_pattern": _JSON_SPACE}
    text = json.dumps(closed(in_known_keywords(schema))) if isinstance(schema, dict) else "{}"
    try:
        return str(LLMatcher.grammar_from_json_schema(text, defaults=options))
    except ValueError as error:
        raise InvalidInput(FIELD, f"cannot be enforced: {str(error)[:_MAX_PROBLEM]}") from None


def _choice_to_lark(source: str) -> str:
    texts = _read_json(source)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidInput(FIELD, f"is {source[:100]!r}; a choice is a JSON list of texts")
    if len(texts) > _MAX_CHOICES:
        raise InvalidInput(FIELD, f"cannot be enforced: it has {len(texts)} texts; give {_MAX_CHOICES} or fewer")
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def _read_json(source: str) -> object:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(FIELD, f"is not valid JSON: {str(error)[:100]}") from None


def _compute_mask(matcher: LLMatcher, vocab_size: int) -> None:
    """Computes the first mask, whose lexer states the matcher keeps; afterwards it may be in error."""
    words = (ctypes.c_int32 * -(-vocab_size // 32))()  # one bit for each token
    matcher.unsafe_compute_mask_ptr(ctypes.addressof(words), ctypes.sizeof(words))


def _size(grammar: Grammar) -> int:
    return len(grammar.source.encode()) + _ENTRY_BYTES


def _first_lines(problem: str) -> str:
    """Returns the part of llguidance's message that is about the grammar, on one line."""
    lines = [line.strip() for line in problem.split("<state>")[0].splitlines()]
    return " ".join(line for line in lines if line)[:_MAX_PROBLEM]
