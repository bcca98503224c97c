"""Draws on the device are those of the host: the same tokens, whoever else is in the batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from engine.counter_random import uniform
from engine.draws import Draws
from engine.kernels.sample import draw_tokens
from engine.sampler import sample, sample_on_device
from engine.sequence import ScheduledSequence, Sequence
from penstock.errors import InternalError
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
draw_small = functools.partial(draw_tokens, chunk=256)  # a few chunks of a small vocabulary


def make_rows(kinds: list[dict[str, Any]], position: int) -> list[ScheduledSequence]:
    """Seeds of all 64 bits."""
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
    return sample_on_device(logits.to(DEVICE), [row.sequence for row in rows], (3,), draw_small)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_draw_gives_the_token_of_the_host(dtype: torch.dtype) -> None:
    """Many ties in bf16; a vocabulary that fills no chunk."""
    torch.manual_seed(0)
    logits = (torch.randn(len(KINDS), 300) * 3).to(dtype)
    rows = make_rows(KINDS, 7)
    assert on_device(logits, rows) == on_host(logits, rows)


def test_plain_draws_follow_seed_and_position_alone() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 500).repeat(12, 1)
    together = [row for position in (1, 2, 400) for row in make_rows([{"temperature": 1.5}] * 4, position)]
    tokens = on_device(logits, together)
    assert tokens == on_host(logits, together)
    assert len(set(tokens)) > 8
    assert on_device(logits[:1], together[7:8]) == tokens[7:8]


def test_edited_rows_are_drawn_as_edited() -> None:
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


def test_the_first_of_equals_is_the_likeliest() -> None:
    logits = torch.zeros(2, 700)
    logits[1, [300, 650]] = 4.0  # in different chunks
    assert on_device(logits, make_rows([{"temperature": 0.0}] * 2, 3)) == [0, 300]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_distribution_is_an_error(bad: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 7] = bad
    with pytest.raises(InternalError, match="request 1: its logits hold no finite distribution"):
        on_device(logits, make_rows([{"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.5}], 3))


def test_uniforms_are_those_of_the_host() -> None:
    """Seen through a flat distribution: token n of 256 is drawn where the uniform lies in [n, n + 1) / 256."""
    seeds = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x123456789ABCDEF0]
    samplings = [SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in seeds]
    for position in (0, 131071):
        draws = Draws.of(samplings, [position] * len(seeds), 256, DEVICE)
        tokens, totals = draw_small(torch.zeros(len(seeds), 256, device=DEVICE), draws)
        assert tokens.tolist() == [int(uniform(seed, position) * 256) for seed in seeds]
        assert totals.tolist() == [256.0] * len(seeds)


def test_what_no_row_asks_for_is_not_computed() -> None:
    greedy, plain = SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, temperature=1.0)
    limited = SamplingParams(max_tokens=1, temperature=1.0, top_k=4, top_p=0.5)
    cases = {(False, False, False): [greedy], (True, False, False): [greedy, plain], (True, True, True): [limited]}
    for expected, samplings in cases.items():
        draws = Draws.of(samplings, [1] * len(samplings), 100, DEVICE)
        assert (draws.some_draw, draws.some_top_k, draws.some_top_p) == expected
    assert not Draws.of([limited], [1], 4, DEVICE).some_top_k


def test_wrong_tensors_are_refused_by_name() -> None:
    draws = Draws.of([SamplingParams(max_tokens=1)], [1], 50, DEVICE)
    with pytest.raises(ValueError, match=r"temperature_B has shape \(1,\); expected \(2,\)"):
        draw_tokens(torch.zeros(2, 50, device=DEVICE), draws)
    with pytest.raises(ValueError, match="the last dense"):
        draw_tokens(torch.zeros(50, 2, device=DEVICE).T[:1], draws)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_on_a_gpu(dtype: torch.dtype) -> None:
    """Exponentials of the two devices differ in the last bit: at most one of some hundred draws may."""
    torch.manual_seed(3)
    rows = make_rows(KINDS * 40, 9)
    logits = (torch.randn(len(rows), 128_256) * 3).to(dtype)
    tokens = sample_on_device(logits.to(DEVICE), [row.sequence for row in rows], (), draw_tokens)
    differing = sum(ours != theirs for ours, theirs in zip(tokens, on_host(logits, rows), strict=True))
    assert differing <= 1
