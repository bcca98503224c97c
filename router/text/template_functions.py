"""Defines what a chat template may use besides the conversation: its functions, filters and tags.

The names are those that checkpoints' templates expect of transformers: `raise_exception`, `strftime_now`, `tojson` and
`{% generation %}`. Whatever this module imports is also in the untrusted process of `router.text.template_sandbox`;
hence neither grpc nor anything of penstock.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlocks(Extension):
    """Renders what is in `{% generation %}` blocks, which mark an assistant's text for training, like any text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Runs nothing of the template, not even its constant expressions. Raises jinja2.TemplateSyntaxError."""
    return template_environment().from_string(source)


def template_environment() -> jinja2.Environment:
    """Returns what templates are parsed and rendered with."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationBlocks],
        undefined=jinja2.Undefined,
        optimized=False,
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@jinja2.pass_context
def _as_it_is(_: object, value: object) -> object:
    """Demands the context, so that jinja2 evaluates constants when it renders and not when it compiles."""
    return value


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as transformers' filter does, with the same options."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
