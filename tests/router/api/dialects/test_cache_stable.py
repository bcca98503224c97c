"""Tests in every dialect that each prompt of an agent's conversation extends the previous one, so that its pages
hit."""

from __future__ import annotations

import itertools

import httpx
import pytest

from penstock.types import Role
from tests.router.api.dialects.agent_replay import AGENTS, Agent, MessagesAgent
from tests.router.api.dialects.speech import CALL, saying, tokens_of
from tests.support.router.router_fakes import MODEL, PAGE_SIZE, FakeWorker, all_followed, running_router, until
from tests.support.serving import worker_config, workers

NUM_TURNS, LONG = 50, 200
TEXT = "It is sunny there, so take a hat and leave the coat at home."


def question(turn: int) -> str:
    return f"Question {turn}: what is the weather like, and what should I wear on the hill?"


def spoken(turn: int) -> str:
    """Returns what the model writes; in every second turn it is a tool call."""
    return CALL if turn % 2 == 0 else TEXT


def num_shared(first: list[int], second: list[int]) -> int:
    """Returns the length of the common prefix in tokens."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(first), len(second)))


async def replay(agent: type[Agent], num_turns: int) -> list[list[int]]:
    """Returns the prompts of a conversation."""
    worker = await FakeWorker(context_length=200_000, tokens_per_frame=64).start()
    async with running_router(worker) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
            caller = agent(http)
            for turn in range(num_turns):
                worker.next_token = saying(spoken(turn))
                await caller.ask(question(turn))
    return [list(submit.token_ids) for submit in worker.submits]


@pytest.mark.parametrize(
    ("agent", "num_turns"), [(agent, LONG if agent is MessagesAgent else NUM_TURNS) for agent in AGENTS]
)
async def test_each_turn_computes_little_more_than_its_new_tokens(agent, num_turns):
    """Each prompt extends the previous one, and the model's own output keeps all its tokens except for two pages."""
    prompts = await replay(agent, num_turns)
    assert len(prompts) == num_turns
    for turn, (before, after) in enumerate(itertools.pairwise(prompts)):
        assert after[: len(before)] == before
        computed = [*before, *tokens_of(spoken(turn))]
        num_cached = num_shared(computed, after) // PAGE_SIZE * PAGE_SIZE
        assert len(after) - num_cached <= len(after) - len(computed) + 2 * PAGE_SIZE


async def test_all_dialects_make_the_same_prompts():
    prompts = [await replay(agent, 6) for agent in AGENTS]
    assert all(each == prompts[0] for each in prompts)


@pytest.mark.parametrize("agent", [MessagesAgent, AGENTS[1]])
async def test_a_real_service_reads_all_but_the_last_page_from_its_cache(agent):
    configs = [worker_config(role, MODEL, name=role.value, engine={"num_pages": 256}) for role in Role]
    async with workers(*configs) as servers:
        async with running_router(wait=False, workers=[server.address for server in servers]) as router:
            await until(lambda: all_followed(router.server, 2))
            async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
                caller, used = agent(http), []
                for turn in range(8):
                    answer = await caller.ask(question(turn), max_tokens=24)
                    used.append(_prompt_and_cached(answer["usage"]))
    for (before, _), (prompt, cached) in itertools.pairwise(used):
        assert prompt > before
        assert cached >= before // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE


def _prompt_and_cached(usage: dict) -> tuple[int, int]:
    """Returns the prompt's tokens, and how many came from the prefix cache."""
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
