"""Tests the sampler: distributions, reproducibility, filters, penalties, bans and log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from engine.sampling.counter_random import uniform
from engine.sampling.logit_edits import edit_logits
from engine.sampling.sampler import sample, sample_each
from engine.sampling.step_sampling import StepSampling
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence
from penstock.errors import InternalError, InvalidInput
from penstock.types import RequestId, SamplingParams

EOS = frozenset({1})


def row(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> ScheduledSequence:
    prompt, output = prompt or [0], output or []
    params = SamplingParams(max_tokens=1000, **sampling)
    return ScheduledSequence(Sequence(RequestId("r"), prompt + output, len(prompt), params, b"salt"), 1)


def sample_many(
    logits: list[float] | torch.Tensor, num_samples: int, *, seed: int = 0, **sampling: Any
) -> Counter[int]:
    """Counts the tokens of many samples in one batch, at 100 positions with as many seeds as needed."""
    logits_V = torch.as_tensor(logits, dtype=torch.float32)
    rows = [row([0] * (1 + index % 100), seed=seed + index // 100, **sampling) for index in range(num_samples)]
    return Counter(token.token_id for token in sample(logits_V.expand(num_samples, -1), rows, EOS))


def kept(logits: list[float], **sampling: Any) -> set[int]:
    """Returns the tokens that are ever sampled; weights must be large enough to occur in 400 samples."""
    return set(sample_many(logits, 400, seed=5, **sampling))


def tokens_of(output: list[SampledToken]) -> list[int]:
    return [token.token_id for token in output]


# ---- random numbers ------------------------------------------------------------------------------------------------


def test_uniforms_are_pinned_and_uniform() -> None:
    # These values are part of the contract between workers of different versions and must never change. The first is
    # SplitMix64's published first output for seed 0.
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53
    assert uniform(2**64 - 1, 10**6) == 0.21614837616462668
    buckets = Counter(int(uniform(seed, position) * 16) for seed in range(200) for position in range(200))
    chi_square = sum((buckets[bucket] - 2500) ** 2 / 2500 for bucket in range(16))
    assert chi_square < 37.7  # the 99.9 % quantile for 15 degrees of freedom


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    numbers = torch.tensor([[uniform(seed, position) for position in range(500)] for seed in range(20)])
    correlation = torch.corrcoef(torch.cat([numbers, numbers.roll(1, dims=1)]))
    assert (correlation - torch.eye(40)).abs().max() < 0.2  # 4.5 standard errors


# ---- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0])
    num_samples = 20_000
    counts = sample_many(logits, num_samples, temperature=temperature, seed=11)
    expected = (logits / temperature).softmax(-1) * num_samples
    chi_square = sum((counts[token] - float(expected[token])) ** 2 / float(expected[token]) for token in range(8))
    assert chi_square < 24.3  # the 99.9 % quantile for 7 degrees of freedom


def test_samples_follow_the_filtered_distribution() -> None:
    logits = torch.tensor([0.30, 0.25, 0.20, 0.15, 0.07, 0.03]).log()
    num_samples = 10_000
    counts = sample_many(logits, num_samples, top_k=4, top_p=0.8, seed=3)
    # Top-k keeps 0.90; the nucleus of 0.8 of that (0.72) is the first three.
    assert set(counts) == {0, 1, 2}
    chi_square = sum(
        (counts[t] - num_samples * p / 0.75) ** 2 / (num_samples * p / 0.75) for t, p in enumerate((0.30, 0.25, 0.20))
    )
    assert chi_square < 13.8  # the 99.9 % quantile for 2 degrees of freedom


# ---- reproducibility -------------------------------------------------------------------------------------------------


def mixed_rows() -> list[ScheduledSequence]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 1},
        {"top_p": 0.9, "seed": 2},
        {"top_k": 5, "seed": 3},
        {"top_k": 50, "top_p": 0.5, "seed": 4},
        {"min_p": 0.05, "seed": 5, "repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 2},
        {"top_p": 0.3, "min_p": 0.01, "seed": 7, "logit_bias": {3: 5.0}},
        {"temperature": 1.5, "seed": 8, "logprobs": 0},
        {"top_p": 0.999, "temperature": 5.0, "seed": 9},
    ]
    return [row([7, 8, 9], [3] * index, **setting) for index, setting in enumerate(settings)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_samples_the_same_token_alone_and_in_any_batch_and_order(dtype: torch.dtype) -> None:
    rows = mixed_rows()
    torch.manual_seed(0)
    logits = (torch.randn(len(rows), 5003) * 2).to(dtype)
    together = sample(logits, rows, EOS)
    for index, scheduled in enumerate(rows):
        assert sample(logits[index : index + 1], [scheduled], EOS) == [together[index]]
    # They take several chunks on the CPU.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist() * 8
    assert sample(logits[order], [rows[index] for index in order], EOS) == [together[index] for index in order]


def test_a_sample_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, 1000)
    first = sample(logits, [row([1, 2, 3], seed=1)], EOS)
    assert first == sample(logits, [row([4, 5], [6], seed=1)], EOS)  # the length is equal, the tokens are not
    others = {tokens_of(sample(logits, [row([1, 2, 3], seed=seed)], EOS))[0] for seed in range(2, 12)}
    assert len(others) > 5
    assert first != sample(logits, [row([1, 2, 3, 4], seed=1)], EOS)


def test_sampling_leaves_the_logits_unchanged() -> None:
    rows = mixed_rows()
    logits = torch.randn(len(rows), 300)
    before = logits.clone()
    sample(logits, rows, EOS)
    assert torch.equal(logits, before)


# ---- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-45}])
def test_greedy_takes_the_first_of_the_likeliest_tokens(sampling: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [0.0, 1.0, 1.5, 1.0]])
    picked = sample(logits, [row(**sampling), row(**sampling)], EOS)
    assert tokens_of(picked)[1] == 2
    assert tokens_of(picked)[0] in ({1} if sampling != {"temperature": 1e-45} else {1, 3})


def test_bf16_logits_are_processed_in_fp32() -> None:
    logits = torch.tensor([[8.0, 8.0, 0.0, -100.0]], dtype=torch.bfloat16)
    # In bf16 a bias of 0.01 on 8.0 would vanish.
    assert tokens_of(sample(logits, [row(temperature=0.0, logit_bias={1: 0.01})], EOS)) == [1]
    counts = Counter(tokens_of(sample(logits.expand(1000, -1), [row([0] * n, seed=1) for n in range(1, 1001)], EOS)))
    assert abs(counts[0] - counts[1]) < 100
    assert counts[3] == 0


# ---- filters ---------------------------------------------------------------------------------------------------------

HALVES = [math.log(weight) for weight in (0.4, 0.3, 0.2, 0.1)]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),  # the token that crosses the limit is kept
        ({"top_p": 0.69}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 1e-6}, {0}),
        ({"top_p": 0.9999}, {0, 1, 2, 3}),
        ({"min_p": 0.6}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),
        ({"min_p": 0.6, "top_p": 0.6}, {0, 1}),  # 0.6 of the 0.7 that min-p keeps is 0.42
        ({"min_p": 0.6, "top_p": 0.55}, {0}),  # 0.385
        ({"top_k": 2, "top_p": 0.55}, {0}),
        ({"top_k": 3, "min_p": 0.6}, {0, 1}),
        ({"temperature": 0.1, "top_p": 0.9}, {0}),  # filters see the scaled distribution
    ],
)
def test_filters_keep_the_expected_tokens(sampling: dict[str, Any], expected: set[int]) -> None:
    assert kept(HALVES, **sampling) == expected


def test_tokens_tied_with_the_last_one_kept_are_kept() -> None:
    ties = [2.0, 1.0, 1.0, 1.0, -9.0]
    assert kept(ties, top_k=2) == {0, 1, 2, 3}
    assert kept(ties, top_p=0.6) == {0, 1, 2, 3}
    assert kept(ties, top_k=2, top_p=0.99) == {0, 1, 2, 3}
    assert kept([0.0] * 6, top_k=3) == set(range(6))


def test_a_nucleus_wider_than_the_first_guess_is_found_by_sorting() -> None:
    vocab_size = 6000
    logits = torch.linspace(1.0, 0.0, vocab_size)[
        torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    ]
    weights = logits.double().softmax(-1).sort(descending=True)
    size = int((weights.values.cumsum(0) < 0.7).sum()) + 1
    nucleus = set(weights.indices[:size].tolist())
    sampled = set(sample_many(logits, 3000, top_p=0.7, seed=1))
    assert size > 2048
    assert sampled <= nucleus
    assert len(sampled) > 0.4 * size


def test_different_filters_in_one_batch_are_independent() -> None:
    settings: list[dict[str, Any]] = [{"top_k": 1}, {"top_k": 2}, {"top_k": 3}, {"top_p": 0.5}, {}, {"min_p": 0.6}]
    allowed = [{0}, {0, 1}, {0, 1, 2}, {0, 1}, {0, 1, 2, 3}, {0, 1}]
    seen: list[set[int]] = [set() for _ in settings]
    for position in range(1, 200):
        rows = [row([0] * position, seed=seed, **setting) for seed, setting in enumerate(settings)]
        for tokens, token in zip(seen, sample(torch.tensor([HALVES] * len(rows)), rows, EOS), strict=True):
            tokens.add(token.token_id)
    assert seen == allowed


# ---- penalties, bias, bans -------------------------------------------------------------------------------------------


def best(logits: list[float], **settings: Any) -> int:
    return tokens_of(sample(torch.tensor([logits]), [row(temperature=0.0, **settings)], frozenset()))[0]


def test_repetition_penalty_equals_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(3)
    logits = torch.randn(1, 50) * 3
    token_ids = torch.randint(0, 50, (1, 40)).tolist()[0]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([token_ids]), logits.clone())
    scheduled = row(token_ids[:25], token_ids[25:], temperature=0.0, repetition_penalty=1.7)
    edited = logits.clone()
    edits = StepSampling.of([scheduled.sequence], 50, frozenset()).edits
    assert edits is not None
    edit_logits(edited, edits)
    torch.testing.assert_close(edited, expected, rtol=1e-6, atol=0)
    assert tokens_of(sample(logits, [scheduled], EOS)) == [int(expected.argmax())]


def test_presence_and_frequency_penalties_count_only_the_output() -> None:
    logits = [2.0, 1.5, 1.0]
    assert best(logits, prompt=[0, 0, 0], presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert best(logits, prompt=[2], output=[0], presence_penalty=0.4) == 0
    assert best(logits, prompt=[2], output=[0], presence_penalty=0.6) == 1
    assert best(logits, prompt=[2], output=[0, 0, 0], presence_penalty=0.4) == 0  # presence does not accumulate
    assert best(logits, prompt=[2], output=[0, 0, 0], frequency_penalty=0.2) == 1
    assert best(logits, prompt=[2], output=[2], frequency_penalty=-2.0) == 2


def test_logit_bias_moves_single_tokens_and_ignores_ids_outside_the_vocabulary() -> None:
    assert best([2.0, 1.0, 0.0], logit_bias={2: 2.5, 99: 100.0, -1: 100.0}) == 2
    assert best([2.0, 1.0, 0.0], logit_bias={0: -100.0}) == 1


def test_min_tokens_bans_exactly_the_tokens_that_end_the_sequence() -> None:
    logits = torch.tensor([[1.0, 9.0, 8.0, 7.0]])  # 1 is eos, 2 is a stop token

    def first(output: list[int], **settings: Any) -> int:
        return tokens_of(sample(logits, [row([0], output, temperature=0.0, **settings)], EOS))[0]

    assert first([], min_tokens=2, stop_token_ids=(2,)) == 3
    assert first([3], min_tokens=2, stop_token_ids=(2,)) == 3
    assert first([3, 3], min_tokens=2, stop_token_ids=(2,)) == 1
    assert first([], min_tokens=2, stop_token_ids=(2,), ignore_eos=True) == 1  # an ignored eos ends nothing
    assert first([], ignore_eos=True) == 1
    assert first([], min_tokens=2, stop_token_ids=(0, 2, 3)) == 1  # every token would end it, so none is banned
    assert first([], min_tokens=2, stop_token_ids=(77,)) == 2
    assert 1 not in sample_many(logits[0], 200, min_tokens=1, seed=1)


def test_only_allowed_tokens_and_those_that_end_the_output_are_sampled() -> None:
    logits = torch.tensor([[3.0, 5.0, 2.0, 4.0, 1.0]])

    def first(output: list[int], **sampling: Any) -> int:
        return tokens_of(sample(logits, [row([0], output, temperature=0.0, **sampling)], EOS))[0]

    assert first([], allowed_token_ids=(2, 4)) == 1  # the end of sequence
    assert first([], allowed_token_ids=(2, 4), ignore_eos=True) == 2
    assert first([], allowed_token_ids=(4,), stop_token_ids=(0,), ignore_eos=True) == 0
    assert first([], allowed_token_ids=(2, 4), min_tokens=1) == 2
    assert first([], allowed_token_ids=(77, 4), ignore_eos=True) == 4
    assert first([], allowed_token_ids=(2, 4), logit_bias={4: 9.0}) == 4
    assert first([], allowed_token_ids=(1,), min_tokens=3) == 1  # no other token is allowed
    assert set(sample_many(logits[0], 200, allowed_token_ids=(0, 2), ignore_eos=True)) <= {0, 2}


def test_the_token_that_would_complete_a_bad_sequence_is_banned() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])

    def first(output: list[int], prompt: list[int] | None = None, **sampling: Any) -> int:
        return tokens_of(sample(logits, [row(prompt, output, temperature=0.0, **sampling)], EOS))[0]

    assert first([], bad_sequences=((4,),)) == 3
    assert first([], bad_sequences=((4,), (3,), (77,))) == 2
    bad = ((2, 3, 4),)
    assert first([2, 3], bad_sequences=bad) == 3
    assert first([2, 3, 2], bad_sequences=bad) == 4
    assert first([3], [2], bad_sequences=bad) == 4, "it would begin in the prompt"
    assert first([], bad_sequences=bad) == 4
    plain, edited = row([0], [2, 3], temperature=0.0), row([0], [2, 3], temperature=0.0, bad_sequences=bad)
    assert tokens_of(sample(logits.expand(3, -1), [plain, edited, plain], EOS)) == [4, 3, 4]


def test_bans_that_leave_no_token_end_the_request_with_an_error() -> None:
    logits = torch.zeros(1, 5)
    bad = row([0], [2], allowed_token_ids=(2,), bad_sequences=((2, 2),), ignore_eos=True)
    problem = r"^sampling\.bad_words: and allowed_token_ids leave no token to sample after 1 tokens of output"
    with pytest.raises(InvalidInput, match=problem):
        sample(logits, [bad], EOS)
    # The end of the sequence is kept, although min_tokens would ban it, too.
    ending = row([0], [2], allowed_token_ids=(2,), bad_sequences=((2, 2),), min_tokens=9)
    assert tokens_of(sample(logits, [ending], EOS)) == [1]


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]], dtype=torch.bfloat16)
    scheduled = row([0], [1], temperature=0.0, logit_bias={0: 50.0}, frequency_penalty=2.0, logprobs=2)
    (token,) = sample(logits, [scheduled], EOS)
    raw = logits[0].float().log_softmax(-1)
    assert token.token_id == 0
    assert token.logprob is not None
    assert token.logprob.token_id == 0
    assert token.logprob.logprob == pytest.approx(float(raw[0]), abs=1e-6)
    assert [token_id for token_id, _ in token.logprob.top] == [1, 2]
    assert [value for _, value in token.logprob.top] == pytest.approx(raw[[1, 2]].tolist(), abs=1e-6)


def test_logprobs_go_to_the_rows_that_request_them_in_the_requested_number() -> None:
    rows = [row(), row(logprobs=0), row(logprobs=3), row(logprobs=99)]
    output = sample(torch.randn(4, 8), rows, EOS)
    assert output[0].logprob is None
    assert [len(token.logprob.top) for token in output[1:] if token.logprob is not None] == [0, 3, 8]


@pytest.mark.parametrize("vocab_size", [300, 5003, 300_000])
def test_the_likeliest_tokens_are_sorted_with_ties_in_vocabulary_order(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, vocab_size) * 3).to(torch.bfloat16)  # many are equal
    logits[1] = 0.0
    logits[2, 7:] = float("-inf")
    logits[3, -1] = 50.0
    output = sample(logits, [row(logprobs=20, temperature=0.0)] * 5, EOS)
    expected = logits.float().log_softmax(-1)
    for scores, token in zip(expected, output, strict=True):
        assert token.logprob is not None
        found = [token_id for token_id, _ in token.logprob.top]
        values = torch.tensor([value for _, value in token.logprob.top])
        torch.testing.assert_close(values, scores.sort(descending=True).values[:20], rtol=1e-5, atol=1e-5)
        if vocab_size // 128 > 20:
            assert found == scores.sort(descending=True, stable=True).indices[:20].tolist()


def test_a_row_that_is_not_finite_fails_beside_rows_with_logprobs() -> None:
    logits = torch.randn(3, 5003)
    logits[1, 9] = float("nan")
    _, failed = sample_each(logits, [row(logprobs=3) for _ in range(3)], EOS)
    assert list(failed) == [1]


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0.0, float("nan")], [0.0, float("inf")], [float("-inf"), float("-inf")]])
def test_logits_that_are_not_finite_are_an_error(bad: list[float], temperature: float) -> None:
    with pytest.raises(InternalError, match=r"request r: .* no finite distribution"):
        sample(torch.tensor([bad]), [row(temperature=temperature)], EOS)


def test_rows_and_logits_must_match() -> None:
    with pytest.raises(InternalError, match="3 rows of logits for 1 sequences"):
        sample(torch.zeros(3, 4), [row()], EOS)
