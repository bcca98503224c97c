"""Turns one completion's tokens into text: detokenized incrementally, cut at a stop string, with token texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.text.completions import CompletionDelta, Emitted, Output
from penstock.text.spelling import Spelling
from penstock.text.stop_strings import StopMatcher, StopStrings
from penstock.types import FinishReason, SamplingParams
from penstock.v1 import common_pb2


class CompletionText:
    """Takes deltas in order. Once `stopped`, the completion is over even if its worker sends more."""

    def __init__(self, spelling: Spelling, sampling: SamplingParams, stops: StopStrings) -> None:
        """`stops` are the stop strings of `sampling`, compiled once for all completions of the request."""
        self._spelling = spelling
        self._detokenizer = spelling.detokenizer(keep_special_tokens=sampling.keep_special_tokens)
        self._matcher = StopMatcher(stops, includes_match=sampling.include_stop)
        self._includes_stop = sampling.include_stop
        self._min_tokens = sampling.min_tokens
        self._has_stops = bool(sampling.stop)
        self.num_tokens = 0
        self.ended = False

    @property
    def stopped(self) -> bool:
        """Returns whether a stop string was found."""
        return self._matcher.stopped

    def resume(self, before: Emitted) -> None:
        """Continues after the tokens that an earlier call has streamed. That call would have ended at a stop string, so
        only the tail can still be part of one, and all but the tail is only detokenized.
        """
        self.num_tokens = len(before.token_ids)
        self.ended = before.finished
        if not before.finished:
            self._detokenizer.add(before.token_ids[: self._min_tokens])
            self._matcher.skip(self._detokenizer.add(before.token_ids[self._min_tokens :]))

    def feed(self, delta: CompletionDelta) -> Output:
        # With stop strings, tokens are added one by one, so that tokens after a match are left out even if they arrive
        # with it.
        if self._has_stops:
            text, num_used = self._feed_until_stop(delta)
        else:
            text, num_used = self._detokenizer.add(self._text_tokens(delta)), len(delta.token_ids)
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
            prompt_logprobs=self._spell(delta.prompt_logprobs),
            stop_string=self._matcher.matched,
            weight_version=delta.weight_version,
        )

    def _feed_until_stop(self, delta: CompletionDelta) -> tuple[str, int]:
        text_tokens = self._text_tokens(delta)
        text = ""
        for position, token_id in enumerate(delta.token_ids):
            piece = self._detokenizer.add([token_id]) if position < len(text_tokens) else ""
            honoured = self.num_tokens + position + 1 > self._min_tokens
            text += self._matcher.add(piece) if honoured else piece
            if self.stopped:
                return text, position + 1
        return text, len(delta.token_ids)

    def _finish(self) -> str:
        rest = self._detokenizer.finish()
        return self._matcher.add(rest) + ("" if self._matcher.stopped else self._matcher.finish())

    def _text_tokens(self, delta: CompletionDelta) -> Sequence[int]:
        """Returns the tokens that have text. The token that stopped the worker is left out, unless stops are
        included.
        """
        stops = delta.finish_reason is FinishReason.STOP and not self._includes_stop
        return delta.token_ids[:-1] if stops else delta.token_ids

    def _spell(self, logprobs: Iterable[common_pb2.TokenLogprob]) -> Sequence[common_pb2.TokenLogprob]:
        spelt = list(logprobs)
        for logprob in spelt:
            logprob.token = self._spelling.token_text(logprob.token_id)
            for alternative in logprob.top:
                alternative.token = self._spelling.token_text(alternative.token_id)
        return spelt
