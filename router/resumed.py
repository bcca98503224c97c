"""Requests that go on where an earlier call of theirs broke off: what the caller says it has got, checked. Pure."""

from __future__ import annotations

from penstock.errors import InvalidInput
from penstock.outputs import Emitted
from penstock.types import SamplingParams
from penstock.v1 import inference_pb2


def check_emitted(
    request: inference_pb2.GenerateRequest, sampling: SamplingParams, vocab_size: int
) -> dict[int, Emitted]:
    """By completion. Raises InvalidInput that names the entry at fault."""
    if request.emitted and not request.sampling.HasField("seed") and not sampling.greedy:
        raise InvalidInput("sampling.seed", "is not given; only the seed that drew what was emitted can go on with it")
    found: dict[int, Emitted] = {}
    for number, one in enumerate(request.emitted):
        name = f"emitted[{number}]"
        if one.index >= sampling.n:
            raise InvalidInput(f"{name}.index", f"is {one.index}; there are {sampling.n} completions, counted from 0")
        if one.index in found:
            raise InvalidInput(f"{name}.index", f"is {one.index} once more; give each completion once")
        highest = max(one.token_ids, default=0)
        if highest >= vocab_size:
            raise InvalidInput(f"{name}.token_ids", f"hold {highest}; the vocabulary ends at {vocab_size - 1}")
        if len(one.token_ids) >= sampling.max_tokens and not one.finished:
            raise InvalidInput(
                f"{name}.token_ids",
                f"hold {len(one.token_ids)} tokens and max_tokens is {sampling.max_tokens}; there is none to come",
            )
        found[one.index] = Emitted(tuple(one.token_ids), one.finished)
    if len(found) == sampling.n and all(one.finished for one in found.values()):
        raise InvalidInput("emitted", "says that every completion has finished; there is nothing to go on with")
    return found
