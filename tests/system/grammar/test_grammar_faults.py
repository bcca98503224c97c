"""Kills and freezes real processes under streams with grammars: the client gets exactly an undisturbed run's tokens."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator

import jsonschema
import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig
from penstock.types import Role, SamplingParams
from tests.decode_worker.migrate.test_migrating_grammars import LEVELS
from tests.support.engine.grammars import regex, schema, spell
from tests.support.plain_processes import Deployment
from tests.system.test_faults import MODEL, PROMPT, TIMEOUT_S, Fleet, busy_worker, client, config, wait_until_empty

pytestmark = pytest.mark.processes

GRAMMARS = {"forced": schema(LEVELS), "sampled": regex("([a-z]{1,8} [0-9]{2,4}; ){50,60}")}
SEEDED = {"temperature": 0.875, "top_p": 0.9375, "seed": 11}  # exact in single precision
MAX_TOKENS = 700


@pytest.fixture(scope="module")
def shared_fleet() -> Iterator[Fleet]:
    with Deployment() as deployment:
        yield Fleet(deployment, [config(role, number) for role in Role for number in range(2)])


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """Returns the fleet with every process alive."""
    shared_fleet.mend()
    return shared_fleet


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    engine = Engine.load(EngineConfig(model=str(MODEL), num_pages=256, num_threads=1, dtype="bfloat16"))
    return {
        name: generate(engine, PROMPT, SamplingParams(max_tokens=MAX_TOKENS, grammar=grammar, **SEEDED))  # type: ignore[arg-type]
        for name, grammar in GRAMMARS.items()
    }


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_decode_worker_lost_in_the_middle_of_a_grammar_loses_no_token(
    fleet: Fleet, undisturbed: dict[str, list[int]], name: str, number: signal.Signals
) -> None:
    async with client(fleet.router) as router:
        tokens: list[int] = []
        victim = None
        async with busy_worker(fleet.decode) as busy:
            async for chunk in router.generate(PROMPT, max_tokens=MAX_TOKENS, grammar=GRAMMARS[name], **SEEDED):
                tokens += chunk.token_ids
                if victim is None and len(tokens) > 10:
                    victim = await asyncio.wait_for(busy, TIMEOUT_S)
                    victim.signal(number)
        assert tokens == undisturbed[name]
        assert victim is not None
        if name == "forced":
            jsonschema.validate(json.loads(spell(tokens)), LEVELS)
        await wait_until_empty([*fleet.prefill, *(process for process in fleet.decode if process is not victim)])
