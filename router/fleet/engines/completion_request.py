"""Writes a submission as the body of vLLM's /v1/completions and refuses fields that it cannot express. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import InvalidInput
from penstock.v1 import common_pb2, worker_pb2

_MAX_SEED = 1 << 63
_DECODE_ONLY = ("logprobs", "return_token_ids", "return_tokens_as_token_ids", "stream_options", "structured_outputs")
_GRAMMAR_FIELDS = {
    common_pb2.GRAMMAR_KIND_JSON_SCHEMA: "json",
    common_pb2.GRAMMAR_KIND_REGEX: "regex",
    common_pb2.GRAMMAR_KIND_STRUCTURAL_TAG: "structural_tag",
}


def completion_body(submit: worker_pb2.DecodeSubmit, model: str, cache_salt: str) -> dict[str, object]:
    """Returns the body for a streamed completion of token ids. An empty `cache_salt` lets any request share its pages.

    Raises InvalidInput if the submission needs a field that the engine's API lacks.
    """
    sampling = submit.sampling
    num_emitted = len(submit.token_ids) - submit.num_prompt_tokens
    _check(sampling, num_emitted)
    if submit.kv_hints.only:
        raise InvalidInput("kv_hints.only", "not available, since another engine serves this model; leave it out")
    body: dict[str, object] = {
        "model": model,
        "prompt": list(submit.token_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": sampling.max_tokens - num_emitted,
        "min_tokens": max(0, sampling.min_tokens - num_emitted),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.temperature:
        # A resumed completion must not reuse the random numbers of the tokens sampled before.
        body["seed"] = (sampling.seed + num_emitted) % _MAX_SEED
    body |= _lists(sampling)
    if sampling.HasField("grammar"):
        body["structured_outputs"] = {_GRAMMAR_FIELDS[sampling.grammar.kind]: sampling.grammar.source}
    if cache_salt:
        body["cache_salt"] = cache_salt
    return body


def _lists(sampling: common_pb2.SamplingParams) -> dict[str, object]:
    found: dict[str, object] = {}
    if sampling.HasField("logprobs"):
        found |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if sampling.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if values := getattr(sampling, name):
            found[name] = list(values)
    return found


def _check(sampling: common_pb2.SamplingParams, num_emitted: int) -> None:
    if sampling.HasField("prompt_logprobs"):
        raise InvalidInput("prompt_logprobs", "not available, since another engine serves this model; leave it out")
    if sampling.no_speculation:
        raise InvalidInput("no_speculation", "not available, since another engine serves this model; leave it out")
    if sampling.HasField("grammar"):
        kind = sampling.grammar.kind
        if kind not in _GRAMMAR_FIELDS:
            name = common_pb2.GrammarKind.Name(kind)
            raise InvalidInput(
                "grammar", f"{name} is not available, since another engine serves this model; give a JSON schema"
            )
        if num_emitted:
            raise InvalidInput(
                "grammar",
                "the engine was lost, and another one cannot resume output that a grammar constrains; "
                "send the request again",
            )


def refused_hints(hints: common_pb2.KvHints, worker_id: str) -> list[common_pb2.HintAnswer]:
    """Returns a refusal of every hint of a request: another engine decides on its own what its cache keeps."""
    named = {
        "session": hints.session,
        "fork_of": hints.fork_of,
        "pin_s": hints.pin_s,
        "priority": hints.priority,
        "demote": hints.demote,
        "prefetch": hints.HasField("prefetch_s"),
        "end_session": hints.end_session,
    }
    return [
        common_pb2.HintAnswer(
            hint=name,
            outcome=common_pb2.HINT_OUTCOME_REFUSED,
            reason="another engine serves this model, and its cache takes no hints",
            worker_id=worker_id,
        )
        for name, is_given in named.items()
        if is_given
    ]


def prefill_body(body: Mapping[str, object]) -> dict[str, object]:
    """Returns the body that makes a prefill engine compute the prompt's KV and keep it for another engine."""
    params = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {
        **{name: value for name, value in body.items() if name not in _DECODE_ONLY},
        "stream": False,
        "max_tokens": 1,
        "min_tokens": 0,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **params},
    }
