"""Defines the functions, filters and tags that chat templates may use.

They have the names that templates know from transformers: `raise_exception`, `strftime_now`, `tojson` and
`{% generation %}`. The untrusted process of `router.text.template_sandbox` imports this module, so it must import
neither grpc nor anything of penstock.
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
    """Renders the contents of `{% generation %}` blocks, which mark an assistant's text for training, unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Compiles a template without running any of it, even constant expressions. Raises jinja2.TemplateSyntaxError."""
    return template_environment().from_string(source)


def template_environment() -> jinja2.Environment:
    """Returns the environment in which templates are parsed and rendered."""
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
    """Takes the context, so that jinja2 evaluates constants when it renders rather than when it compiles."""
    return value


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON like the filter in transformers, with the same options."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
