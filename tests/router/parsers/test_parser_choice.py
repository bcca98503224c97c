"""Tests which formats are detected from a chat template, how they are named, and what a choice says of prompts and
tokens."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from router.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from router.parsers.parser_choice import choose_parsers

# Parts of each family's template: the lines that write calls and reasoning.
TEMPLATES = {
    "qwen2.5": ("<|im_start|>system <tool_call>\n{{ name }}</tool_call>", "hermes", None),
    "qwen3": ("<|im_start|> <tool_call> {{ '<think>\\n' + reasoning + '\\n</think>' }}", "hermes", "qwen3"),
    "qwen3-coder": ("<tool_call>\n<function=example>\n<parameter=p>\nvalue</parameter>", "qwen3_coder", None),
    "llama3.1": ('<|start_header_id|> Environment: ipython <|python_tag|> "parameters": ', "llama3_json", None),
    "llama3.2": ("<|start_header_id|> {{ '\"parameters\": ' }} <|eot_id|>", "llama3_json", None),
    "llama4": ("<|header_start|>assistant<|header_end|> <|python_start|>[", "pythonic", None),
    "mistral": ("[AVAILABLE_TOOLS] [TOOL_CALLS] [INST]", "mistral", None),
    "magistral": ("[TOOL_CALLS]{{ name }}[ARGS] [THINK]{{ t }}[/THINK]", "mistral", "mistral"),
    "deepseek-v3": (
        "<｜Assistant｜><｜tool▁call▁begin｜>function<｜tool▁sep｜> ```json <think>",
        "deepseek_v3",
        "deepseek_r1",
    ),
    "deepseek-v3.1": ("<｜Assistant｜></think> <｜tool▁call▁begin｜><｜tool▁sep｜>", "deepseek_v31", "deepseek_r1"),
    "glm-4.5": ("[gMASK]<sop> <tool_call> <arg_key> </arg_key> <think></think>", "glm45", "glm45"),
    "kimi-k2": ("<|im_middle|> <|tool_calls_section_begin|>", "kimi_k2", None),
    "kimi-k2-thinking": ("<|im_middle|> <|tool_calls_section_begin|> <think>", "kimi_k2", "kimi_k2"),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
    "gemma3": ("<start_of_turn>model", "gemma", None),
    "functiongemma": ("<start_of_turn> <start_function_call>call:", "gemma", None),
    "chatml": ("<|im_start|>{{ message.role }}", None, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_detected_from_the_template(name: str) -> None:
    template, tools, reasoning = TEMPLATES[name]
    choice = choose_parsers(template)
    assert (choice.tool_format, choice.reasoning_format) == (tools, reasoning)


def test_every_format_is_detected_in_some_template() -> None:
    assert {tools for _, tools, _ in TEMPLATES.values()} - {None} == set(TOOL_FORMATS)
    assert {reasoning for _, _, reasoning in TEMPLATES.values()} - {None} == set(REASONING_FORMATS)


def test_configured_names_override_the_template() -> None:
    choice = choose_parsers(TEMPLATES["qwen3"][0], "pythonic", "none")
    assert (choice.tool_format, choice.reasoning_format) == ("pythonic", None)
    assert choose_parsers(None) == choose_parsers("", "none", "none")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"tool_parser: 'herms' is not a parser; choose one of auto, none, .*hermes"):
        choose_parsers(None, "herms")
    with pytest.raises(ConfigError, match=r"reasoning_parser: 'r1' is not a parser; choose one of .*deepseek_r1"):
        choose_parsers(None, "none", "r1")


def test_a_choice_detects_whether_marks_are_special_tokens() -> None:
    assert not choose_parsers(TEMPLATES["qwen3"][0]).needs_special_tokens
    mistral = choose_parsers(TEMPLATES["mistral"][0])
    assert mistral.needs_special_tokens
    assert mistral.keeps_special_tokens(has_tools=True)
    assert not mistral.keeps_special_tokens(has_tools=False)
    assert choose_parsers(TEMPLATES["gpt-oss"][0]).keeps_special_tokens(has_tools=False)


@pytest.mark.parametrize(
    ("name", "end", "opens"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("deepseek-v3.1", "<｜Assistant｜><think>", True),
        ("gpt-oss", "<|start|>assistant", False),
        ("gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("chatml", "<think>", False),
    ],
)
def test_a_prompt_can_leave_the_model_in_its_reasoning(name: str, end: str, opens: bool) -> None:
    assert choose_parsers(TEMPLATES[name][0]).prompt_opens_reasoning(end) is opens
