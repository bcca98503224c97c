"""Tests that a step that verifies proposed tokens samples what steps of one token each sample.

With the bundled model in bf16, whose CPU kernels give the same bits in any batch, log-probabilities are equal to the
bit as well; matrix products in float32 round differently in other batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.step.batch import build_host_batch
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint

PROMPT = [(5 * place) % (VOCAB_SIZE - 2) + 2 for place in range(21)]
COUNT = 24
BUNDLED = Path(__file__).resolve().parents[4] / "models" / "penstock-tiny"
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 7},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "seed": 3},
    "bias": {"logit_bias": {5: 3.0, 9: -9.0}, "temperature": 0.0},
    "bad words": {"bad_sequences": ((7,), (11, 12), (3, 4, 5)), "seed": 5},
    "allowed tokens": {"allowed_token_ids": tuple(range(10, 40)), "seed": 6},
    "min tokens": {"min_tokens": 12, "logit_bias": {1: 4.0}, "seed": 8},
    "logprobs": {"logprobs": 3, "seed": 9},
}


@pytest.fixture(
    scope="module",
    params=[("qwen3", "float32"), ("bundled", "bfloat16"), ("deepseek_v3", "float32"), ("gemma2", "float32")],
    ids=lambda param: param[0],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    family, dtype = request.param
    folder = tmp_path_factory.mktemp("speculation") / family
    model = BUNDLED if family == "bundled" else make_checkpoint(family, folder)
    loaded = Engine.load(EngineConfig(model=str(model), dtype=dtype, num_pages=96, page_size=8, num_threads=1))
    yield loaded
    loaded.close()


def make_sequence(engine: Engine, number: int, options: dict[str, object]) -> Sequence:
    sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True, **options)  # type: ignore[arg-type]
    sequence = Sequence(RequestId(str(number)), [*PROMPT, number % 5 + 2], len(PROMPT), sampling, b"")
    sequence.pages = engine.pool.allocate(8)
    return sequence


def record(sequence: Sequence, num_computed: int, tokens: list[SampledToken]) -> None:
    sequence.num_computed_tokens += num_computed
    for token in tokens:
        sequence.token_ids.append(token.token_id)
    sequence.num_computed_tokens = len(sequence.token_ids) - 1


def plainly(engine: Engine, options: dict[str, object]) -> list[SampledToken]:
    sequence, found = make_sequence(engine, 0, options), []
    while len(found) < COUNT:
        work = ScheduledSequence(sequence, sequence.num_uncomputed_tokens)
        [token] = engine.step([work]).tokens
        assert token is not None
        record(sequence, work.num_tokens, [token])
        found.append(token)
    engine.pool.release(sequence.pages)
    return found


def scores(token: SampledToken) -> list[float]:
    assert token.logprob is not None
    return [token.logprob.logprob, *(score for _, score in token.logprob.top)]


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 3])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_verified_output_equals_that_of_single_token_steps(engine: Engine, kind: str, wrong_at: int | None) -> None:
    """Proposals of four tokens are right up to `wrong_at`, beside a sequence with one and a sequence with none."""
    expected = plainly(engine, SAMPLINGS[kind])
    sequence, other = make_sequence(engine, 0, SAMPLINGS[kind]), make_sequence(engine, 1, {"temperature": 0.0})
    found: list[SampledToken] = []
    num_steps = 0
    while len(found) < COUNT:
        count = sequence.num_uncomputed_tokens
        proposed = [token.token_id for token in expected[len(found) : len(found) + 4]] if count == 1 else []
        if wrong_at is not None and wrong_at < len(proposed):
            proposed[wrong_at] = proposed[wrong_at] % (VOCAB_SIZE - 1) + 1
        work = [
            ScheduledSequence(other, other.num_uncomputed_tokens),
            ScheduledSequence(sequence, count, proposed=tuple(proposed[: COUNT - len(found) - 1])),
        ]
        tokens = engine.compute(engine.prepare(work)).wait()
        assert not tokens.failed
        first, own = tokens.chunks
        assert first is not None
        assert own is not None
        held = [SampledToken(own, tokens.logprobs.get(1)), *tokens.further.get(1, [])]
        assert len(held) == 1 + min(len(work[1].proposed), 4 if wrong_at is None else wrong_at)
        record(other, work[0].num_tokens, [SampledToken(first)])
        record(sequence, count, held)
        found += held
        num_steps += 1
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    if engine.layout.dtype == "bfloat16":
        assert found == expected
    elif "logprobs" in SAMPLINGS[kind]:
        for own, other_one in zip(found, expected, strict=True):
            assert scores(own) == pytest.approx(scores(other_one), abs=1e-4)
    assert num_steps <= COUNT if wrong_at == 0 else num_steps < COUNT
    for each in (sequence, other):
        engine.pool.release(each.pages)


def test_verified_rows_are_computed_as_decode_rows(engine: Engine) -> None:
    """This lets graphs and the kernels of plain steps compute them."""
    sequence = make_sequence(engine, 0, SAMPLINGS["greedy"])
    sequence.num_computed_tokens = len(sequence.token_ids) - 1
    host = engine.prepare([ScheduledSequence(sequence, 1, proposed=(3, 4, 5))]).host
    assert (host.num_decodes, host.max_query_len, len(host.context_B)) == (4, 1, 4)
    assert host.context_B.tolist() == list(range(len(sequence.token_ids), len(sequence.token_ids) + 4))
    assert host.sampled_places.tolist() == [0, 0, 0, 0]
    assert torch.equal(torch.from_numpy(host.logit_rows_R), torch.arange(4))
    engine.pool.release(sequence.pages)


def test_each_verified_row_uses_its_sequences_adapter(engine: Engine) -> None:
    sequence, other = make_sequence(engine, 0, SAMPLINGS["greedy"]), make_sequence(engine, 1, SAMPLINGS["greedy"])
    sequence.num_computed_tokens, sequence.adapter_slot = len(sequence.token_ids) - 1, 3
    work = [ScheduledSequence(other, other.num_uncomputed_tokens), ScheduledSequence(sequence, 1, proposed=(3, 4))]
    host = build_host_batch(work, engine.layout.page_size)
    assert host.adapter_T is not None
    assert host.adapter_T.tolist() == [3] * 3 + [0] * other.num_uncomputed_tokens
    for each in (sequence, other):
        engine.pool.release(each.pages)
