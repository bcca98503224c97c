"""The same request gives the same bits, whatever is computed beside it and however its prompt is cut.

This is what reinforcement learning compares: log-probabilities of a sampler and of a trainer's recomputation.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams
from tests.support.engine.checkpoints import make_checkpoint

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
NUM_TOKENS = 12
WATCHED = [(11 * i) % 290 + 10 for i in range(37)]
_NUMBERS = itertools.count()


@dataclass
class Answer:
    """Tokens with their log-probabilities, as raw floats."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)


def make_sequence(prompt: list[int]) -> Sequence:
    sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, logprobs=3)
    return Sequence(RequestId(f"r{next(_NUMBERS)}"), list(prompt), len(prompt), sampling, b"")


def run(engine: Engine, rng: random.Random | None, chunk: int) -> Answer:
    """Returns the watched request's answer, alone or beside others that come, go and are in any state."""
    watched, others, answer = make_sequence(WATCHED), [], Answer()
    while len(answer.token_ids) < NUM_TOKENS:
        if rng is not None and len(others) < 9:
            others.append(make_sequence([rng.randrange(10, 300) for _ in range(rng.randrange(1, 60))]))
        batch = [watched, *others]
        if rng is not None:
            batch = [watched, *rng.sample(others, rng.randrange(len(others) + 1))]
            rng.shuffle(batch)
        work = []
        for sequence in batch:
            most = chunk if sequence is watched else 16
            num_tokens = min(sequence.num_uncomputed_tokens, most)
            num_pages = -(-(sequence.num_computed_tokens + num_tokens) // engine.layout.page_size)
            sequence.pages += engine.pool.allocate(max(0, num_pages - len(sequence.pages)))
            work.append(ScheduledSequence(sequence, num_tokens))
        for item, token in zip(work, engine.step(work).tokens, strict=True):
            sequence = item.sequence
            sequence.num_computed_tokens += item.num_tokens
            if token is None:
                continue
            sequence.token_ids.append(token.token_id)
            if sequence is watched:
                found = token.logprob
                assert found is not None
                answer.token_ids.append(token.token_id)
                answer.logprobs.append((found.logprob, *(logprob for _, logprob in found.top)))
        for sequence in [each for each in others if each.num_output_tokens > 8]:
            others.remove(sequence)
            engine.pool.release(sequence.held_pages)
    for sequence in (watched, *others):
        engine.pool.release(sequence.held_pages)
    return answer


def check(folder: Path, **settings: object) -> list[str]:
    """Returns how answers in batches differ from the one that is computed alone."""
    engine = Engine.load(
        EngineConfig.model_validate({"model": str(folder), "num_pages": 128, "num_threads": 2, **settings})
    )
    problems = []
    try:
        alone = run(engine, None, 64)
        for seed, chunk in ((0, 64), (1, 5), (2, 16), (3, 1)):
            found = run(engine, random.Random(seed), chunk)
            if found.token_ids != alone.token_ids:
                problems.append(f"seed {seed}, chunk {chunk}: tokens")
            elif found.logprobs != alone.logprobs:
                most = max(
                    abs(a - b)
                    for one, two in zip(found.logprobs, alone.logprobs, strict=True)
                    for a, b in zip(one, two, strict=True)
                )
                problems.append(f"seed {seed}, chunk {chunk}: log-probabilities by up to {most:.2g}")
    finally:
        engine.close()
    return problems


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_bf16_gives_the_same_bits_in_any_batch(quantization: str) -> None:
    assert check(MODEL, dtype="bfloat16", quantization=quantization) == []


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_every_kind_of_layer_gives_the_same_bits_in_any_batch(tmp_path: Path, family: str) -> None:
    assert check(make_checkpoint(family, tmp_path), dtype="bfloat16") == []
