"""One completion's tokens as text: detokenized piece by piece, cut at a stop string, log-probabilities spelt out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.outputs import Emitted, Output, TokenDelta
from penstock.spelling import Spelling
from penstock.stop import StopMatcher
from penstock.types import FinishReason, SamplingParams
from penstock.v1 import common_pb2


class CompletionText:
    """Feed it deltas in order; after `stopped` the completion is over, whatever its worker still sends."""

    def __init__(self, spelling: Spelling, sampling: SamplingParams) -> None:
        self._spelling = spelling
        self._detokenizer = spelling.detokenizer()
        self._matcher = StopMatcher(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._has_stops = bool(sampling.stop)
        self.num_tokens = 0
        self.ended = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._matcher.stopped

    def resume(self, index: int, before: Emitted) -> None:
        """Takes up what an earlier call has given out."""
        reason = FinishReason.STOP if before.finished else None
        self.feed(TokenDelta(index, list(before.token_ids), finish_reason=reason))

    def feed(self, delta: TokenDelta) -> Output:
        # Token by token where a stop string may come, so that the tokens behind it are left out however they arrived.
        if self._has_stops:
            text, num_used = self._feed_until_stop(delta)
        else:
            text, num_used = self._detokenizer.add(self._spoken(delta)), len(delta.token_ids)
        self.num_tokens += num_used
        ends = delta.finish_reason is not None
        if ends and not self.stopped:
            text += self._finish()
        self.ended = ends or self.stopped
        return Output(
            index=delta.index,
            text=text,
            token_ids=delta.token_ids[:num_used],
            logprobs=self._spell(delta.logprobs[:num_used]),
            finish_reason=FinishReason.STOP if self.stopped else delta.finish_reason,
            timing=delta.timing,
        )

    def _feed_until_stop(self, delta: TokenDelta) -> tuple[str, int]:
        spoken = self._spoken(delta)
        text = ""
        for position, token_id in enumerate(delta.token_ids):
            piece = self._detokenizer.add([token_id]) if position < len(spoken) else ""
            honoured = self.num_tokens + position + 1 > self._min_tokens
            text += self._matcher.add(piece) if honoured else piece
            if self.stopped:
                return text, position + 1
        return text, len(delta.token_ids)

    def _finish(self) -> str:
        rest = self._detokenizer.finish()
        return self._matcher.add(rest) + ("" if self._matcher.stopped else self._matcher.finish())

    def _spoken(self, delta: TokenDelta) -> Sequence[int]:
        """The tokens that have text: not the one that stopped the worker."""
        return delta.token_ids[:-1] if delta.finish_reason is FinishReason.STOP else delta.token_ids

    def _spell(self, logprobs: Iterable[common_pb2.TokenLogprob]) -> Sequence[common_pb2.TokenLogprob]:
        spelt = list(logprobs)
        for one in spelt:
            one.token = self._spelling.token_text(one.token_id)
            for other in one.top:
                other.token = self._spelling.token_text(other.token_id)
        return spelt
