"""Lists the unsupported fields of OpenAI-compatible bodies: harmless ones, which are ignored, and refused ones. Pure.

Each field is supported (the bodies in `router.api.openai.requests` declare it), refused by name, or harmless, so that
no field that would change the answer is ignored. docs/openai.md lists the same names; a test compares both with the
fields of OpenAI, vLLM and SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from penstock.errors import InvalidInput

# Hints and annotations of the client, which do not change the answer.
HARMLESS = frozenset(
    {
        "custom_labels",
        "metadata",
        "prediction",  # a draft that may speed up an answer
        "prompt_cache_options",
        "safety_identifier",
    }
)
# OpenAI's client adds `parsed` and `parsed_arguments` to an answer and sends them back with it.
HARMLESS_IN_MESSAGES = frozenset({"annotations", "cache_control", "parsed", "prompt_cache_breakpoint", "refusal"})
HARMLESS_IN_TOOLS = frozenset({"cache_control", "index", "parsed_arguments"})  # in offered tools and in tool calls

# Fields that would change the answer, each with the values that change nothing and are allowed. So is null.
REFUSED: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (0, 1),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "guided_decoding_backend": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (),
    "extra_key": (),
    "grammar": (),
    "images_config": (),
    "input_ids": (),
    "lora_path": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "no_stop_trim": (False,),
    "return_cached_tokens_details": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (True,),
    "return_hidden_states": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_meta_info": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "return_spec_tokens_details": (False,),
    "routed_dp_rank": (),
    "routed_experts_start_len": (0,),
    "sampling_logprobs_mode": (),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": (),
    "stream_reasoning": (True,),
    "task": (),
    "thinking": (),
    "use_audio_in_video": (False,),
    "video_config": (),
    "watermark": (),
}
REFUSED_IN_MESSAGES: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
}


def check_fields(
    extra: Mapping[str, Any] | None,
    prefix: str = "",
    harmless: Set[str] = HARMLESS,
    refused: Mapping[str, tuple[object, ...]] = REFUSED,
) -> None:
    """Checks the unsupported fields (`extra`) of a body, or of the object in it that `prefix` names.

    Raises InvalidInput for the first field that is refused or unknown.
    """
    for name, value in (extra or {}).items():
        if value is None or name in harmless:
            continue
        field = prefix + name[:100]
        if name not in refused:
            raise InvalidInput(field, "is not a field of this API; leave it out")
        if not any(_is_same(value, neutral) for neutral in refused[name]):
            raise InvalidInput(field, f"= {_json_start(value)} is not supported; leave it out")


def _is_same(value: object, neutral: object) -> bool:
    """Compares as JSON does: true differs from 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _json_start(value: object) -> str:
    start = ""
    for piece in json.JSONEncoder().iterencode(value):
        start += piece
        if len(start) >= 100:
            break
    return start[:100]
