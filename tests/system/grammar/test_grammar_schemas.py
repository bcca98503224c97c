"""Tests that every output is valid against its JSON schema, over hundreds of schemas, by the library `jsonschema`."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from penstock.errors import InvalidInput
from penstock.types import Role, SamplingParams
from penstock.v1 import common_pb2
from tests.support.engine.grammars import MODEL, compiler, encode, schema, spell
from tests.support.engine.random_schemas import make_schema
from tests.support.serving import caller, worker_config, workers

pytestmark = pytest.mark.processes

NUM_SCHEMAS = 200  # for each way of sampling, all different
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
WAYS = {
    "greedy": SamplingParams(max_tokens=200, temperature=0.0),
    "seeded": SamplingParams(max_tokens=200, temperature=1.0, seed=1),
}


def schemas(first_seed: int) -> list[dict[str, object]]:
    """Returns schemas that llguidance accepts; it refuses those that nothing satisfies."""
    found, seed = [], first_seed
    while len(found) < NUM_SCHEMAS:
        made = make_schema(seed)
        seed += 1
        try:
            compiler().compile(schema(made))
        except InvalidInput as error:
            if "nsatisfiable" not in error.message:
                raise
        else:
            found.append(made)
    assert seed - first_seed < 1.1 * NUM_SCHEMAS
    return found


@pytest.mark.parametrize("way", WAYS)
async def test_every_output_is_valid(way: str) -> None:
    prompt, asked = encode("Answer in JSON: "), schemas(first_seed=10_000 * list(WAYS).index(way))
    async with workers(worker_config(Role.DECODE, MODEL, engine={"num_pages": 1024})) as (decode,):
        async with caller(decode) as router:
            streams = [
                router.submit(prompt, replace(WAYS[way], grammar=schema(each), seed=number), timeout_s=600)
                for number, each in enumerate(asked)
            ]
            answers = [await router.answer(stream) for stream in streams]
    num_whole = 0
    for each, answer in zip(asked, answers, strict=True):
        assert answer.error is None
        if answer.finish_reason == common_pb2.FINISH_REASON_LENGTH:
            continue  # cut short
        num_whole += 1
        value = json.loads(spell(answer.token_ids))
        jsonschema.Draft202012Validator(each, format_checker=FORMATS).validate(value)
    assert num_whole > 0.8 * NUM_SCHEMAS
