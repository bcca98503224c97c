"""Text to token ids and back, as the checkpoint's tokenizer.json says. Long texts are encoded off the event loop."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers

from penstock.errors import CheckpointError, InvalidInput
from penstock.spelling import Spelling
from router.chat_template import ChatTemplate, load_chat_template
from router.segments import AddedToken, Cutter, SegmentCache
from router.words import Words, word_rules

_INLINE_CHARACTERS = 4096  # encoded in about a millisecond; longer texts would delay every other stream
_WORDS_CHARACTERS = 16384  # made of known words in a millisecond
_NUM_THREADS = 2
_CACHE_BYTES = 64 << 20  # about ten million characters of conversations
_ROLES = ("system", "user", "assistant")


class Tokenizer:
    """Owns the compiled tokenizer, the chat template, what earlier prompts came to, and a small thread pool."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._cutter = Cutter([_as_added(token) for token in added.values()])
        self._cache = SegmentCache(_CACHE_BYTES)
        self._around = self._find_around()
        rules = word_rules(json.loads(tokenizer.to_str()))
        contents = [token.content for token in added.values()]
        self._words = Words(rules, contents, lambda words: self._encode(words, False)) if rules else None
        self.spelling = Spelling(tokenizer)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        self._template_thread = ThreadPoolExecutor(1, thread_name_prefix="template")  # one talks to one process

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Raises CheckpointError that names the file."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; point `model` at a checkpoint folder that has one")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path}: {error}; copy the file again from the model's source") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, load_chat_template(Path(folder)))

    async def encode(self, text: str, *, add_special_tokens: bool = True, scope: str = "") -> list[int]:
        """Ids of a prompt, with what the tokenizer's own post-processor puts around it.

        Segments that somebody of the same scope has sent before are not tokenized again.
        """
        if (at_once := self._known_words(text, add_special_tokens)) is not None:
            return at_once
        segments = self._cutter.cut(text)
        if len(segments) < 2 or (add_special_tokens and self._around is None):
            return (await self._encode_parts([text], add_special_tokens))[0]
        before, after = self._around if add_special_tokens and self._around else ((), ())
        known = [self._cache.get(scope, segment) for segment in segments]
        missing = [segment for segment, found in zip(segments, known, strict=True) if found is None]
        fresh = iter(await self._encode_parts(missing, False))
        ids = array("I", before)
        for segment, found in zip(segments, known, strict=True):
            if found is None:
                found = array("I", next(fresh))
                self._cache.put(scope, segment, found)
            ids.extend(found)
        ids.extend(after)
        return ids.tolist()

    def _known_words(self, text: str, add_special_tokens: bool) -> list[int] | None:
        if self._words is None or len(text) > _WORDS_CHARACTERS or (add_special_tokens and self._around is None):
            return None
        ids = self._words.ids(text)
        if ids is None or not add_special_tokens or self._around is None:
            return ids
        before, after = self._around
        return [*before, *ids, *after]

    async def encode_chat(self, messages: Sequence[Mapping[str, str]], scope: str = "") -> list[int]:
        """Ids of a conversation; the template writes its special tokens itself. Raises InvalidInput."""
        if self._template is None:
            raise InvalidInput("messages", "the model has no chat template; send the prompt as text")
        for number, message in enumerate(messages):
            if message["role"] not in _ROLES:
                raise InvalidInput(
                    f"messages[{number}].role", f"is {message['role']!r}; give one of {', '.join(_ROLES)}"
                )
        loop = asyncio.get_running_loop()
        rendered = await loop.run_in_executor(self._template_thread, self._template.render, messages)
        return await self.encode(rendered, add_special_tokens=False, scope=scope)

    async def _encode_parts(self, parts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if sum(map(len, parts)) <= _INLINE_CHARACTERS:
            return self._encode(parts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, parts, add_special_tokens)

    def _encode(self, parts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # Not `encode`: that keeps the interpreter's lock, and would stop every stream for as long as it takes.
        encoded = self._tokenizer.encode_batch_fast(list(parts), add_special_tokens=add_special_tokens)
        return [one.ids for one in encoded]

    def _find_around(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """What the post-processor puts before and after any text; None where it does more than that."""
        found = set()
        for probe in ("a", "b c, d"):
            bare, whole = (self._encode([probe], add)[0] for add in (False, True))
            starts = [n for n in range(len(whole) - len(bare) + 1) if whole[n : n + len(bare)] == bare]
            if len(starts) != 1:
                return None
            found.add((tuple(whole[: starts[0]]), tuple(whole[starts[0] + len(bare) :])))
        return found.pop() if len(found) == 1 else None

    def start(self) -> None:
        """Gets ready for chats, off the loop; the first one would else wait for that."""
        if self._template is not None:
            self._template_thread.submit(self._template.start)

    def close(self) -> None:
        if self._template is not None:
            self._template.close()
        for threads in (self._threads, self._template_thread):
            threads.shutdown(wait=False, cancel_futures=True)


def _as_added(token: tokenizers.AddedToken) -> AddedToken:
    strips = token.lstrip or token.rstrip
    return AddedToken(token.content, normalized=token.normalized, single_word=token.single_word, strips=strips)
