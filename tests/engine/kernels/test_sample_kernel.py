"""Tests that the sampling kernel takes the same tokens as the host in any batch."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

from engine.kernels.triton.sample import sample_tokens
from engine.sampling.counter_random import uniform
from engine.sampling.row_params import SamplingTensors
from engine.sampling.sampler import sample, sample_each
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.types import RequestId, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 1e-40},
    {"temperature": 1.0, "top_p": 0.9999999},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 5.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_k": 5000},
]
sample_small = functools.partial(sample_tokens, chunk=256)  # makes a small vocabulary take a few chunks


def make_rows(kinds: list[dict[str, Any]], position: int) -> list[ScheduledSequence]:
    """Makes a row of each kind, with seeds that use all 64 bits."""
    return [
        ScheduledSequence(
            Sequence(
                RequestId(str(row)),
                [5] * position,
                position,
                SamplingParams(max_tokens=5, seed=(row + 1) * 0x9E3779B97F4A7C15 % (1 << 64), **kind),
                b"",
            ),
            position,
        )
        for row, kind in enumerate(kinds)
    ]


def on_host(logits: torch.Tensor, rows: list[ScheduledSequence]) -> list[int]:
    return [token.token_id for token in sample(logits.cpu(), rows, (3,))]


def on_device(logits: torch.Tensor, rows: list[ScheduledSequence]) -> list[int]:
    with mock.patch("engine.sampling.sampler._kernel_for", return_value=sample_small):
        return [token.token_id for token in sample(logits.to(DEVICE), rows, (3,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_sampling_gives_the_hosts_token(dtype: torch.dtype) -> None:
    """Covers many ties in bf16, and a vocabulary that does not fill its last chunk."""
    torch.manual_seed(0)
    logits = (torch.randn(len(KINDS), 300) * 3).to(dtype)
    rows = make_rows(KINDS, 7)
    assert on_device(logits, rows) == on_host(logits, rows)


def test_samples_depend_only_on_seed_and_position() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 500).repeat(12, 1)
    together = [row for position in (1, 2, 400) for row in make_rows([{"temperature": 1.5}] * 4, position)]
    tokens = on_device(logits, together)
    assert tokens == on_host(logits, together)
    assert len(set(tokens)) > 8
    assert on_device(logits[:1], together[7:8]) == tokens[7:8]


def test_rows_with_penalties_and_biases_are_sampled_as_on_the_host() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 300)
    likeliest = int(logits[0].argmax())
    edits = [
        {"temperature": 0.0, "logit_bias": {likeliest: -100.0}},
        {"temperature": 1.0, "repetition_penalty": 1.8, "min_tokens": 2},
        {"temperature": 0.0},
    ]
    rows = make_rows(edits, 4)
    before = logits.clone()
    tokens = on_device(logits, rows)
    assert tokens == on_host(logits, rows)
    assert tokens[0] != likeliest
    assert torch.equal(logits, before)


def test_the_first_of_equal_logits_is_the_likeliest() -> None:
    logits = torch.zeros(2, 700)
    logits[1, [300, 650]] = 4.0  # in different chunks
    assert on_device(logits, make_rows([{"temperature": 0.0}] * 2, 3)) == [0, 300]


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.5}])
@pytest.mark.parametrize("bad", [{7: float("nan")}, {7: float("inf")}, {256: float("nan")}, "nan", "-inf"])
def test_a_row_without_a_distribution_fails_alone(bad: dict[int, float] | str, kind: dict[str, Any]) -> None:
    """The token must still be in the vocabulary: with run-ahead it is embedded before the failure is known."""
    logits = torch.randn(3, 300)
    logits[1] = float(bad) if isinstance(bad, str) else logits[1]
    for place, value in bad.items() if isinstance(bad, dict) else ():
        logits[1, place] = value
    rows = make_rows([{"temperature": 1.0}, kind, {"temperature": 0.0}], 3)
    wanted, failed_on_host = sample_each(logits, rows, (3,))
    with mock.patch("engine.sampling.sampler._kernel_for", return_value=sample_small):
        tokens, failed = sample_each(logits.to(DEVICE), rows, (3,))
    for errors in (failed_on_host, failed):
        assert {place: error.message for place, error in errors.items()} == {
            1: "request 1: its logits hold no finite distribution to sample from"
        }
    assert [tokens[place].token_id for place in (0, 2)] == [wanted[place].token_id for place in (0, 2)]
    assert all(0 <= token.token_id < 300 for token in tokens)


def test_greedy_rows_alone_are_checked_too() -> None:
    logits = torch.full((2, 300), float("nan"))
    logits[0] = torch.arange(300.0)
    params = SamplingTensors.of([SamplingParams(max_tokens=1, temperature=0.0)] * 2, [1, 1], 300, DEVICE)
    tokens, totals = sample_small(logits.to(DEVICE), params)
    assert tokens[0] == 299
    assert 0 <= tokens[1] < 300
    assert totals.tolist() == [1.0, 0.0]


def test_uniforms_equal_the_hosts() -> None:
    """From a flat distribution, token n of 256 is sampled if the uniform lies in [n, n + 1) / 256."""
    seeds = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x123456789ABCDEF0]
    samplings = [SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in seeds]
    for position in (0, 131071):
        params = SamplingTensors.of(samplings, [position] * len(seeds), 256, DEVICE)
        tokens, totals = sample_small(torch.zeros(len(seeds), 256, device=DEVICE), params)
        assert tokens.tolist() == [int(uniform(seed, position) * 256) for seed in seeds]
        assert totals.tolist() == [256.0] * len(seeds)


def test_filters_that_no_row_uses_are_not_computed() -> None:
    greedy, plain = SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, temperature=1.0)
    limited = SamplingParams(max_tokens=1, temperature=1.0, top_k=4, top_p=0.5)
    cases = {(False, False, False): [greedy], (True, False, False): [greedy, plain], (True, True, True): [limited]}
    for expected, samplings in cases.items():
        params = SamplingTensors.of(samplings, [1] * len(samplings), 100, DEVICE)
        assert (params.any_random, params.any_top_k, params.any_top_p) == expected
    assert not SamplingTensors.of([limited], [1], 4, DEVICE).any_top_k


def test_wrong_tensors_are_refused() -> None:
    params = SamplingTensors.of([SamplingParams(max_tokens=1)], [1], 50, DEVICE)
    with pytest.raises(ValueError, match=r"temperature_B has shape \(1,\); expected \(2,\)"):
        sample_tokens(torch.zeros(2, 50, device=DEVICE), params)
    with pytest.raises(ValueError, match="the last dense"):
        sample_tokens(torch.zeros(50, 2, device=DEVICE).T[:1], params)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_on_a_gpu(dtype: torch.dtype) -> None:
    """Exponentials of the two devices differ in the last bit: at most one of several hundred samples may differ."""
    torch.manual_seed(3)
    rows = make_rows(KINDS * 40, 9)
    logits = (torch.randn(len(rows), 128_256) * 3).to(dtype)
    tokens = [token.token_id for token in sample(logits.to(DEVICE), rows, (3,))]
    differing = sum(ours != theirs for ours, theirs in zip(tokens, on_host(logits, rows), strict=True))
    assert differing <= 1
