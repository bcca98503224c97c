"""Tests that each prompt of an agent's conversation extends the one before, in every dialect: its pages hit."""

from __future__ import annotations

import itertools

import httpx
import pytest

from penstock.types import Role
from tests.router.api.dialects.agent_replay import AGENTS, Agent, MessagesAgent
from tests.router.api.dialects.speech import CALL, saying
from tests.support.router.router_fakes import MODEL, PAGE_SIZE, FakeWorker, all_followed, running_router, until
from tests.support.serving import worker_config, workers

NUM_TURNS = 50
TEXT = "It is sunny there, so take a hat and leave the coat at home."


def question(turn: int) -> str:
    return f"Question {turn}: what is the weather like, and what should I wear on the hill?"


def num_shared(first: list[int], second: list[int]) -> int:
    """Returns how many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


async def replay(agent: type[Agent], num_turns: int) -> list[list[int]]:
    """Returns the prompts of a conversation in which every second turn calls a tool."""
    worker = await FakeWorker(context_length=200_000, tokens_per_frame=64).start()
    async with running_router(worker) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
            caller = agent(http)
            for turn in range(num_turns):
                worker.next_token = saying(CALL if turn % 2 == 0 else TEXT)
                await caller.ask(question(turn))
    return [list(submit.token_ids) for submit in worker.submits]


@pytest.mark.parametrize("agent", AGENTS)
async def test_each_turns_prompt_extends_the_one_before(agent):
    prompts = await replay(agent, NUM_TURNS)
    assert len(prompts) == NUM_TURNS
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before


@pytest.mark.parametrize("agent", AGENTS)
async def test_what_the_model_wrote_keeps_its_tokens(agent):
    """Its pages hit as well, but for the last two: each turn computes little more than what is new in it."""
    prompts = await replay(agent, 10)
    for turn, (before, after) in enumerate(itertools.pairwise(prompts)):
        worker_text = saying(CALL if turn % 2 == 0 else TEXT)
        written = list(before)
        while written[-1] != 1:
            written.append(worker_text(written, None))
        assert num_shared(written[:-1], after) >= len(written) - 1 - 2 * PAGE_SIZE


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
    """Returns the tokens of the prompt, and those of them that came from the prefix cache."""
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
