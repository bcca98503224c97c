"""Tests every form in which a body may ask for structured output, and that unsupported requests are refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from penstock.text.grammars import MAX_SOURCE_BYTES
from penstock.types import Grammar, GrammarKind
from penstock.wire import grammar_from_wire
from router.api.openai.requests import ChatBody, CompletionBody, parse_body
from tests.support.router.router_fakes import FakeWorker, running_router

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
TEXT = json.dumps(OBJECT, separators=(",", ":"))
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, TEXT)
EBNF = 'root ::= "yes" | "no"'


def parse(**fields: Any) -> ChatBody:
    plain = {"messages": [{"role": "user", "content": "a"}]}
    return parse_body(ChatBody, json.dumps({**plain, **fields}).encode(), LimitsConfig())


def grammar_of(**fields: Any) -> Grammar | None:
    [request] = parse(**fields).requests("id")
    return grammar_from_wire(request.sampling.grammar) if request.sampling.HasField("grammar") else None


def with_options(**options: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**OBJECT, "x-guidance": options}, separators=(",", ":")))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": OBJECT},
                }
            },
            SCHEMA,
        ),
        ({"structured_outputs": {"json": OBJECT}}, SCHEMA),
        ({"structured_outputs": {"json": TEXT, "regex": None, "disable_fallback": True}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.LARK, 'start: "a"')),
        (
            {"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}},
            with_options(whitespace_flexible=False),
        ),
        (
            {"structured_outputs": {"json": OBJECT, "whitespace_pattern": " ?"}},
            with_options(whitespace_pattern=" ?"),
        ),
        ({"response_format": TAG}, Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG, separators=(",", ":")))),
        ({"structured_outputs": {"structural_tag": "{}"}}, Grammar(GrammarKind.STRUCTURAL_TAG, "{}")),
        ({"structural_tag": "{}"}, Grammar(GrammarKind.STRUCTURAL_TAG, "{}")),
        ({"guided_json": OBJECT}, SCHEMA),
        ({"guided_json": TEXT, "guided_whitespace_pattern": " ?"}, with_options(whitespace_pattern=" ?")),
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"guided_choice": ["a"]}, Grammar(GrammarKind.CHOICE, '["a"]')),
        ({"json_schema": TEXT}, SCHEMA),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
    ],
)
def test_each_form_becomes_a_grammar(fields: dict[str, Any], wanted: Grammar | None) -> None:
    assert grammar_of(**fields) == wanted


@pytest.mark.parametrize("name", ["ebnf", "guided_grammar"])
def test_ebnf_is_translated(name: str) -> None:
    grammar = grammar_of(**{name: EBNF})
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert "start:" in grammar.source


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a", "guided_json": OBJECT}, "regex: is given in addition to guided_json; give only one grammar"),
        ({"response_format": {"type": "json_object"}, "ebnf": EBNF}, "ebnf: is given in addition to response_format"),
        ({"structured_outputs": {"json": OBJECT, "regex": "a"}}, "structured_outputs.regex: is given in addition to"),
        ({"structured_outputs": {}}, "structured_outputs: has no grammar; give one of json, "),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs: has no grammar"),
        ({"structured_outputs": {"structural_tag": [1]}}, "structured_outputs.structural_tag: is [1]; give a string"),
        ({"structural_tag": "{}", "regex": "a"}, "structural_tag: is given in addition to regex"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend: is not a field of this API"),
        ({"structured_outputs": {"disable_additional_properties": True, "json": OBJECT}}, "is not supported"),
        ({"structured_outputs": {"disable_any_whitespace": 1, "json": OBJECT}}, "give true or false"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice: is [1]; give a list of strings"),
        ({"response_format": {"type": "grammar"}}, "response_format.type: is 'grammar'; give text, json_object"),
        ({"response_format": {}}, "response_format.type: is None"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema: is not a field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is None; give an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_schema.schema: is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema: is [1]; a JSON schema is an object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict: is 'yes'; give true or false",
        ),
        ({"guided_json": "{"}, "guided_json: is not valid JSON"),
        ({"guided_json": 1}, "guided_json: is 1; a JSON schema is an object"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern: is given without guided_json"),
        ({"guided_regex": ""}, "guided_regex: is ''; give a string"),
        ({"guided_choice": []}, "guided_choice: is []; give a list of strings"),
        ({"regex": "a" * (MAX_SOURCE_BYTES + 1)}, f"regex: has more than {MAX_SOURCE_BYTES} bytes; shorten it"),
        ({"ebnf": "root ::= ("}, "ebnf: is not valid EBNF: "),
        ({"ebnf": "root ::= " + "(" * 9000}, "ebnf: is not valid EBNF: "),
        ({"ebnf": "root ::= " + "a" * 17000}, "ebnf: has more than 16384 bytes"),
    ],
)
def test_unsupported_forms_are_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse(**fields).requests("id")
    assert message in raised.value.message
    assert len(raised.value.message) < 500


def test_completions_have_the_same_forms() -> None:
    body = parse_body(CompletionBody, json.dumps({"prompt": ["a", "b"], "regex": "a+"}).encode(), LimitsConfig())
    assert [request.sampling.grammar.source for request in body.requests("id")] == ["a+", "a+"]


# ---- over HTTP and gRPC --------------------------------------------------------------------------------------------


@pytest.fixture(name="worker")
async def _worker():
    return await FakeWorker().start()


@pytest.fixture(name="router")
async def _router(worker):
    async with running_router(worker) as router:
        yield router


async def test_the_grammar_reaches_the_worker(router, worker):
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="penstock-tiny",
            messages=[{"role": "user", "content": "a"}],
            max_tokens=4,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": OBJECT}},
        )
    assert answer.choices[0].message.content
    assert grammar_from_wire(worker.submits[0].sampling.grammar) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
            "response_format.json_schema.schema",
            "Invalid type: strin",
        ),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "unknown name"),
    ],
)
async def test_an_unusable_grammar_is_refused_under_the_clients_field_name(router, worker, fields, field, problem):
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as client:
        for _ in range(2):  # the second refusal comes from memory
            answer = await client.post("/v1/completions", json={"prompt": "a", **fields})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == field
            assert error["message"].startswith(f"{field}: cannot be enforced")
            assert problem in error["message"]
    assert not worker.submits
