"""Makes synthetic traffic whose prompts share prefixes like those of common applications.

Each mix has one function that adds the drafts of one conversation, and all of them scale with the mean lengths of
prompts and answers. Conversations start in the order in which they are added; `schedule` gives them their times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.bench.traces.record import BlockRuns
from penstock.bench.workloads.plan import Draft, PromptBlocks, Source
from penstock.errors import InvalidInput
from penstock.types import Lane

BLOCK_TOKENS = 16
_SYSTEMS, _DOCUMENTS = 1 << 20, 1 << 21  # the first ids of system prompts and documents; new text counts from 1 << 24
_NEW = 1 << 24
_STRIDE = 1 << 12  # distance between system prompts or documents, in more blocks than each has
_MAX_SPREAD = 4.0  # longest length of a mix, as a multiple of the mean


@dataclass(frozen=True, slots=True)
class MixSizes:
    """Mean lengths in tokens, and a person's mean pause between an answer and the next question."""

    input_tokens: int = 512
    output_tokens: int = 128
    think_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, f"is {getattr(self, name)}; give at least 1")


@dataclass
class _Maker:
    """The state of a mix while it is made: its random numbers and the ids that no prompt has used yet."""

    rng: random.Random
    sizes: MixSizes
    next_block: int = _NEW
    num_conversations: int = 0
    drafts: list[Draft] = field(default_factory=list)

    def length(self, mean: float) -> int:
        """Samples a length from a bounded exponential distribution, which recorded traffic nearly follows."""
        return max(1, min(round(_MAX_SPREAD * mean), round(self.rng.expovariate(1 / mean)))) if mean >= 1 else 1

    def new_blocks(self, num_tokens: float) -> tuple[int, int]:
        """Returns a run of blocks that no prompt has used."""
        count = max(1, round(num_tokens / BLOCK_TOKENS))
        self.next_block += count
        return (self.next_block - count, count)

    def shared_blocks(self, base: int, number: int, num_tokens: float) -> tuple[int, int]:
        """Returns the run of a system prompt or document, which is the same in every prompt that contains it."""
        return (base + number * _STRIDE, min(_STRIDE, max(1, round(num_tokens / BLOCK_TOKENS))))

    def popular(self, count: int) -> int:
        """Samples one of `count` by Zipf's law."""
        return self.rng.choices(range(count), weights=[1 / (rank + 1) for rank in range(count)])[0]

    def add(
        self, runs: BlockRuns, num_output: int, conversation: str = "", at_s: float = 0.0, lane: Lane | None = None
    ) -> None:
        num_tokens = sum(count for _, count in runs) * BLOCK_TOKENS - self.rng.randrange(BLOCK_TOKENS)
        prompt = PromptBlocks(runs, BLOCK_TOKENS, num_tokens)
        self.drafts.append(Draft(prompt, num_output, self.num_conversations + at_s, conversation, lane))

    def pause_s(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s) if mean_s > 0 else 0.0


def _random(make: _Maker) -> None:
    """Adds an independent prompt that shares nothing."""
    make.add((make.new_blocks(make.length(make.sizes.input_tokens)),), make.length(make.sizes.output_tokens))


def _shared_prefix(make: _Maker) -> None:
    """Adds a single question after one of eight system prompts of uneven popularity, three quarters of the prompt."""
    system = make.shared_blocks(_SYSTEMS, make.popular(8), 0.75 * make.sizes.input_tokens)
    make.add(
        (system, make.new_blocks(make.length(0.25 * make.sizes.input_tokens))), make.length(make.sizes.output_tokens)
    )


def _chat(make: _Maker) -> None:
    """Adds a conversation of five turns on average; each prompt is the previous one, its answer and a question."""
    runs = [make.shared_blocks(_SYSTEMS, make.popular(8), 0.25 * make.sizes.input_tokens)]
    at_s, name = 0.0, f"chat-{make.num_conversations}"
    for _ in range(min(20, make.length(5))):
        runs.append(make.new_blocks(make.length(0.2 * make.sizes.input_tokens)))
        num_output = make.length(make.sizes.output_tokens)
        make.add(tuple(runs), num_output, name, at_s)
        runs.append(make.new_blocks(num_output))  # stands for the answer, whose text is not known in advance
        at_s += make.pause_s(make.sizes.think_s)


def _rag(make: _Maker) -> None:
    """Adds a question about four of two hundred documents of uneven popularity, after one system prompt."""
    runs = [make.shared_blocks(_SYSTEMS, 100, 0.1 * make.sizes.input_tokens)]
    for document in dict.fromkeys(make.popular(200) for _ in range(4)):
        runs.append(make.shared_blocks(_DOCUMENTS, document, 0.2 * make.sizes.input_tokens))
    runs.append(make.new_blocks(make.length(0.1 * make.sizes.input_tokens)))
    make.add(tuple(runs), make.length(make.sizes.output_tokens))


def _agents(make: _Maker) -> None:
    """Adds an agent's loop of twelve calls on average: context that grows by tool results, short answers and pauses."""
    runs = [make.shared_blocks(_SYSTEMS, 200 + make.popular(3), 0.5 * make.sizes.input_tokens)]
    at_s, name = 0.0, f"agent-{make.num_conversations}"
    for _ in range(min(40, make.length(12))):
        runs.append(make.new_blocks(make.length(0.08 * make.sizes.input_tokens)))
        num_output = make.length(0.5 * make.sizes.output_tokens)
        make.add(tuple(runs), num_output, name, at_s)
        runs.append(make.new_blocks(num_output))
        at_s += make.pause_s(0.1 * make.sizes.think_s)


def _bulk(make: _Maker) -> None:
    """Adds a long independent document after one instruction, with a short answer, in the lane bulk."""
    runs = (
        make.shared_blocks(_SYSTEMS, 300, 0.1 * make.sizes.input_tokens),
        make.new_blocks(make.length(1.9 * make.sizes.input_tokens)),
    )
    make.add(runs, make.length(0.25 * make.sizes.output_tokens), lane=Lane.BULK)


MIXES: Mapping[str, Callable[[_Maker], None]] = {
    "random": _random,
    "shared-prefix": _shared_prefix,
    "chat": _chat,
    "rag": _rag,
    "agents": _agents,
    "bulk": _bulk,
}


def parse_mix(text: str) -> dict[str, float]:
    """Reads `chat` or `chat=3,bulk=1`: the shares of conversations of each mix. Raises InvalidInput."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            shares[name] = float(share or 1)
        except ValueError:
            raise InvalidInput("mix", f"has {part!r}; give NAME or NAME=SHARE") from None
        if name not in MIXES or not shares[name] > 0:
            raise InvalidInput("mix", f"has {part!r}; give shares above 0 of {', '.join(MIXES)}")
    return shares


def mix_source(
    shares: Mapping[str, float], sizes: MixSizes, count: int, seed: int, max_context: int | None = None
) -> Source:
    """Returns `count` requests of the mixes. Requests that need more than `max_context` tokens are replaced; the notes
    say how many. Raises InvalidInput if hardly any fits.
    """
    make, num_dropped = _Maker(random.Random(f"{seed}/mix"), sizes), 0
    while len(make.drafts) < count:
        name = make.rng.choices(list(shares), weights=list(shares.values()))[0]
        before = len(make.drafts)
        MIXES[name](make)
        make.num_conversations += 1
        if max_context is not None:
            kept = [draft for draft in make.drafts[before:] if _num_tokens(draft) <= max_context]
            num_dropped += len(make.drafts) - before - len(kept)
            make.drafts[before:] = kept
        if num_dropped > 20 * count:
            raise InvalidInput(
                "max context", f"= {max_context} tokens holds hardly any prompt of the mix; shorten them"
            )
    name = "+".join(f"{share:g} {name}" if len(shares) > 1 else name for name, share in shares.items())
    notes = (
        (f"{num_dropped} more requests need more than {max_context} tokens and were left out",) if num_dropped else ()
    )
    return Source(f"mix {name}", tuple(make.drafts[:count]), gaps_are_pauses=True, notes=notes)


def _num_tokens(draft: Draft) -> int:
    assert isinstance(draft.prompt, PromptBlocks)
    return draft.prompt.num_tokens + draft.num_output_tokens
