"""Renders docs/reference/python.md from the signatures and docstrings of the client."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
# The classes of the page in order; every public method of a client is shown.
CLIENT = "penstock/client/sync_client.py"
CLASSES = (
    (CLIENT, "Client"),
    ("penstock/client/sync_stream.py", "GenerateStream"),
    ("penstock/client/chat.py", "Chat"),
    ("penstock/types.py", "SamplingOptions"),
    ("penstock/client/results.py", "Chunk"),
    ("penstock/client/results.py", "GenerateResult"),
    ("penstock/client/results.py", "Completion"),
    ("penstock/client/results.py", "Usage"),
    ("penstock/client/results.py", "Timing"),
    ("penstock/client/results.py", "Logprob"),
    ("penstock/client/results.py", "Tokens"),
    ("penstock/client/results.py", "ModelInfo"),
    ("penstock/rpc/tls.py", "ClientTls"),
    ("penstock/client/retry.py", "RetryPolicy"),
)
ERRORS = "penstock/errors.py"
_HEAD = """\
# Python reference

The client, generated from its signatures and docstrings (`python -m tests.support.repository.reference --write`).
`from penstock import Client, AsyncClient, Chat`; other names are in the modules named with them. `AsyncClient` has the
same calls with `await`, `async with` and `async for`. `pip install .` installs it without torch and Ray.
"""


def render() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for file, name in CLASSES:
        parts += _class(file, name)
    parts += ["## Errors", "", f"All are in `{_module(ERRORS)}` and derive from `PenstockError`.", ""]
    parts += ["| error | meaning |", "|---|---|"]
    for node in _tree(ERRORS).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            parts.append(f"| `{node.name}` | {_text(node).replace('|', chr(92) + '|')} |")
    return "\n".join(parts).rstrip() + "\n"


def _class(file: str, name: str) -> Iterator[str]:
    (node,) = [each for each in ast.walk(_tree(file)) if isinstance(each, ast.ClassDef) and each.name == name]
    yield from (f"## {name}", "", f"`{_module(file)}.{name}`. {_text(node)}", "")
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and not _is_private(each.target)]
    if fields:
        lines = (ROOT / file).read_text().splitlines()
        yield from ("| field | type | default | meaning |", "|---|---|---|---|")
        for field in fields:
            default = f"`{ast.unparse(field.value)}`" if field.value is not None else ""
            comment = re.search(r"  # (.*)$", lines[(field.end_lineno or field.lineno) - 1])
            cells = (f"`{ast.unparse(field.target)}`", f"`{ast.unparse(field.annotation)}`", default)
            yield "| " + " | ".join(c.replace("|", "\\|") for c in (*cells, comment[1] if comment else "")) + " |"
        yield ""
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _is_shown(method, name):
            is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in method.decorator_list)
            shown = method.name if method.name != "__init__" else name
            yield from (f"### {name}.{method.name}" if shown != name else f"### {name}()", "")
            yield from ("```python", _signature(method, shown, is_property), "```", "")
            if about := ast.get_docstring(method):
                yield from (inspect.cleandoc(about), "")


def _is_shown(method: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return name == "Client" if method.name == "__init__" else not method.name.startswith("_")


def _signature(method: ast.FunctionDef | ast.AsyncFunctionDef, name: str, is_property: bool) -> str:
    returns = f" -> {ast.unparse(method.returns)}" if method.returns and method.name != "__init__" else ""
    if is_property:
        return f"{name}{returns}"
    given = ast.unparse(method.args).removeprefix("self").removeprefix(", ")
    arguments = ", ".join(map(_spaced, _split(given)))
    line = f"{name}({arguments}){returns}"
    if len(line) <= 100:
        return line
    pieces = textwrap.indent(",\n".join(_split(arguments)), "    ")
    return f"{name}(\n{pieces},\n){returns}"


def _split(arguments: str) -> Iterator[str]:
    """Splits arguments at commas outside brackets."""
    depth, start = 0, 0
    for index, letter in enumerate(arguments):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield arguments[start:index].strip()
            start = index + 1
    yield arguments[start:].strip()


def _spaced(argument: str) -> str:
    """Returns an annotated argument with spaces around its default, as in the code."""
    name, colon, rest = argument.partition(": ")
    return f"{name}{colon}{' = '.join(rest.split('=', 1))}" if colon else argument


def _is_private(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.startswith("_")


def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def _text(node: ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split())


def _module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")
