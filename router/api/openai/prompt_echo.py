"""Adds a prompt's text (`echo`) and log-probabilities to the answer of an OpenAI-compatible call. No I/O.

`PromptEcho` puts a prompt before the first output of each of its choices. In OpenAI's format, the log-probability of
the first token is null, since no token precedes it; internally it is a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.text.completions import Output
from penstock.text.spelling import Spelling
from penstock.types import FinishReason
from penstock.v1 import common_pb2
from router.api.dialect import CallTotals, ChoiceDelta, Json
from router.prepared_request import PreparedRequest


class PromptEcho:
    """Adds the prompts of one call to its deltas."""

    def __init__(self, texts: Sequence[str | None], spelling: Spelling, *, prompt_alone: bool) -> None:
        """`texts` has one entry for each prompt: None for a prompt of token ids. With `prompt_alone`, generated tokens
        are left out.
        """
        self._texts = texts
        self._spelling = spelling
        self._prompt_alone = prompt_alone
        self._requests: Sequence[PreparedRequest] = ()
        self._begun: set[int] = set()

    def begin(self, requests: Sequence[PreparedRequest]) -> None:
        """Receives the requests, one for each prompt, before any delta."""
        self._requests = requests

    def extended(self, delta: ChoiceDelta, *, with_logprobs: bool) -> ChoiceDelta:
        """Returns the delta, with its prompt put before it if it is the choice's first delta."""
        output = self._without_generated(delta.output) if self._prompt_alone else delta.output
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            rank = delta.choice // self._requests[0].sampling.n
            token_ids, text = self._requests[rank].token_ids, self._texts[rank]
            text = self._spelling.decode(token_ids) if text is None else text
            output = replace(output, text=text + output.text)
            if with_logprobs:
                token = self._spelling.token_text(token_ids[0])
                first = common_pb2.TokenLogprob(token_id=token_ids[0], logprob=math.nan, token=token)
                output = replace(output, logprobs=[first, *delta.output.prompt_logprobs, *output.logprobs])
        return replace(delta, output=output)

    def _without_generated(self, output: Output) -> Output:
        reason = None if output.finish_reason is None else FinishReason.LENGTH
        return replace(output, text="", token_ids=(), logprobs=(), finish_reason=reason)

    def counted(self, totals: CallTotals) -> CallTotals:
        """Returns the totals without the generated tokens that are left out."""
        return replace(totals, completion_tokens=0) if self._prompt_alone else totals


def completion_logprobs(
    logprobs: Sequence[common_pb2.TokenLogprob],
    num_characters: int,
    name: Callable[[common_pb2.TokenLogprob | common_pb2.TopLogprob], str],
) -> Json:
    """Returns the log-probabilities of tokens in OpenAI's format.

    `num_characters` is the offset at which the text of the first token begins; `name` returns the name of a token.
    """
    offsets = []
    for token in logprobs:
        offsets.append(num_characters)
        num_characters += len(token.token)
    return {
        "tokens": [*map(name, logprobs)],
        "token_logprobs": [None if math.isnan(token.logprob) else token.logprob for token in logprobs],
        "top_logprobs": [
            None if math.isnan(token.logprob) else {name(other): other.logprob for other in token.top}
            for token in logprobs
        ],
        "text_offset": offsets,
    }


def prompt_logprobs_json(logprobs: Sequence[common_pb2.TokenLogprob]) -> list[Json | None]:
    """Returns the log-probabilities of a prompt in vLLM's format: null for the first token, then for each token its own
    and those of the likeliest tokens, by id.

    A token that is not among the likeliest ones has no rank.
    """
    found: list[Json | None] = [None]
    for token in logprobs:
        entry = {str(token.token_id): _ranked(token, None)}
        entry |= {str(other.token_id): _ranked(other, rank) for rank, other in enumerate(token.top, 1)}
        found.append(entry)
    return found


def _ranked(token: common_pb2.TokenLogprob | common_pb2.TopLogprob, rank: int | None) -> Json:
    return {"logprob": token.logprob, "rank": rank, "decoded_token": token.token}
