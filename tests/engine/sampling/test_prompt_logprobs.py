"""Tests log-probabilities of prompts: equal to transformers', for any chunks, in any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.step.prompt_scores import PromptScores
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
PROMPT = [(7 * i * i) % 900 + 20 for i in range(75)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(EngineConfig(model=str(MODEL), num_pages=64, num_threads=1, dtype="float32"))


@pytest.fixture(scope="module")
def wanted_TV() -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


def sequence(engine: Engine, prompt: list[int], num_top: int | None) -> Sequence:
    made = Sequence(
        RequestId("r"),
        list(prompt),
        len(prompt),
        SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=num_top),
        b"",
    )
    made.pages = engine.pool.allocate(-(-(len(prompt) + 4) // engine.layout.page_size))
    return made


def check(scores: list[PromptScores], prompt: list[int], wanted_TV: torch.Tensor, num_top: int) -> None:
    token_ids_SA = np.concatenate([part.token_ids_SA for part in scores])
    logprobs_SA = np.concatenate([part.logprobs_SA for part in scores])
    assert token_ids_SA.shape == logprobs_SA.shape == (len(prompt) - 1, 1 + num_top)
    assert token_ids_SA[:, 0].tolist() == prompt[1:]
    for position, (token_ids, logprobs) in enumerate(zip(token_ids_SA, logprobs_SA, strict=True)):
        row = wanted_TV[position]
        assert logprobs == pytest.approx(row[token_ids].numpy(), abs=1e-3)
        assert token_ids[1:].tolist() == row.topk(num_top).indices.tolist()


@pytest.mark.parametrize("chunks", [[75], [1, 74], [74, 1], [30, 1, 44]])
def test_scores_equal_those_of_transformers_in_any_chunks(
    engine: Engine, wanted_TV: torch.Tensor, chunks: list[int]
) -> None:
    scored, other = sequence(engine, PROMPT, 3), sequence(engine, PROMPT[:9], None)
    found: list[PromptScores] = []
    try:
        for index, num_tokens in enumerate(chunks):
            work = [ScheduledSequence(scored, num_tokens)]
            if index == 0:
                work.insert(0, ScheduledSequence(other, 9))
            output = engine.step(work)
            assert set(output.scores) <= {len(work) - 1}
            if index == 0 and num_tokens > 1:
                prepared = engine.prepare(work)
                tokens = engine.compute(prepared).wait()
                assert tokens.chunks[0] == output.tokens[0].token_id  # type: ignore[union-attr]
                check_same(tokens.scores[1], output.scores[1])
            found += output.scores.values()
            scored.num_computed_tokens += num_tokens
        assert output.tokens[-1] is not None
        assert output.tokens[-1].token_id == int(wanted_TV[-1].argmax())
        check(found, PROMPT, wanted_TV, 3)
        assert found[0].first == 1
    finally:
        engine.pool.release(scored.pages)
        engine.pool.release(other.pages)


def check_same(scores: PromptScores, other: PromptScores) -> None:
    assert scores.first == other.first
    assert np.array_equal(scores.token_ids_SA, other.token_ids_SA)
    assert np.array_equal(scores.logprobs_SA, other.logprobs_SA)


def test_each_prompt_of_a_batch_gets_its_own_scores(engine: Engine, wanted_TV: torch.Tensor) -> None:
    lengths = {40: 0, 5: 2, 1: 1}
    made = [sequence(engine, PROMPT[:length], num_top) for length, num_top in lengths.items()]
    try:
        output = engine.step([ScheduledSequence(each, len(each.token_ids)) for each in made])
        assert set(output.scores) == {0, 1}, "a prompt of one token has none"
        for place, (length, num_top) in list(enumerate(lengths.items()))[:2]:
            check([output.scores[place]], PROMPT[:length], wanted_TV, num_top)
    finally:
        for each in made:
            engine.pool.release(each.pages)


def test_a_sequence_with_output_is_not_scored_again(engine: Engine) -> None:
    resumed = sequence(engine, PROMPT[:20], 1)
    resumed.num_prompt_tokens = 18
    try:
        assert not engine.step([ScheduledSequence(resumed, 20)]).scores
    finally:
        engine.pool.release(resumed.pages)
