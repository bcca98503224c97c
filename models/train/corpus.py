"""The text that the bundled model learns from: an endless, seeded stream of documents.

Documents are chats in the model's chat template, of one to many turns, or plain text between the bos and eos tokens.
The grammars of this room write all of it, so that it has no licence but the project's own and its facts can be checked.
Pure functions of the seed; `python -m models.train.corpus` prints a sample.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

from models.train import tasks, words
from models.train.stories import story
from models.train.tasks import Exchange

BOS, EOS, END, PAD = "<|bos|>", "<|eos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
# The order sets the token ids: bos 0, eos 1, end 2, pad 3, then the roles.
SPECIAL_TOKENS = (BOS, EOS, END, PAD, SYSTEM, USER, ASSISTANT)

# Conversations with tools are in the form of Hermes models. The models are not trained on it: it serves tests.
# What is rendered of a turn does not depend on later turns, so that a growing conversation extends its own prompt.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim + '\n\n' }}{% endif %}"
    "{{ 'You may call functions. Their signatures:\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    '{{ \'\n</tools>\nTo call one, write:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|end|>\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('role must be system, user, assistant or tool, got ' + message['role']) }}"
    "{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\n' + message['content'] | trim + '\n</tool_response><|end|>' }}"
    "{% elif message['tool_calls'] %}"
    "{{ '<|assistant|>' + (message['content'] or '') | trim }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n' + call['function'] | tojson + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def documents(seed: int) -> Iterator[str]:
    """Yields documents without end, with special tokens written out. The same seed gives the same stream."""
    rng = random.Random(seed)
    makers = (_task_chat, _story_chat, _long_chat, _plain_story, _plain_mix, _plain_sums)
    while True:
        (make,) = rng.choices(makers, weights=(50, 22, 5, 6, 12, 5))
        yield make(rng)


def render_chat(turns: list[tuple[str, str]]) -> str:
    """Returns what CHAT_TEMPLATE renders for these (role, content) turns, plus the eos that ends the document."""
    return BOS + "".join(f"<|{role}|>{content}{END}" for role, content in turns) + EOS


def _chat(rng: random.Random, exchanges: list[Exchange]) -> str:
    turns = [("system", rng.choice(words.SYSTEM_PROMPTS))] if rng.random() < 0.25 else []
    for exchange in exchanges:
        turns += [("user", exchange.question), ("assistant", exchange.answer)]
    return render_chat(turns)


def _task_chat(rng: random.Random) -> str:
    return _chat(rng, [tasks.any_task(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))])


def _story_exchanges(rng: random.Random) -> list[Exchange]:
    """Returns a story on request, then questions about it, whose answers are in the context."""
    written = story(rng, num_plots=rng.choice((1, 1, 1, 1, 2)))
    asked = rng.sample(written.facts, rng.randint(0, min(3, len(written.facts))))
    return [
        Exchange(rng.choice(written.prompts), written.text),
        *(Exchange(question, answer) for question, answer in asked),
    ]


def _story_chat(rng: random.Random) -> str:
    return _chat(rng, _story_exchanges(rng))


def _long_chat(rng: random.Random) -> str:
    """Returns a chat of many turns, which trains positions far from the start."""
    exchanges: list[Exchange] = []
    while len(exchanges) < 12:
        exchanges += _story_exchanges(rng) if rng.random() < 0.2 else [tasks.any_task(rng)]
    return _chat(rng, exchanges)


def _plain_story(rng: random.Random) -> str:
    written = story(rng, num_plots=rng.choice((1, 2, 3, 4)))
    title = f"{written.title}\n\n" if rng.random() < 0.3 else ""
    return f"{BOS}{title}{written.text}{EOS}"


def _plain_mix(rng: random.Random) -> str:
    """Returns a sheet of questions and answers, or sentences with their JSON records, without chat tokens."""
    if rng.random() < 0.5:
        records = [tasks.json_record(rng) for _ in range(rng.randint(2, 8))]
        return BOS + "\n".join(f"{r.question.split(': ', 1)[1]}\n{r.answer}" for r in records) + EOS
    exchanges = [tasks.any_task(rng) for _ in range(rng.randint(2, 5))]
    return BOS + "\n\n".join(f"Question: {e.question}\nAnswer: {e.answer}" for e in exchanges) + EOS


def _plain_sums(rng: random.Random) -> str:
    return BOS + tasks.sum_sheet(rng) + EOS


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    for _, document in zip(range(10), documents(seed), strict=False):
        print(document + "\n" + "-" * 80)
