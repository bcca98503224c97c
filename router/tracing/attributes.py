"""Makes the attributes of a request's spans: OpenTelemetry's for generative AI, and `penstock.*` for the rest. Pure.

No attribute holds a prompt, an output, a tenant, or an error's message, which may quote the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.policy.interface import PairChoice
from router.tracing.request_trace import RequestTrace, TracedRequest
from router.tracing.stages import EndedCompletion

Attributes = dict[str, str | bool | int | float | Sequence[str]]

_PREDICTED_S = ("queue_s", "prefill_s", "transfer_s", "decode_queue_s", "total_s")


def request_attributes(trace: RequestTrace, model: str) -> Attributes:
    """Describes a whole request."""
    found: Attributes = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }
    if trace.request is not None:
        found |= _prepared_attributes(trace.request)
    if trace.error:
        found["error.type"] = trace.error
    if trace.completions:
        ended = sorted(trace.completions, key=lambda each: each.index)
        found["gen_ai.response.finish_reasons"] = [each.finish_reason.value for each in ended]
        found["gen_ai.usage.output_tokens"] = sum(each.num_tokens for each in ended)
        found["gen_ai.usage.cache_read.input_tokens"] = ended[0].timing.cached_tokens
        found["gen_ai.response.time_to_first_chunk"] = min(each.timing.first_token_ms for each in ended) / 1e3
    return found


def _prepared_attributes(request: TracedRequest) -> Attributes:
    sampling = request.sampling
    found: Attributes = {
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": len(request.token_ids),
        "penstock.lane": request.lane.value,
        "penstock.model_revision": request.model_revision,
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.n > 1:
        found["gen_ai.request.choice.count"] = sampling.n
    if sampling.frequency_penalty:
        found["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        found["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    return found


def choice_attributes(choices: Sequence[PairChoice]) -> Attributes:
    """Describes the first choice of workers, with its predicted times."""
    if not choices:
        return {}
    score = choices[0].score
    return {
        "penstock.prefill.worker": score.prefill or score.decode,
        "penstock.decode.worker": score.decode,
        **{f"penstock.predicted.{name}": round(getattr(score, name), 6) for name in _PREDICTED_S},
    }


def completion_attributes(ended: EndedCompletion) -> Attributes:
    """Describes a completion by the report of its last worker."""
    timing = ended.timing
    found: Attributes = {
        "penstock.completion.index": ended.index,
        "penstock.finish_reason": ended.finish_reason.value,
        "penstock.prefill.worker": timing.prefill_worker,
        "penstock.cached_tokens": timing.cached_tokens,
        "penstock.pages_moved": timing.pages_moved,
        "penstock.preemptions": timing.num_preemptions,
        "penstock.migrations": timing.num_migrations,
        "penstock.redispatches": timing.num_redispatches,
    }
    if timing.prices:
        found["penstock.prefill.place"] = timing.prices[0].place
    if timing.num_migrations:
        found["penstock.migration_pause_s"] = timing.migration_pause_ms / 1e3
    return found
