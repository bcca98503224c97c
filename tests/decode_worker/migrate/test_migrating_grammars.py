"""Migrates sequences in the middle of their grammars, also while forced tokens still have no KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from decode_worker import server as decode_server
from penstock.types import SamplingParams
from tests.decode_worker.migrate.test_migration import Pair, migrate, running_pair, single_process, until_running
from tests.support.engine.grammars import MODEL, regex, schema
from tests.support.serving import TIMEOUT_S

pytestmark = pytest.mark.processes

LEVELS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"temperature": {"type": "integer"}, "description": {"enum": ["mild weather", "strong wind"]}},
        "required": ["temperature", "description"],
        "additionalProperties": False,
    },
    "minItems": 30,
    "maxItems": 32,
    "x-guidance": {"whitespace_flexible": False},
}
SAMPLING = SamplingParams(max_tokens=400, temperature=0.75, top_p=0.875, seed=7)
ENOUGH = 12  # migrations, each at another place of a grammar
GRAMMARS = {"forced": schema(LEVELS), "sampled": regex("([a-z]{1,8} [0-9]{2,4}; ){60,90}")}


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(decode_server, "LEASE_S", TIMEOUT_S)
    async with running_pair(MODEL) as made:
        yield made


@pytest.mark.parametrize("name", GRAMMARS)
async def test_a_migrated_output_continues_in_its_grammar(pair: Pair, name: str) -> None:
    prompts = [[(7 * place) % 900 + 20 for place in range(length)] for length in (3, 16, 40, 150)]
    requests = [
        (prompt, replace(SAMPLING, grammar=GRAMMARS[name], seed=number)) for number, prompt in enumerate(prompts)
    ]
    wanted = [single_process(MODEL, prompt, sampling) for prompt, sampling in requests]
    num_migrations = 0
    while num_migrations < ENOUGH:
        streams = [asyncio.create_task(pair.router.stream(pair.left, *request)) for request in requests]
        await until_running(pair.left, 1)
        source, target = pair.left, pair.right
        while num_migrations < ENOUGH and not all(stream.done() for stream in streams):
            num_migrations += len((await migrate(source, target)).migrated)
            source, target = target, source
        seen = [await stream for stream in streams]
        assert [stream.error for stream in seen] == [None] * len(seen)
        assert [stream.token_ids for stream in seen] == wanted
