"""Tests that a request gets the same bits whatever is computed beside it and however its prompt is split.

Reinforcement learning depends on this: it compares a sampler's log-probabilities with a trainer's recomputation.
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
from penstock.errors import ConfigError
from penstock.types import RequestId, SamplingParams
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.isas import needs_native

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
NUM_TOKENS = 12
WATCHED = [(11 * i) % 290 + 10 for i in range(37)]
_NUMBERS = itertools.count()


@dataclass
class Answer:
    """Holds tokens with their log-probabilities as raw floats."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)


def make_sequence(prompt: list[int]) -> Sequence:
    sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, logprobs=3)
    return Sequence(RequestId(f"r{next(_NUMBERS)}"), list(prompt), len(prompt), sampling, b"")


def run(engine: Engine, rng: random.Random | None, chunk: int) -> Answer:
    """Returns the watched request's answer, computed alone or beside others that come and go in any state."""
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
    """Describes how answers in batches differ from the one that is computed alone."""
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
                pairs = zip(sum(found.logprobs, ()), sum(alone.logprobs, ()), strict=True)
                most = max(abs(left - right) for left, right in pairs)
                problems.append(f"seed {seed}, chunk {chunk}: log-probabilities by up to {most:.2g}")
    finally:
        engine.close()
    return problems


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_bf16_gives_the_same_bits_in_any_batch(quantization: str) -> None:
    assert check(MODEL, dtype="bfloat16", quantization=quantization, deterministic=True) == []


@needs_native
@pytest.mark.parametrize(
    ("family", "deterministic"),
    [
        ("llama", True),
        ("gemma2", True),
        ("qwen3_moe", False),
        ("deepseek_v2", False),
        ("gpt_oss", False),
        ("llama4_text", False),
    ],
)
def test_every_kind_of_layer_gives_the_same_bits_in_any_batch(tmp_path: Path, family: str, deterministic: bool) -> None:
    """The router's choice among experts is a library product: exact with these few experts, but not guaranteed."""
    assert check(make_checkpoint(family, tmp_path), dtype="bfloat16", deterministic=deterministic) == []


@needs_native
def test_settings_that_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)

    def load(**settings: object) -> Engine:
        return Engine.load(
            EngineConfig.model_validate({"model": str(folder), "num_pages": 8, "deterministic": True, **settings})
        )

    load(dtype="bfloat16").close()
    for settings, problem in (
        ({"dtype": "float32"}, "engine.dtype is float32, whose products may round by batch; set engine.dtype"),
        ({"dtype": "bfloat16", "max_adapters": 2}, "engine.max_adapters is 2"),
    ):
        with pytest.raises(ConfigError, match=f"engine.deterministic = true, but {problem}"):
            load(**settings)


def test_a_layer_without_a_kernel_is_refused_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler uses library products, whose rounding depends on the batch."""
    monkeypatch.setattr("engine.layers.linear.pack_for_tiles", lambda *_: None)
    with pytest.raises(ConfigError, match="no CPU kernel computes _head, for lack of"):
        Engine.load(
            EngineConfig(
                model=str(MODEL), num_pages=8, dtype="bfloat16", deterministic=True, share_weights=False, num_threads=1
            )
        )
