"""Tests the grammars of tool calls: whatever they allow parses into calls with valid arguments."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import jsonschema
import llguidance
import numpy
import pytest
import tokenizers

from penstock.errors import InvalidInput
from router.parsers.formats import TOOL_FORMATS
from router.parsers.grammars.calls import schema_of
from router.parsers.parser_choice import choose_parsers
from router.parsers.tools import ToolFunction
from tests.support.router.parsed_outputs import ParsedOutput, parse_whole

ROOT = Path(__file__).resolve().parents[3]
TOOLS = (
    ToolFunction(
        "book",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "days": {"type": "integer", "minimum": 1, "maximum": 20},
                "class": {"enum": ["first", "second"]},
                "seats": {"type": "array", "items": {"type": "string", "enum": ["A", "B"]}, "maxItems": 2},
                "child": {"type": "boolean"},
                "at": {
                    "type": "object",
                    "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}},
                    "required": ["x"],
                },
            },
            "required": ["city", "at"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    ToolFunction("booking", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True),
)
REASONING = {
    "harmony": "harmony",
    "glm45": "glm45",
    "kimi_k2": "kimi_k2",
    "deepseek_v3": "deepseek_r1",
    "hermes": "qwen3",
}
MARKS = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "deepseek_v3": (*TOOL_FORMATS["deepseek_v3"].before, *TOOL_FORMATS["deepseek_v3"].after, "<｜tool▁sep｜>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
    ),
    "harmony": ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"),
    "glm45": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "</parameter>"),
    "hermes": ("<think>", "</think>", "<tool_call>"),
}


@cache
def vocabulary(marks: tuple[str, ...]) -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer, dict[str, int]]:
    """Returns the bundled model's tokenizer with `marks` as additional special tokens."""
    compiled = tokenizers.Tokenizer.from_file(str(ROOT / "models" / "penstock-tiny" / "tokenizer.json"))
    compiled.add_special_tokens(list(marks))
    special = {token.content: id for id, token in compiled.get_added_tokens_decoder().items() if token.special}
    return compiled, llguidance.LLTokenizer(compiled.to_str(), eos_token=1), special


def sample(grammar: str, marks: tuple[str, ...], seed: int, begin: str = "", max_tokens: int = 400) -> str | None:
    """Returns an output that the grammar allows: `begin`, then tokens chosen at random. Returns None if it grows too
    long."""
    compiled, vocabulary_ll, _ = vocabulary(marks)
    matcher = llguidance.LLMatcher(vocabulary_ll, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    chance, tokens = random.Random(seed), compiled.encode(begin, add_special_tokens=False).ids
    assert matcher.consume_tokens(tokens), f"{begin!r}: {matcher.get_error()}"
    for _ in range(max_tokens):
        bits = numpy.unpackbits(numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8), bitorder="little")
        allowed = numpy.flatnonzero(bits[: vocabulary_ll.vocab_size])
        assert allowed.size, matcher.get_error()
        if bits[1] and (allowed.size == 1 or chance.random() < 0.3):
            return compiled.decode(tokens, skip_special_tokens=False)
        token = int(chance.choice(allowed[allowed != 1]))
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return None


def check(parsed: ParsedOutput) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for call in parsed.tool_calls:
        assert call.complete
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def cases() -> list[tuple[str, tuple[str, ...]]]:
    return [(name, ()) for name in TOOL_FORMATS] + list(MARKS.items())


def thoughts(name: str) -> str:
    if name == "harmony":
        return "So.<|end|><|start|>assistant"
    return "So.\n</think>\n\n"


@pytest.mark.parametrize(("name", "marks"), cases())
@pytest.mark.parametrize("starts", [False, True])
def test_required_calls_parse_and_are_valid(name: str, marks: tuple[str, ...], starts: bool) -> None:
    choice = choose_parsers(None, name, REASONING.get(name, "none"))
    starts = starts and choice.reasoning is not None
    grammar = choice.grammar(TOOLS, "required", special_tokens=vocabulary(marks)[2], starts_in_reasoning=starts)
    assert grammar
    texts = [sample(grammar, marks, seed, thoughts(name) if starts else "") for seed in range(6)]
    whole = [text for text in texts if text is not None]
    assert whole
    for text in whole:
        parsed = parse_whole(choice, text, TOOLS, starts_in_reasoning=starts)
        assert parsed.tool_calls, text
        assert not parsed.text.strip(), text
        assert parsed.reasoning == ("So." if starts else parsed.reasoning)
        check(parsed)


@pytest.mark.parametrize(("name", "marks"), cases())
def test_a_named_tool_is_called_once(name: str, marks: tuple[str, ...]) -> None:
    choice = choose_parsers(None, name, "none")
    grammar = choice.grammar(TOOLS, "booking", special_tokens=vocabulary(marks)[2])
    assert grammar
    texts = [sample(grammar, marks, seed, HARMONY_CALL if name == "harmony" else "") for seed in range(3)]
    for text in filter(None, texts):
        assert [call.name for call in parse_whole(choice, text, TOOLS).tool_calls] == ["booking"], text
    assert any(texts)


HARMONY_CALL = "<|channel|>commentary to=functions.booking <|constrain|>json<|message|>"
BEGUN = {  # an output with a call's mark, after which only a call may follow
    "hermes": "I look.\n<tool_call>",
    "qwen3_coder": "I look.\n<tool_call>",
    "glm45": "I look.\n<tool_call>",
    "deepseek_v3": "I look.<｜tool▁calls▁begin｜>",
    "deepseek_v31": "I look.<｜tool▁calls▁begin｜>",
    "kimi_k2": "I look.<|tool_calls_section_begin|>",
    "mistral": "I look.[TOOL_CALLS]",
    "gemma": "I look.\n```tool_code\n",
    "llama3_json": '{"name": "',
    "pythonic": "[book",
    "harmony": "<|channel|>commentary to=functions.book",
}


@pytest.mark.parametrize(("name", "marks"), cases())
def test_a_call_that_the_model_starts_is_valid(name: str, marks: tuple[str, ...]) -> None:
    choice = choose_parsers(None, name, "none")
    grammar = choice.grammar(TOOLS, "auto", special_tokens=vocabulary(marks)[2])
    assert grammar
    begin = "I look.<start_function_call>" if name == "gemma" and marks else BEGUN[name]
    texts = [text for seed in range(8) if (text := sample(grammar, marks, seed, begin, max_tokens=800))]
    assert texts
    for text in texts:
        parsed = parse_whole(choice, text, TOOLS)
        assert parsed.tool_calls, text
        check(parsed)


@pytest.mark.parametrize(("name", "marks"), cases())
def test_text_without_a_call_is_unrestricted(name: str, marks: tuple[str, ...]) -> None:
    choice = choose_parsers(None, name, "none")
    grammar = choice.grammar(TOOLS, "auto", special_tokens=vocabulary(marks)[2])
    assert grammar
    begin = "<|channel|>final<|message|>" if name == "harmony" else ""
    text = sample(grammar, marks, 5, begin + "Hello {world} [x] <b>\n\n")
    assert text is None or text.startswith(begin + "Hello {world} [x] <b>")


@pytest.mark.parametrize(("name", "marks"), [("hermes", ()), ("hermes", MARKS["hermes"]), ("glm45", MARKS["glm45"])])
@pytest.mark.parametrize("starts", [False, True])
def test_reasoning_may_precede_text_and_calls(name: str, marks: tuple[str, ...], starts: bool) -> None:
    choice = choose_parsers(None, name, REASONING[name])
    grammar = choice.grammar(TOOLS, "auto", special_tokens=vocabulary(marks)[2], starts_in_reasoning=starts)
    assert grammar
    begin = ("" if starts else "<think>\n") + "So.\n</think>\n\nI look.\n<tool_call>"
    texts = [text for seed in range(8) if (text := sample(grammar, marks, seed, begin))]
    assert texts
    for text in texts:
        parsed = parse_whole(choice, text, TOOLS, starts_in_reasoning=starts)
        assert (parsed.reasoning, parsed.text[:7]) == ("So.", "I look."), text
        assert parsed.tool_calls
        check(parsed)


def test_tools_that_are_not_strict_may_have_any_arguments() -> None:
    loose = ToolFunction("any", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    grammar = choose_parsers(None, "hermes").grammar([loose, *TOOLS], "auto")
    assert grammar
    sample(grammar, (), 1, '<tool_call>\n{"name": "any", "arguments": {"x": [1, {}]}}\n</tool_call>')


def test_one_call_is_the_limit_without_parallel_calls() -> None:
    grammar = choose_parsers(None, "hermes").grammar(TOOLS, "required", parallel=False)
    assert grammar
    call = '<tool_call>\n{"name": "booking", "arguments": {}}\n</tool_call>'
    assert sample(grammar, (), 1, call) == call


HUGE = ToolFunction(
    "f",
    {"properties": {f"p{n}": {"$ref": "#/$defs/d"} for n in range(999)}, "$defs": {"d": {"description": "d" * 9999}}},
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "parameters",
    [
        {"required": 7, "properties": {"a": True, "b": {"enum": 3}, "c": {"anyOf": 5}, "d": {"type": ["string", 4]}}},
        {"required": [[], "a"], "properties": {"a": {"properties": [], "type": "object"}}},
        {"properties": 4},
    ],
)
def test_an_invalid_schema_makes_a_grammar_or_is_refused(name: str, parameters: dict[str, object]) -> None:
    tool = ToolFunction("f", parameters, strict=True)
    choice = choose_parsers(None, name)
    assert choice.grammar([tool], "required")
    parse_whole(choice, "<function=f><parameter=c>1</parameter><parameter=d>1</parameter></function>", [tool])


@pytest.mark.parametrize(
    ("tool_parser", "tools", "tool_choice", "field"),
    [
        ("hermes", TOOLS, "other", "tool_choice"),
        ("none", TOOLS, "required", "tool_choice"),
        ("hermes", (), "required", "tools"),
        ("pythonic", (ToolFunction("f", {"anyOf": []}),), "required", "tools"),
        ("pythonic", (ToolFunction("f", {"properties": {"a b": {}}}),), "required", "tools"),
        ("qwen3_coder", (HUGE,), "required", "tools"),
    ],
)
def test_unsupported_schemas_are_refused_by_field(
    tool_parser: str, tools: tuple[ToolFunction, ...], tool_choice: str, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        choose_parsers(None, tool_parser).grammar(tools, tool_choice)
    assert caught.value.field == field


def test_without_strict_tools_any_output_is_allowed() -> None:
    choice = choose_parsers(None, "hermes")
    assert choice.grammar([ToolFunction("f")], "auto") is None
    assert choice.grammar(TOOLS, "none") is None
    assert choose_parsers(None).grammar([ToolFunction("f")], "auto") is None


def test_arguments_have_only_the_named_properties_unless_the_schema_allows_others() -> None:
    closed = schema_of(ToolFunction("now", {"type": "object", "properties": {}}))
    assert closed == {"type": "object", "properties": {}, "additionalProperties": False}
    for more in ({"additionalProperties": True}, {"patternProperties": {"^x": {}}}, {"allOf": [{"required": ["a"]}]}):
        schema = {"type": "object", "properties": {"a": {}}, **more}
        assert schema_of(ToolFunction("now", schema)) == schema
    assert schema_of(ToolFunction("now")) == {"type": "object"}
