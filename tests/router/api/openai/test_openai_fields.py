"""Tests that every field of a body that could change the answer is obeyed, refused, or harmless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from router.api.openai.fields import HARMLESS, HARMLESS_IN_MESSAGES, REFUSED, REFUSED_IN_MESSAGES
from router.api.openai.requests import ChatBody, CompletionBody, parse_body

DOCS = Path(__file__).resolve().parents[4] / "docs" / "openai.md"

# Fields of other servers' requests, from the sources of their packages: openai 3.57, vllm 0.33, sglang 0.5.23.
OPENAI_COMPLETION = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
    stream stream_options suffix temperature top_p user
"""
OPENAI_CHAT = """
    messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
    max_tokens metadata modalities moderation n parallel_tool_calls prediction presence_penalty
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
    safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
    top_logprobs top_p user verbosity web_search_options
"""
VLLM_BOTH = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words
    add_special_tokens response_format structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval return_weight_versions mm_payload
"""
VLLM_COMPLETION = "prompt_embeds"
VLLM_CHAT = """
    reasoning_effort thinking_token_budget include_reasoning echo add_generation_prompt continue_final_message
    documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
"""
SGLANG_BOTH = """
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_spec_tokens_details return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty
    stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params
    custom_params custom_logit_processor bootstrap_host bootstrap_port bootstrap_room data_parallel_rank
    watermark images_config mm_processor_kwargs rid extra_key cache_salt priority routed_dp_rank
    disagg_prefill_dp_rank
"""
SGLANG_COMPLETION = "json_schema custom_labels"
SGLANG_CHAT = """
    return_prompt_token_ids return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext
    return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs
    return_flat_raw_top_logprobs_b64 thinking task separate_reasoning stream_reasoning continue_final_message
    chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video video_config input_ids
"""

PEERS = {
    CompletionBody: " ".join((OPENAI_COMPLETION, VLLM_BOTH, VLLM_COMPLETION, SGLANG_BOTH, SGLANG_COMPLETION)).split(),
    ChatBody: " ".join((OPENAI_CHAT, VLLM_BOTH, VLLM_CHAT, SGLANG_BOTH, SGLANG_CHAT)).split(),
}
PLAIN = {CompletionBody: {"prompt": "a"}, ChatBody: {"messages": [{"role": "user", "content": "a"}]}}


def refused_by(kind: type) -> dict[str, tuple[object, ...]]:
    """Returns what a call refuses; a field that only the other call obeys is in the table too."""
    return {name: neutrals for name, neutrals in REFUSED.items() if name not in kind.model_fields}


def parse(kind: type, **fields: object) -> CompletionBody | ChatBody:
    return parse_body(kind, json.dumps({**PLAIN[kind], **fields}).encode(), LimitsConfig())


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_every_field_of_a_peer_is_obeyed_refused_or_harmless(kind: type) -> None:
    for name in PEERS[kind]:
        kinds = (name in kind.model_fields, name in refused_by(kind), name in HARMLESS)
        assert sum(kinds) == 1, f"{name}: obeyed, refused, harmless are {kinds}"


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_a_field_is_refused_unless_its_value_asks_for_nothing(kind: type) -> None:
    for name, neutrals in refused_by(kind).items():
        with pytest.raises(InvalidInput, match=rf"^{name} = .* is not supported; leave it out"):
            parse(kind, **{name: {"asks": "for something"}})
        for neutral in (None, *neutrals):
            parse(kind, **{name: neutral})


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_harmless_fields_are_accepted_and_unknown_ones_refused(kind: type) -> None:
    parse(kind, **{name: {"any": "value"} for name in HARMLESS})
    with pytest.raises(InvalidInput, match=r"^mirostat: is not a field of this API; leave it out"):
        parse(kind, mirostat=2)
    with pytest.raises(InvalidInput, match=r"^stream_options\.pace: is not a field"):
        parse(kind, stream_options={"include_usage": True, "include_obfuscation": False, "pace": 1})


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_a_request_can_turn_speculation_off_and_not_on(kind: type) -> None:
    assert parse(kind, no_speculation=True).sampling().no_speculation
    assert not parse(kind, no_speculation=False).sampling().no_speculation
    with pytest.raises(InvalidInput, match=r"^no_speculation: is 2; give true or false"):
        parse(kind, no_speculation=2)
    with pytest.raises(InvalidInput, match=r"^speculation: is not a field of this API; leave it out"):
        parse(kind, speculation=True)


def test_true_and_one_are_different_values() -> None:
    parse(CompletionBody, best_of=1)
    with pytest.raises(InvalidInput, match="best_of = true is not supported"):
        parse(CompletionBody, best_of=True)
    with pytest.raises(InvalidInput, match="echo = 0 is not supported"):
        parse(ChatBody, echo=0)


def test_fields_of_messages_and_parts_are_not_ignored() -> None:
    user = {"role": "user", "content": "a"}
    for name in REFUSED_IN_MESSAGES:
        with pytest.raises(InvalidInput, match=rf"^messages\[1\]\.{name} = \[1\] is not supported"):
            parse(ChatBody, messages=[user, {"role": "assistant", "content": "b", name: [1]}])
    harmless = dict.fromkeys(HARMLESS_IN_MESSAGES, "x")
    parse(ChatBody, messages=[user | harmless, {"role": "assistant", "content": "b", "audio": None}])
    parse(ChatBody, messages=[{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}])
    with pytest.raises(InvalidInput, match=r"^messages\[0\]\.content\[1\]\.weight: is not a field"):
        parse(ChatBody, messages=[{"role": "user", "content": [{"type": "text"}, {"type": "text", "weight": 2}]}])


def test_a_parsed_answer_can_be_sent_back_as_openais_client_does() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    answer = {"role": "assistant", "content": None, "parsed": None, "tool_calls": [{"id": "1", "function": function}]}
    user = {"role": "user", "content": "a"}
    [request] = parse(ChatBody, messages=[user, answer, user | {"parsed": {"a": 1}}]).requests("id")
    assert request.messages[1].tool_calls[0].arguments == "{}"


def test_new_values_of_openais_client_are_accepted() -> None:
    assert parse(ChatBody, service_tier="fast").lane is parse(ChatBody, service_tier="priority").lane is not None
    [request] = parse(ChatBody, reasoning_effort="max").requests("id")
    assert json.loads(request.chat.template_arguments)["reasoning_effort"] == "max"


def test_text_parts_are_joined_by_line_feeds() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    [request] = parse(ChatBody, messages=[{"role": "user", "content": parts}]).requests("id")
    assert request.messages[0].content == "one\ntwo"


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_prompt_log_probabilities_can_be_streamed(kind: type) -> None:
    for stream in (False, True):
        [request] = parse(kind, prompt_logprobs=1, stream=stream).requests("id")
        assert request.sampling.prompt_logprobs == 1


def test_an_echo_has_as_many_alternatives_as_the_output() -> None:
    [request] = parse(CompletionBody, echo=True, logprobs=3, max_tokens=0).requests("id")
    assert (request.sampling.prompt_logprobs, request.sampling.logprobs, request.sampling.max_tokens) == (3, 3, 1)
    [request] = parse(CompletionBody, echo=True, max_tokens=2).requests("id")
    assert not request.sampling.HasField("prompt_logprobs")


def test_the_most_specific_session_name_is_used() -> None:
    assert parse(ChatBody, session_id="s", prompt_cache_key="k", user="u").session == "s"
    assert parse(ChatBody, prompt_cache_key="k", user="u").session == "k"
    assert parse(ChatBody, user="u").session == "u"
    assert parse(ChatBody).session == ""


def test_the_docs_list_the_same_fields() -> None:
    page = DOCS.read_text()
    obeyed, rest = page.split("**Harmless**")
    harmless, refused = rest.split("**Refused**")
    for kind in (CompletionBody, ChatBody):
        for name in kind.model_fields:
            assert f"`{name}`" in obeyed, name
    for name in HARMLESS | HARMLESS_IN_MESSAGES:
        assert f"`{name}`" in harmless, name
    for name, neutrals in REFUSED.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in neutrals)
        assert f"| `{name}` | {values} |".replace("|  |", "| |") in refused, name
    for name in REFUSED_IN_MESSAGES:
        assert f"`{name}`" in refused, name
