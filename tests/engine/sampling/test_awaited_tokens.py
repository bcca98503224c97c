"""Tests that rows whose last token the host does not know yet are sampled as if it did: counts and bans follow the
device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.sampling.row_params import SamplingRows
from engine.sampling.sampler import sample_step
from engine.sampling.step_sampling import StepSampling
from engine.step.sequence import Sequence
from penstock.types import RequestId, SamplingParams

VOCAB_SIZE = 40
EOS = frozenset({1})
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5, "temperature": 0.0},
    {"presence_penalty": 1.25},
    {"frequency_penalty": 0.7, "temperature": 0.0, "logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.9, "logit_bias": {3: 4.0, 99: 9.0}},
    {"bad_sequences": ((3,), (4, 5), (6, 7, 8), (3, 3), (9, 9, 9, 9), (55, 4))},
    {"bad_sequences": ((4, 5), (6, 5)), "temperature": 0.0, "repetition_penalty": 2.0},
    {"min_tokens": 4, "stop_token_ids": (2, 3)},
    {"allowed_token_ids": (5, 6, 7, 8), "frequency_penalty": 2.0},
    {"logprobs": 0},
]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_equal_those_of_a_host_that_knows_the_text(seed: int) -> None:
    """Each step takes the previous step's tokens from the device; the host learns them one step later."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kinds = [KINDS[place] for place in rng.integers(0, len(KINDS), 9)]
    kinds = KINDS if seed == 0 else kinds
    params = [SamplingParams(max_tokens=99, seed=seed * 100 + place, **kind) for place, kind in enumerate(kinds)]
    prompts = [rng.integers(0, 12, rng.integers(1, 9)).tolist() for _ in kinds]

    def start() -> list[Sequence]:
        return [
            Sequence(RequestId(str(place)), prompt.copy(), len(prompt), sampling, b"salt")
            for place, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
        ]

    known, ahead, late = start(), start(), [False] * len(kinds)
    awaited: torch.Tensor | None = None
    for _ in range(30):
        logits = torch.randn(len(kinds), VOCAB_SIZE)
        logits[:, :10] += 2.0  # the same few tokens repeat
        wanted = sample_step(logits, StepSampling.of(known, VOCAB_SIZE, EOS))
        rows = np.flatnonzero(late)
        columns = SamplingRows.of(known)
        sampling = StepSampling.at(columns, dict(enumerate(ahead)), VOCAB_SIZE, EOS, rows if len(rows) else None)
        found = sample_step(logits, sampling, awaited=None if awaited is None else awaited[torch.from_numpy(rows)])
        assert torch.equal(found.token_ids_R, wanted.token_ids_R)
        if wanted.logprobs is not None:
            assert found.logprobs is not None
            token_ids = wanted.token_ids_R.tolist()
            assert found.logprobs.by_row(token_ids) == wanted.logprobs.by_row(token_ids)
        for place, token_id in enumerate(wanted.token_ids_R.tolist()):
            if late[place]:
                ahead[place].token_ids.append(known[place].token_ids[-1])
            known[place].token_ids.append(token_id)
            late[place] = bool(rng.integers(4))  # sometimes the host knows all of them
            if not late[place]:
                ahead[place].token_ids.append(token_id)
        awaited = wanted.token_ids_R


def test_a_text_read_token_by_token_counts_like_one_read_at_once() -> None:
    """A sequence is read at once when it migrates to another worker."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=99, repetition_penalty=1.5, frequency_penalty=0.25, temperature=0.0)
    grown = Sequence(RequestId("r"), [3, 3, 50], 3, sampling, b"salt")
    for length in range(200):
        logits = torch.randn(1, 300)
        moved = Sequence(RequestId("r"), list(grown.token_ids), 3, sampling, b"salt")
        tokens = [sample_step(logits, StepSampling.of([sequence], 300, EOS)).token_ids_R for sequence in (grown, moved)]
        assert torch.equal(*tokens), length
        grown.token_ids.append(int(rng.integers(0, 300)))
        if length % 7 == 0:
            grown.token_ids.append(9)
