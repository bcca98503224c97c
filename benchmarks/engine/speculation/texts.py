"""Provides the texts with which speculation is measured: prompts and their answers. Pure except for reading files.

Texts for replay are made of this repository: its documentation and its code, in tokens of a BPE vocabulary that is
trained on both, so that a token is about a word, as in the vocabularies of large models.
"""

from __future__ import annotations

import keyword
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from benchmarks.engine.workload import VOCAB_SIZE
from models.train.corpus import ASSISTANT, BOS, END, USER
from models.train.stories import story
from models.train.tasks import Exchange, description, json_record, recipe

ROOT = Path(__file__).resolve().parents[3]
_CODE_FOLDERS = ("penstock", "engine", "kv_transfer", "worker", "decode_worker", "router", "cluster")
_LINE_TOKENS, _REQUEST_TOKENS = 40, 40  # room for a line that is cut off, and for the question
_LINKS = ("The page says: ", "It also states that ", "To quote: ", "Elsewhere it says: ", "As written there, ")


@dataclass(frozen=True, slots=True)
class Script:
    """A prompt and its answer; the answer is empty for a model that chooses its own words."""

    prompt: list[int]
    answer: list[int]


def code_files() -> list[Path]:
    return [file for folder in _CODE_FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def pages() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


class RepositoryTexts:
    """Prompts of `prompt_tokens` with answers of `answer_tokens`, cut from files of this repository."""

    def __init__(self, prompt_tokens: int, answer_tokens: int) -> None:
        self._prompt_tokens, self._answer_tokens = prompt_tokens, answer_tokens
        self._code = [file.read_text() for file in code_files()]
        self._pages = [file.read_text() for file in pages()]
        self._tokenizer = Tokenizer(BPE())
        self._tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = ByteLevelDecoder()
        trainer = BpeTrainer(vocab_size=VOCAB_SIZE - 8, show_progress=False)
        self._tokenizer.train_from_iterator(self._code + self._pages, trainer)
        self.kinds: dict[str, Callable[[random.Random], Script]] = {
            "edited code": self._edited,
            "quotes of a page": self._quoted,
            "new code": lambda rng: self._continued(rng, self._code),
            "documentation": lambda rng: self._continued(rng, self._pages),
            "misleading": self._misleading,
        }

    def scripts(self, kind: str, count: int, turn: int) -> list[Script]:
        rng = random.Random(f"{kind} {turn}")
        return [self.kinds[kind](rng) for _ in range(count)]

    def _excerpt(self, rng: random.Random, texts: list[str], num_tokens: int) -> str:
        """Returns a text of `num_tokens` or a few more that begins at the start of a line."""
        while True:
            tokens = self._encode(rng.choice(texts))
            if len(tokens) >= num_tokens + _LINE_TOKENS:
                first = rng.randrange(len(tokens) - num_tokens - _LINE_TOKENS + 1)
                excerpt = self._tokenizer.decode(tokens[first : first + num_tokens + _LINE_TOKENS])
                excerpt = excerpt.partition("\n")[2]
                if len(self._encode(excerpt)) >= num_tokens:
                    return excerpt

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def _script(self, prompt: str, answer: str) -> Script | None:
        prompt_ids, answer_ids = self._encode(prompt), self._encode(answer)
        if len(prompt_ids) > self._prompt_tokens or len(answer_ids) < self._answer_tokens:
            return None
        return Script(prompt_ids, answer_ids[: self._answer_tokens])

    def _edited(self, rng: random.Random) -> Script:
        """Returns a file as prompt, and as answer the same file with one of its names changed."""
        while True:
            source = self._excerpt(rng, self._code, self._prompt_tokens - _LINE_TOKENS - _REQUEST_TOKENS)
            names = Counter(re.findall(r"\b[a-z]\w{3,}\b", source))
            used = [name for name, times in names.items() if times > 2 and not keyword.iskeyword(name)]
            if used:
                old = rng.choice(sorted(used))
                request = f"\n\nRename `{old}` to `{old}_old` in this code and repeat all of it.\n\n"
                edited = re.sub(rf"\b{old}\b", f"{old}_old", source)
                if script := self._script(source + request, edited):
                    return script

    def _quoted(self, rng: random.Random) -> Script:
        """Returns a page as prompt, and as answer sentences of it in any order, with a few words between them."""
        while True:
            page = self._excerpt(rng, self._pages, self._prompt_tokens - _LINE_TOKENS - _REQUEST_TOKENS)
            sentences = [each for each in re.split(r"(?<=[.:])\s+", page) if len(each) > 60]
            if len(sentences) > 2:
                quotes = " ".join(f"{rng.choice(_LINKS)}{rng.choice(sentences)}" for _ in range(24))
                if script := self._script(page + "\n\nWhat does the page say about this?\n\n", quotes):
                    return script

    def _continued(self, rng: random.Random, texts: list[str]) -> Script:
        tokens = self._encode(self._excerpt(rng, texts, self._prompt_tokens + self._answer_tokens))
        prompt = tokens[: self._prompt_tokens]
        return Script(prompt, (tokens[self._prompt_tokens :] + prompt)[: self._answer_tokens])

    def _misleading(self, rng: random.Random) -> Script:
        """Returns the same three tokens again and again, each time with a different one after them: every guess is
        wrong."""
        run, others = [11, 12, 13], rng.sample(range(100, VOCAB_SIZE), self._prompt_tokens + self._answer_tokens)
        tokens = [token for other in others for token in (*run, other)]
        end = self._prompt_tokens + self._answer_tokens
        return Script(tokens[: self._prompt_tokens], tokens[self._prompt_tokens : end])


class BundledTexts:
    """Chats for the bundled model, which continues in its own words."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.kinds: dict[str, Callable[[random.Random], Script]] = {
            "answers asked for again": self._again,
            "records": lambda rng: self._chat([json_record(rng), json_record(rng)], json_record(rng).question),
            "stories": lambda rng: self._chat([], rng.choice(story(rng).prompts)),
        }

    def scripts(self, kind: str, count: int, turn: int) -> list[Script]:
        rng = random.Random(f"{kind} {turn}")
        return [self.kinds[kind](rng) for _ in range(count)]

    def _again(self, rng: random.Random) -> Script:
        exchanges = [description(rng), recipe(rng), description(rng)]
        return self._chat([*exchanges, *exchanges[:2]], exchanges[2].question)

    def _chat(self, exchanges: list[Exchange], question: str) -> Script:
        turns = "".join(f"{USER}{each.question}{END}{ASSISTANT}{each.answer}{END}" for each in exchanges)
        text = f"{BOS}{turns}{USER}{question}{END}{ASSISTANT}"
        return Script(self._tokenizer.encode(text, add_special_tokens=False).ids, [])
