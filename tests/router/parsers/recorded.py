"""Holds outputs as models of each family write them, and what parsers should find in them."""

from __future__ import annotations

from dataclasses import dataclass

from router.parsers.tools import ToolFunction
from tests.support.router.parsed_outputs import ParsedCall, ParsedOutput

WEATHER = ToolFunction(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["metric", "imperial"]},
            "at": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}},
            "tags": {"type": "array", "items": {"type": "string"}},
            "hourly": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
)
NOW = ToolFunction("now", {"type": "object", "properties": {}})
TOOLS = (WEATHER, NOW)


@dataclass(frozen=True)
class Recorded:
    """Holds an output and what parsers of its formats make of it."""

    id: str
    tools: str
    text: str
    parsed: ParsedOutput
    reasoning: str = "none"
    starts_in_reasoning: bool = False


def case(
    id: str,
    formats: str,
    text: str,
    content: str = "",
    *calls: tuple[str, str] | tuple[str, str, bool],
    thought: str = "",
    starts: bool = False,
) -> Recorded:
    tools, _, reasoning = formats.partition("+")
    parsed = ParsedOutput(content, thought, tuple(ParsedCall(*call) for call in calls))
    return Recorded(f"{tools}-{id}", tools, text, parsed, reasoning or "none", starts)


PARIS = ("get_weather", '{"city": "Paris"}')
EMPTY = ("now", "{}")
HARD = '{"city": "a } b \\" </tool_call> {\\u00e9\\ud83d\\ude00}", "at": {"lat": 1.5, "x": [[{}], "]"]}}'

HERMES = (
    case(
        "one", "hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", PARIS
    ),
    case(
        "parallel",
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\nDone.',
        "Let me look.\nDone.",
        PARIS,
        EMPTY,
    ),
    case(
        "hard",
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {HARD}}}</tool_call>',
        "",
        ("get_weather", HARD),
    ),
    case(
        "arguments first",
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        "",
        PARIS,
    ),
    case("no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', "", EMPTY),
    case("null", "hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", EMPTY),
    case("escaped name", "hermes", '<tool_call>{"name": "n\\u006fw", "arguments": {}}</tool_call>', "", EMPTY),
    case(
        "id",
        "hermes",
        '<tool_call>{"id": 7, "type": "function", "name": "now", "arguments": {}}</tool_call>',
        "",
        EMPTY,
    ),
    case(
        "arguments in a string",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        "",
        PARIS,
    ),
    case("cut in the name", "hermes", 'Hm\n<tool_call>\n{"name": "get_w', 'Hm\n<tool_call>\n{"name": "get_w'),
    case(
        "cut in arguments",
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        "",
        ("get_weather", '{"city": "Par', False),
    ),
    case("cut after arguments", "hermes", '<tool_call>\n{"name": "now", "arguments": {}}', "", EMPTY),
    case("cut in the end", "hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool', "", EMPTY),
    case("no tool call", "hermes", "a < b, <tool> and <tool_call", "a < b, <tool> and <tool_call"),
    case("no end mark", "hermes", '<tool_call>{"name": "now", "arguments": {}}\nSo.', "So.", EMPTY),
    case("opened twice", "hermes", '<tool_call>\n<tool_call>{"name": "now"}</tool_call>', "<tool_call>\n", EMPTY),
    case("plain", "hermes", "\nHello\n", "\nHello\n"),
    case("wrong key", "hermes", '<tool_call>{"tool": "now"}</tool_call>', '<tool_call>{"tool": "now"}</tool_call>'),
    case("thinks", "hermes+qwen3", "<think>\nSo.\nYes\n</think>\n\nHello", "Hello", thought="So.\nYes"),
    case("thinks from the prompt", "hermes+qwen3", "So.\n</think>\n\nHello", "Hello", thought="So.", starts=True),
    case(
        "thinks before a call",
        "hermes+qwen3",
        '<think>\nI call <tool_call> now\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        EMPTY,
        thought="I call <tool_call> now",
    ),
    case("thinks without end", "hermes+qwen3", "<think>\nSo", thought="So"),
    case("thinks of nothing", "hermes+qwen3", "<think>\n\n</think>\n\nHi", "Hi"),
    case("writes about thinking", "hermes+qwen3", "Use <think> and </think>.", "Use <think> and </think>."),
)

QWEN3_CODER = (
    case(
        "one",
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call>",
        "I look.",
        PARIS,
    ),
    case(
        "types",
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\na "b"\n<c> \\ {\n\n</parameter>\n<parameter=days>\n3\n'
        '</parameter>\n<parameter=at>\n{"lat": 1.5}\n</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n'
        "<parameter=hourly>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n<parameter=other>\n5\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        (
            "get_weather",
            '{"city": "a \\"b\\"\\n<c> \\\\ {\\n", "days": 3, "at": {"lat": 1.5}, "tags": ["a", "b"], "hourly": true, '
            '"note": null, "other": "5"}',
        ),
        EMPTY,
    ),
    case(
        "wrong types",
        "qwen3_coder",
        "<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n<parameter=at>\n{'lat': 1}\n"
        "</parameter>\n</function>",
        "",
        ("get_weather", '{"days": "many", "at": "{\'lat\': 1}"}'),
    ),
    case(
        "cut",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPari</par",
        "",
        ("get_weather", '{"city": "Pari</par', False),
    ),
    case(
        "text between parameters",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\noops</function>\n</tool_call>",
        "oops</function>\n</tool_call>",
        PARIS,
    ),
)

LLAMA3 = (
    case("one", "llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", PARIS),
    case(
        "tag",
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>',
        "",
        PARIS,
    ),
    case(
        "parallel",
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        "",
        PARIS,
        EMPTY,
    ),
    case("other object", "llama3_json", '{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}'),
    case("text", "llama3_json", 'It is {"name": "now", "parameters": {}}', 'It is {"name": "now", "parameters": {}}'),
    case("code", "llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    case("text after", "llama3_json", '{"name": "now", "parameters": {}}\nDone', "Done", EMPTY),
)

PYTHONIC = (
    case("one", "pythonic", '[get_weather(city="Paris")]', "", PARIS),
    case(
        "types",
        "pythonic",
        "[get_weather(city='L\\'a \"b\" \\u00e9\\n)]', days=3, hourly=True, note=None, at={'lat': -1.5,"
        ' "x": [1, (2,), {}]},'
        " tags=['a', 'b',]), now()]",
        "",
        (
            "get_weather",
            '{"city": "L\'a \\"b\\" é\\n)]", "days": 3, "hourly": true, "note": null, "at": {"lat": -1.5,'
            ' "x": [1, [2], {}]}, "tags": ["a", "b"]}',
        ),
        EMPTY,
    ),
    case("tokens", "pythonic", "<|python_start|>[now()]<|python_end|>", "", EMPTY),
    case("list", "pythonic", "[1, 2] is a list", "[1, 2] is a list"),
    case("unknown tool", "pythonic", "[rm(path='/')]", "[rm(path='/')]"),
    case("cut", "pythonic", "[get_weather(city='Par", "", ("get_weather", '{"city": "Par', False)),
    case("wrong word", "pythonic", "[now(a=[1, word])]", " word])]", ("now", '{"a": [1', False)),
    case("cut in a list", "pythonic", "[now(a=[1, 2", "", ("now", '{"a": [1, 2', False)),
    case("positional", "pythonic", "[get_weather('Paris')]", "[get_weather('Paris')]"),
)

MISTRAL = (
    case("list", "mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", PARIS),
    case(
        "list of two",
        "mistral",
        'Sure.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abc123xyz"}, '
        '{"name": "now", "arguments": {}}]',
        "Sure.",
        PARIS,
        EMPTY,
    ),
    case("named", "mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]now{}', "", PARIS, EMPTY),
    case("arguments mark", "mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", PARIS),
    case("call id", "mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', "", PARIS),
    case("cut in the second", "mistral", '[TOOL_CALLS] [{"name": "now"}, {"name": "get', ', {"name": "get', EMPTY),
    case("thinks", "mistral+mistral", "[THINK]So[/THINK]Use <s>x</s>", "Use <s>x</s>", thought="So"),
    case("no call", "mistral", "[TOOL_CALLS] none, [TOOL", "[TOOL_CALLS] none, [TOOL"),
)

_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

DEEPSEEK = (
    case("one", "deepseek_v3", f"{_CALLS}{_V3.format(*PARIS)}{_END_CALLS}", "", PARIS),
    case(
        "two after thoughts",
        "deepseek_v3+deepseek_r1",
        f"Hm.\n</think>\n\nI look.{_CALLS}{_V3.format(*PARIS)}\n{_V3.format(*EMPTY)}{_END_CALLS}<｜end▁of▁sentence｜>",
        "I look.",
        PARIS,
        EMPTY,
        thought="Hm.",
        starts=True,
    ),
    case("thought", "deepseek_v3+deepseek_r1", "<think>\nHm.\n</think>\n\nHi", "Hi", thought="Hm."),
    case("opened twice", "deepseek_v3+deepseek_r1", "<think>\nHm.\n</think>Hi", "Hi", thought="Hm.", starts=True),
    case("mark alone", "deepseek_v3", f"a{_CALLS}b", f"a{_CALLS}b"),
    case("one", "deepseek_v31", f"I look.{_CALLS}{_V31.format(*PARIS)}{_END_CALLS}", "I look.", PARIS),
    case("two", "deepseek_v31", f"{_CALLS}{_V31.format(*PARIS)}{_V31.format(*EMPTY)}{_END_CALLS}", "", PARIS, EMPTY),
    case("hard", "deepseek_v31", f"{_CALLS}{_V31.format('get_weather', HARD)}{_END_CALLS}", "", ("get_weather", HARD)),
    case("cut", "deepseek_v31", f"{_CALLS}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{", "", ("now", "{", False)),
)

GLM45 = (
    case(
        "one",
        "glm45+glm45",
        "<think>So</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "</tool_call>",
        "I look.",
        PARIS,
        thought="So",
    ),
    case(
        "types",
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>\n<arg_value>5"
        '</arg_value><arg_key>x</arg_key><arg_value>{"a": [1]}</arg_value><arg_key>y</arg_key><arg_value>b c'
        "</arg_value>"
        "</tool_call><tool_call>now\n</tool_call>",
        "",
        ("get_weather", '{"city": "5", "days": 5, "x": {"a": [1]}, "y": "b c"}'),
        EMPTY,
    ),
    case("one line", "glm45", "<tool_call>now</tool_call>", "", EMPTY),
    case("no thought", "glm45+glm45", "<think></think>\nHi", "Hi"),
)

KIMI = (
    case(
        "two",
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>",
        "I look.",
        PARIS,
        EMPTY,
    ),
    case(
        "from thoughts",
        "kimi_k2+kimi_k2",
        "<think>I look<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        EMPTY,
        thought="I look",
    ),
)

HARMONY = (
    case(
        "final",
        "harmony+harmony",
        "<|channel|>analysis<|message|>So.\n<|end|><|start|>assistant<|channel|>final<|message|>Hello\nyou<|return|>",
        "Hello\nyou",
        thought="So.",
    ),
    case(
        "call",
        "harmony+harmony",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        "I look.",
        PARIS,
        thought="So.",
    ),
    case(
        "recipient in the role",
        "harmony+harmony",
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "",
        EMPTY,
    ),
    case("no end", "harmony+harmony", "<|channel|>analysis<|message|>So", thought="So"),
    case(
        "other recipient",
        "harmony+harmony",
        "<|channel|>commentary to=browser.open<|message|>{}",
        "<|channel|>commentary to=browser.open<|message|>{}",
    ),
    case(
        "from the prompt",
        "harmony+harmony",
        "So.<|end|><|start|>assistant<|channel|>final<|message|>A",
        "A",
        thought="So.",
        starts=True,
    ),
    case("other header", "harmony+harmony", "<|channel|>x y<|message|>A", "<|channel|>x y<|message|>A"),
    case("no channels", "harmony+harmony", "Hello", "Hello"),
)

GEMMA = (
    case("code", "gemma", '```tool_code\nget_weather(city="Paris")\n```', "", PARIS),
    case(
        "code list", "gemma", "I look.\n```tool_code\n[get_weather(city='Paris'), now()]\n```", "I look.", PARIS, EMPTY
    ),
    case("other code", "gemma", "```tool_code\nprint(1)\n```", "```tool_code\nprint(1)\n```"),
    case(
        "function",
        "gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "",
        PARIS,
        EMPTY,
    ),
    case(
        "types",
        "gemma",
        '<|tool_call>call:get_weather{at:{lat:-1.5},city:<|"|>a "b" }<|<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b<|"|>],'
        "hourly:true,units:metric}<tool_call|>",
        "",
        (
            "get_weather",
            '{"at": {"lat": -1.5}, "city": "a \\"b\\" }<|", "days": 3, "tags": ["a", "b"], "hourly": true, '
            '"units": "metric"}',
        ),
    ),
)

RECORDED = (
    *HERMES,
    *QWEN3_CODER,
    *LLAMA3,
    *PYTHONIC,
    *MISTRAL,
    *DEEPSEEK,
    *GLM45,
    *KIMI,
    *HARMONY,
    *GEMMA,
)
