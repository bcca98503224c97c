"""Tests when and why a generation ends."""

from __future__ import annotations

from typing import Any

import pytest

from engine.step.finish import finish_reason
from engine.step.sequence import Sequence
from penstock.types import FinishReason, RequestId, SamplingParams

EOS = frozenset({1, 2})


def finish(output: list[int], context_length: int = 100, **sampling: Any) -> FinishReason | None:
    params = SamplingParams(**{"max_tokens": 50, **sampling})
    return finish_reason(Sequence(RequestId("r"), [9, 1, *output], 2, params, b""), EOS, context_length)


@pytest.mark.parametrize(
    ("output", "sampling", "expected"),
    [
        ([], {}, None),  # an eos at the prompt's end ends nothing
        ([5], {}, None),
        ([5, 1], {}, FinishReason.STOP),
        ([2], {}, FinishReason.STOP),
        ([1, 5], {}, None),  # only the last token counts
        ([1], {"ignore_eos": True}, None),
        ([7], {"stop_token_ids": (7,)}, FinishReason.STOP),
        ([7], {"stop_token_ids": (7,), "ignore_eos": True}, FinishReason.STOP),
        ([1], {"stop_token_ids": (1,), "ignore_eos": True}, FinishReason.STOP),
        ([5, 1], {"min_tokens": 2}, None),
        ([5, 5, 1], {"min_tokens": 2}, FinishReason.STOP),
        ([7], {"min_tokens": 1, "stop_token_ids": (7,)}, None),
        ([5, 5], {"max_tokens": 2}, FinishReason.LENGTH),
        ([5, 1], {"max_tokens": 2}, FinishReason.STOP),
        ([5, 1], {"max_tokens": 2, "ignore_eos": True}, FinishReason.LENGTH),
        ([5, 1], {"max_tokens": 2, "min_tokens": 2}, FinishReason.LENGTH),
    ],
)
def test_finish_reason(output: list[int], sampling: dict[str, Any], expected: FinishReason | None) -> None:
    assert finish(output, **sampling) is expected


def test_the_context_ends_a_sequence() -> None:
    assert finish([5, 5], context_length=5) is None
    assert finish([5, 5, 5], context_length=5) is FinishReason.LENGTH
    assert finish([5, 5, 1], context_length=5) is FinishReason.STOP
