"""Tests that an output with a grammar has the same tokens however it is served: the invariant, for grammars.

Real workers with their gRPC servers and transports run in this process, over the bundled model in bf16. Several forced
tokens are appended at a time, so that every hand-off can fall between them.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from engine.engine import Engine
from engine.generate import generate
from engine.step.compute import PreparedStep, SampledTokens
from penstock.config import EngineConfig
from penstock.errors import InvalidInput
from penstock.types import Grammar, GrammarKind, Role, SamplingParams
from penstock.v1 import common_pb2
from tests.support.engine.grammars import EOS, GRAMMARS, MODEL, PERSON, regex, schema, spell
from tests.support.serving import SALT, Caller, caller, wait_until_empty, worker_config, workers

pytestmark = pytest.mark.processes

# These values are exact in single precision, the precision of the wire format.
GREEDY = SamplingParams(max_tokens=36, temperature=0.0)
SEEDED = SamplingParams(max_tokens=36, temperature=0.875, top_p=0.9375, seed=5)
WAYS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalized": replace(SEEDED, repetition_penalty=1.25, presence_penalty=0.5),
    "logprobs": replace(SEEDED, logprobs=2),
    "biased": replace(SEEDED, logit_bias={20: 3.0}, min_tokens=4),
    "endless": replace(SEEDED, ignore_eos=True),
    "stopped": replace(SEEDED, stop_token_ids=(30, 31)),
}
PROMPTS = [[(7 * i) % 900 + 20 for i in range(length)] for length in (3, 16, 33, 70)]
BF16 = {"dtype": "bfloat16"}


@functools.cache
def reference_engine() -> Engine:
    return Engine.load(EngineConfig(model=str(MODEL), num_pages=64, num_threads=1, dtype="bfloat16"))


def single_process(prompt: list[int], sampling: SamplingParams) -> list[int]:
    return generate(reference_engine(), prompt, sampling, SALT, use_prefix_cache=False)


def mixed(sampling: SamplingParams) -> list[tuple[list[int], SamplingParams]]:
    """Returns requests of every grammar, with requests without a grammar between them, for one batch."""
    requests = []
    for number, grammar in enumerate([*GRAMMARS.values(), None, schema(PERSON)]):
        for prompt in PROMPTS[number % 2 :: 2]:
            requests.append((prompt, replace(sampling, grammar=grammar, seed=sampling.seed + number)))
    return requests


@functools.cache
def asked(way: str) -> tuple[list[tuple[list[int], SamplingParams]], list[list[int]]]:
    """Returns the requests of one way to sample, and a single process's answer to each."""
    requests = mixed(WAYS[way])
    return requests, [single_process(*request) for request in requests]


async def ask_all(router: Caller, requests: list[tuple[list[int], SamplingParams]], prefill: list) -> list[list[int]]:
    streams = [router.submit(prompt, sampling, prefill) for prompt, sampling in requests]
    answers = [await router.answer(stream) for stream in streams]
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_to_serve_gives_the_same_tokens(way: str) -> None:
    requests, wanted = asked(way)
    async with workers(
        worker_config(Role.PREFILL, MODEL, engine=BF16, prefill={"max_batch_tokens": 24}),
        worker_config(Role.DECODE, MODEL, engine=BF16, transfer={"checksums": True}),
    ) as (prefill, decode):
        async with caller(decode) as router:
            assert await ask_all(router, requests, [prefill]) == wanted
            assert await ask_all(router, requests, [prefill]) == wanted  # with cached prompts
            assert await ask_all(router, requests, []) == wanted  # colocated
        await wait_until_empty(prefill, decode)


@pytest.mark.parametrize("way", WAYS)
async def test_run_ahead_and_chunks_change_nothing(way: str) -> None:
    requests, wanted = asked(way)
    ahead = BF16 | {"run_ahead": True}
    async with workers(
        worker_config(Role.PREFILL, MODEL, engine=ahead, prefill={"max_batch_tokens": 8}),
        worker_config(Role.DECODE, MODEL, engine=ahead, decode={"max_batch_tokens": 24, "max_batch_sequences": 16}),
    ) as (prefill, decode):
        async with caller(decode) as router:
            assert await ask_all(router, requests, [prefill]) == wanted
            assert await ask_all(router, requests, []) == wanted


async def test_rows_with_and_without_grammars_run_ahead_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device gets the whole next step while one is in flight, and samples it once its texts are known."""
    requests, wanted = asked("seeded")
    free = [(prompt, replace(sampling, grammar=None)) for prompt, sampling in requests]
    wanted_free = [single_process(prompt, sampling) for prompt, sampling in free]
    # Whether each late-sampled step has rows with, and rows without, a grammar.
    kinds: set[tuple[bool, bool]] = set()
    sample_ahead = Engine.sample_ahead

    def note(engine: Engine, step: PreparedStep, *rest: Any) -> SampledTokens:
        num_ruled = len(step.sampling.ruled)
        kinds.add((num_ruled > 0, num_ruled < len(step.sampling.rows)))
        return sample_ahead(engine, step, *rest)

    monkeypatch.setattr(Engine, "sample_ahead", note)
    ahead = BF16 | {"run_ahead": True, "num_pages": 512}
    async with workers(worker_config(Role.DECODE, MODEL, engine=ahead, decode={"max_batch_sequences": 64})) as (
        decode,
    ):
        async with caller(decode) as router:
            assert await ask_all(router, requests + free, []) == wanted + wanted_free
        await wait_until_empty(decode)
    assert (True, True) in kinds


async def test_preempted_sequences_continue_in_their_grammars() -> None:
    requests, wanted = asked("seeded")
    small = BF16 | {"num_pages": 16}
    async with workers(worker_config(Role.DECODE, MODEL, engine=small, decode={"watermark": 0.0})) as (decode,):
        async with caller(decode) as router:
            streams = [router.submit(prompt, sampling) for prompt, sampling in requests]
            answers = [await router.answer(stream) for stream in streams]
        assert [answer.token_ids for answer in answers] == wanted
        assert sum(answer.timing.num_preemptions for answer in answers if answer.timing) > 0
        await wait_until_empty(decode)


@pytest.mark.parametrize("name", GRAMMARS)
async def test_an_output_continued_by_another_worker_is_the_same_wherever_it_was_split(name: str) -> None:
    prompt, sampling = PROMPTS[1], replace(SEEDED, grammar=GRAMMARS[name])
    wanted = single_process(prompt, sampling)
    roomy = BF16 | {"num_pages": 512}
    async with workers(
        worker_config(Role.PREFILL, MODEL, engine=roomy), worker_config(Role.DECODE, MODEL, engine=roomy)
    ) as (prefill, decode):
        async with caller(decode) as router:
            for half in range(2):  # the second half finds pages of the first half in the caches
                cuts = [cut for cut in range(1, len(wanted)) if cut // 2 % 2 == half]
                streams = []
                for cut in cuts:
                    so_far, candidates = prompt + wanted[:cut], [prefill] if cut % 2 else []
                    streams.append(router.submit(so_far, sampling, candidates, num_prompt_tokens=len(prompt)))
                for cut, stream in zip(cuts, streams, strict=True):
                    answer = await router.answer(stream)
                    assert (answer.error, wanted[:cut] + answer.token_ids) == (None, wanted)
        await wait_until_empty(prefill, decode)


async def test_texts_match_their_grammars_and_end_with_stop() -> None:
    async with workers(worker_config(Role.DECODE, MODEL, engine=BF16)) as (decode,):
        async with caller(decode) as router:
            for name, grammar in GRAMMARS.items():
                sampling = replace(SEEDED, grammar=grammar, max_tokens=400)
                answer = await router.answer(router.submit(PROMPTS[2], sampling))
                assert answer.finish_reason == common_pb2.FINISH_REASON_STOP, name
                assert answer.token_ids[-1] in EOS
                text = spell(answer.token_ids)
                if name == "person":
                    jsonschema.validate(json.loads(text), PERSON)
                elif name == "choice":
                    assert text in json.loads(grammar.source)
                elif name == "counted":
                    assert re.fullmatch(grammar.source, text)


async def test_an_unusable_grammar_fails_only_its_request() -> None:
    impossible = replace(GREEDY, grammar=regex("(?=a)b"))
    contradictory = replace(GREEDY, grammar=Grammar(GrammarKind.CHOICE, '["yes"]'), logprobs=1)
    fine = replace(GREEDY, grammar=schema(PERSON))
    wanted = single_process(PROMPTS[0], fine)
    async with workers(
        worker_config(Role.PREFILL, MODEL, engine=BF16), worker_config(Role.DECODE, MODEL, engine=BF16)
    ) as (prefill, decode):
        async with caller(decode) as router:
            streams = [router.submit(PROMPTS[0], sampling, [prefill]) for sampling in (fine, impossible, fine)]
            first, refused, second = [await router.answer(stream) for stream in streams]
            assert first.token_ids == second.token_ids == wanted
            assert isinstance(refused.error, InvalidInput)
            assert refused.error.field == "sampling.grammar"
            assert "look-around" in refused.error.message
            # An output that has left its grammar, which only a faulty caller sends.
            strays = router.submit([*PROMPTS[0], 50, 60], contradictory, num_prompt_tokens=len(PROMPTS[0]))
            stray = await router.answer(strays)
            assert isinstance(stray.error, InvalidInput)
            assert "cannot be followed after 2 tokens" in stray.error.message
            again = await router.answer(router.submit(PROMPTS[0], fine, [prefill]))
            assert again.token_ids == wanted
        await wait_until_empty(prefill, decode)
