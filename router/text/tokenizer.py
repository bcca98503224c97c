"""Encodes text and conversations to token ids with the checkpoint's tokenizer.json.

Conversations are rendered, and long texts encoded, on threads at which callers (tenants) take turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from penstock.errors import CheckpointError, InvalidInput
from penstock.text.spelling import Spelling
from penstock.types import SamplingParams
from router.text.chat_template import ChatTemplate, load_chat_template
from router.text.conversation import ROLES, Conversation
from router.text.fair_threads import FairThreads
from router.text.pretokenizer_cache import AddedToken, PretokenizerCache, SegmentCutter

_MAX_QUEUED = 1 << 28  # characters
_INLINE_TOKENS = 1024  # converted to text in about a millisecond
_INLINE_CHARACTERS = 4096  # encoded in about a millisecond; longer texts would delay every other stream
_NUM_THREADS = 2
_CACHE_BYTES = 64 << 20  # about ten million characters of conversations

ResultT = TypeVar("ResultT")


class Tokenizer:
    """Owns the compiled tokenizer, the chat template, a cache of segments, and the threads."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None, max_queued: int = _MAX_QUEUED
    ) -> None:
        """`max_queued` bounds the text queued for the threads, in characters."""
        self._tokenizer = tokenizer
        self.template = template
        self._cutter = SegmentCutter([_as_added(token) for token in tokenizer.get_added_tokens_decoder().values()])
        self._cache = PretokenizerCache(_CACHE_BYTES)
        self._affixes = self._find_affixes()
        self.spelling = Spelling(tokenizer)
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: token_id for token_id, token in added if token.special}
        self._threads = FairThreads("tokenizer", _NUM_THREADS, max_queued)
        self._template_thread = FairThreads("template", 1, max_queued)  # the template has one process

    @classmethod
    def load(cls, folder: str | Path, max_queued: int = _MAX_QUEUED) -> Tokenizer:
        """Loads the tokenizer and the chat template from a checkpoint folder.

        Raises CheckpointError, which names the file.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; point `model` at a checkpoint folder that has one")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{path}: {error}; copy the file again from the model's source") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, load_chat_template(Path(folder)), max_queued)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, scope: str = "", caller: str = ""
    ) -> list[int]:
        """Returns the ids of a prompt, by default with the special tokens that the tokenizer's post-processor adds.

        Segments that a request of the same scope has sent before are not tokenized again. Raises Overloaded.
        """
        segments = self._cutter.cut(text)
        if len(segments) < 2 or (add_special_tokens and self._affixes is None):
            return (await self._encode_parts([text], caller, add_special_tokens=add_special_tokens))[0]
        before, after = self._affixes if add_special_tokens and self._affixes else ((), ())
        known = [self._cache.get(scope, segment) for segment in segments]
        missing = [segment for segment, ids in zip(segments, known, strict=True) if ids is None]
        encoded = iter(await self._encode_parts(missing, caller, add_special_tokens=False))
        prompt = array("I", before)
        for segment, ids in zip(segments, known, strict=True):
            if ids is None:
                ids = array("I", next(encoded))
                self._cache.put(scope, segment, ids)
            prompt.extend(ids)
        prompt.extend(after)
        return prompt.tolist()

    async def encode_chat(
        self,
        chat: Conversation | Sequence[Mapping[str, Any]],
        scope: str = "",
        caller: str = "",
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Returns the ids of a conversation, by default without special tokens, since the template writes them.

        Raises InvalidInput or Overloaded.
        """
        if self.template is None:
            raise InvalidInput("messages", "the model has no chat template; send the prompt as text")
        conversation = chat if isinstance(chat, Conversation) else Conversation(chat)
        rendered = await self._template_thread.run(caller, conversation.size, self._render, self.template, conversation)
        return await self.encode(rendered, add_special_tokens=add_special_tokens, scope=scope, caller=caller)

    def _render(self, template: ChatTemplate, conversation: Conversation) -> str:
        self._check_template(template, conversation)
        return template.render(conversation)

    def _check_template(self, template: ChatTemplate, conversation: Conversation) -> None:
        """Checks that the template renders all parts of the conversation. Raises InvalidInput."""
        if conversation.tools and not template.takes_tools:
            raise InvalidInput("tools", "are not rendered by the model's chat template; leave them out")
        roles = [role for role in ROLES if role != "tool" or "tool" in template.source]
        for number, message in enumerate(conversation.messages):
            if message["role"] not in roles:
                raise InvalidInput(
                    f"messages[{number}].role", f"is {message['role']!r}; give one of {', '.join(roles)}"
                )
            if "tool_calls" in message and "tool_calls" not in template.source:
                problem = "are not possible: the model's chat template does not render tool calls"
                raise InvalidInput(f"messages[{number}].tool_calls", problem)

    async def off_loop(self, caller: str, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Runs other work on a prompt of `size` characters on a thread. Raises Overloaded, or what `work` raises."""
        return await self._threads.run(caller, size, work)

    async def encode_each(self, texts: Sequence[str], caller: str = "") -> list[list[int]]:
        """Returns the ids of each text, without special tokens. Raises Overloaded."""
        return await self._encode_parts(texts, caller, add_special_tokens=False)

    async def spell(self, token_ids: Sequence[int], caller: str = "") -> list[str]:
        """Returns each token's text. Raises Overloaded."""

        def token_texts() -> list[str]:
            return [self.spelling.token_text(token_id) for token_id in token_ids]

        if len(token_ids) <= _INLINE_TOKENS:
            return token_texts()
        return await self._threads.run(caller, len(token_ids), token_texts)

    async def decode(self, token_ids: Sequence[int], caller: str = "") -> str:
        """Returns the text of tokens, including special ones. Raises Overloaded."""

        def text() -> str:
            # Unlike `decode`, `decode_batch` releases the interpreter's lock.
            return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)[0]

        return text() if len(token_ids) <= _INLINE_TOKENS else await self._threads.run(caller, len(token_ids), text)

    async def _encode_parts(self, parts: Sequence[str], caller: str, *, add_special_tokens: bool) -> list[list[int]]:
        size = sum(map(len, parts))
        if size <= _INLINE_CHARACTERS:
            return self._encode(parts, add_special_tokens)
        return await self._threads.run(caller, size, self._encode, parts, add_special_tokens)

    def _encode(self, parts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # Unlike `encode`, this releases the interpreter's lock; otherwise every stream would stop meanwhile.
        encodings = self._tokenizer.encode_batch_fast(list(parts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _find_affixes(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Returns the ids that the post-processor adds before and after any text; None if it does anything else."""
        found = set()
        for probe in ("a", "b c, d"):
            bare, whole = (self._encode([probe], add)[0] for add in (False, True))
            starts = [start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare]
            if len(starts) != 1:
                return None
            found.add((tuple(whole[: starts[0]]), tuple(whole[starts[0] + len(bare) :])))
        return found.pop() if len(found) == 1 else None

    def start(self) -> None:
        """Starts the template's process on a thread, so that the first chat does not wait for it."""
        if self.template is not None:
            self._template_thread.submit(self.template.start)

    def close(self) -> None:
        if self.template is not None:
            self.template.close()
        for threads in (self._threads, self._template_thread):
            threads.close()


async def with_bad_sequences(sampling: SamplingParams, tokenizer: Tokenizer, caller: str) -> SamplingParams:
    """Returns the parameters with the token sequences of their bad words, at an output's start and after a space.

    Raises Overloaded.
    """
    if not sampling.bad_words:
        return sampling
    words = [word.lstrip() for word in sampling.bad_words]
    encoded = await tokenizer.encode_each([*words, *(f" {word}" for word in words)], caller)
    sequences = dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids)
    return replace(sampling, bad_sequences=tuple(sequences))


def _as_added(token: tokenizers.AddedToken) -> AddedToken:
    strips = token.lstrip or token.rstrip
    return AddedToken(token.content, normalized=token.normalized, single_word=token.single_word, strips=strips)
