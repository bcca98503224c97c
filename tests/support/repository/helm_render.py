"""Renders the Helm chart without helm. Supports only what its templates use; everything else is an error.

`python -m tests.support.repository.helm_render [VALUES.yaml ...]` prints the manifests, `--write` puts them into
deploy/kuberay/. Supported are `if`, `else`, `else if`, `range`, `define`, paths, variables, literals, pipelines, and
the functions of `Renderer`. A path that does not exist is an error, where helm would write an empty string.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
CHART = DEPLOY / "helm" / "penstock"
KUBERAY = DEPLOY / "kuberay"
PLAIN = {"penstock-cpu.yaml": "values.yaml", "penstock-gpu.yaml": "values-gpu.yaml"}
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[()|,]|:=|[^\s()|,"]+')


def load_yaml(text: str) -> Any:
    """Parses a YAML document with libyaml: the same result as `yaml.safe_load`, ten times as fast."""
    return yaml.load(text, yaml.CSafeLoader)


def load_all_yaml(text: str) -> Iterator[Any]:
    """Yields each document of a YAML text, parsed like `load_yaml`."""
    yield from yaml.load_all(text, yaml.CSafeLoader)


class RenderError(Exception):
    """Reports a template that this renderer, or helm, does not accept."""


@dataclass
class Node:
    """Holds a parsed part of a template: text, value, if, range or define. Each branch of an `if` has a condition and a
    body."""

    kind: str
    text: str = ""
    body: list[Node] = field(default_factory=list)
    branches: list[tuple[str, list[Node]]] = field(default_factory=list)


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    """Yields ("text" or "action", content), without the white space that `{{-` and `-}}` trim."""
    at, trim_next = 0, False
    for match in re.finditer(r"\{\{(-?)\s*(/\*.*?\*/|.*?)\s*(-?)\}\}", source, re.DOTALL):
        text = source[at : match.start()]
        text = text.lstrip() if trim_next else text
        yield "text", text.rstrip() if match[1] else text
        at, trim_next = match.end(), bool(match[3])
        if not match[2].startswith("/*"):
            yield "action", match[2]
    yield "text", source[at:].lstrip() if trim_next else source[at:]


def _parse(tokens: Iterator[tuple[str, str]], end: bool = False) -> tuple[list[Node], str]:
    """Returns the nodes up to their `end` or `else`, and which of the two was found."""
    nodes: list[Node] = []
    for kind, content in tokens:
        word, _, rest = content.partition(" ")
        if kind == "text":
            nodes.append(Node("text", content))
        elif word in ("end", "else"):
            if not end:
                raise RenderError(f"{content!r} without a beginning")
            return nodes, content
        elif word == "if":
            node, condition = Node("if"), rest
            while True:
                body, closing = _parse(tokens, end=True)
                node.branches.append((condition, body))
                if closing == "end":
                    break
                condition = closing.removeprefix("else").strip().removeprefix("if").strip() or "true"
            nodes.append(node)
        elif word in ("range", "define"):
            body, closing = _parse(tokens, end=True)
            if closing != "end":
                raise RenderError(f"{closing!r} in {content!r}")
            nodes.append(Node(word, rest, body))
        else:
            nodes.append(Node("value", content))
    if end:
        raise RenderError("an `end` is missing")
    return nodes, ""


class Renderer:
    def __init__(
        self,
        chart: Path,
        values: Mapping[str, object],
        release: Mapping[str, str],
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Reads the chart; `files` is the text of each template, by default the chart's."""
        about = load_yaml((chart / "Chart.yaml").read_text())
        self._root: dict[str, object] = {
            "Values": values,
            "Release": release,
            "Chart": {"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"]},
        }
        self._defined: dict[str, list[Node]] = {}
        self._functions: dict[str, Callable[..., object]] = {
            ".Files.Get": lambda name: (chart / name).read_text(),
            "include": self._include,
            "toJson": lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")),
            "quote": lambda value: json.dumps(_format(value)),
            "nindent": lambda width, text: "\n" + "\n".join(" " * width + line for line in text.split("\n")),
            "get": lambda table, key: table.get(key, ""),
            "default": lambda other, value: value or other,
            "len": len,
            "add": lambda *numbers: sum(int(each) for each in numbers),
            "addf": lambda *numbers: _number(sum(float(each) for each in numbers)),
            "mulf": lambda *numbers: _number(math.prod(float(each) for each in numbers)),
            "int64": lambda value: int(value or 0),
            "float64": lambda value: _number(float(value)),
            "gt": lambda left, right: left > right,
            "eq": lambda left, right: left == right,
            "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
            "ne": lambda left, right: left != right,
            "hasSuffix": lambda end, text: text.endswith(end),
            "printf": lambda form, *values: form.replace("%v", "%s") % tuple(map(_format, values)),
            "fail": _fail,
            "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
            "merge": lambda *dicts: {key: value for each in reversed(dicts) for key, value in each.items()},
        }
        self._files = {}
        if files is None:
            files = {path.name: path.read_text() for path in sorted((chart / "templates").iterdir())}
        for name, source in files.items():
            nodes, _ = _parse(_tokens(source))
            self._defined.update({json.loads(node.text): node.body for node in nodes if node.kind == "define"})
            if not name.startswith("_"):
                self._files[name] = nodes

    def render(self) -> dict[str, str]:
        """Returns the text of each template, by file name."""
        return {name: self._run(nodes, self._root, {"$": self._root}) for name, nodes in self._files.items()}

    def render_text(self, source: str) -> str:
        return self._run(_parse(_tokens(source))[0], self._root, {"$": self._root})

    def _include(self, name: str, scope: object) -> str:
        if name not in self._defined:
            raise RenderError(f"include {name!r}: no template has that name")
        return self._run(self._defined[name], scope, {"$": scope})

    def _run(self, nodes: list[Node], scope: object, variables: dict[str, object]) -> str:
        parts = []
        for node in nodes:
            if node.kind == "text":
                parts.append(node.text)
            elif node.kind == "value":
                parts.append(_format(self._evaluate(node.text, scope, variables)))
            elif node.kind == "if":
                taken = (body for test, body in node.branches if self._evaluate(test, scope, variables))
                parts.append(self._run(next(taken, []), scope, variables))
            elif node.kind == "range":
                parts += self._range(node, scope, variables)
        return "".join(parts)

    def _range(self, node: Node, scope: object, variables: dict[str, object]) -> Iterator[str]:
        match = re.fullmatch(r"(\$\w+), (\$\w+) := (.+)", node.text)
        if not match:
            raise RenderError(f"range {node.text!r}: write `range $key, $value := PATH`")
        found = self._evaluate(match[3], scope, variables)
        items = dict(enumerate(found)) if isinstance(found, list) else found
        if not isinstance(items, Mapping):
            raise RenderError(f"range {node.text!r}: takes only tables and lists")
        for key in sorted(items):  # in the order in which Go walks maps
            yield self._run(node.body, items[key], {**variables, match[1]: key, match[2]: items[key]})

    def _evaluate(self, text: str, scope: object, variables: dict[str, object]) -> object:
        words = _WORD.findall(text)
        value = self._pipeline(words, scope, variables)
        if words:
            raise RenderError(f"{text!r}: {' '.join(words)!r} is left over")
        return value

    def _pipeline(self, words: list[str], scope: object, variables: dict[str, object]) -> object:
        """Takes the words of one pipeline off the list, up to a closing parenthesis."""
        value, has_value = None, False
        while words and words[0] != ")":
            word = words.pop(0)
            if word in self._functions:
                arguments = []
                while words and words[0] not in (")", "|"):
                    arguments.append(self._operand(words.pop(0), words, scope, variables))
                value = self._functions[word](*arguments, *([value] if has_value else []))
            elif has_value:
                raise RenderError(f"{word!r} is no function that this renderer knows")
            else:
                value = self._operand(word, words, scope, variables)
            has_value = True
            if words and words[0] == "|":
                words.pop(0)
        return value

    def _operand(self, word: str, words: list[str], scope: object, variables: dict[str, object]) -> object:
        if word == "(":
            value = self._pipeline(words, scope, variables)
            if not words or words.pop(0) != ")":
                raise RenderError("a parenthesis is not closed")
            return value
        if word.startswith('"') or word.isdecimal() or word in ("true", "false"):
            return json.loads(word)
        match = re.fullmatch(r"(\$\w*)?((?:\.\w+)*)\.?", word)
        if not match or (match[1] and match[1] not in variables):
            raise RenderError(f"{word!r} is no function, path or literal that this renderer knows")
        value = variables[match[1]] if match[1] else scope
        for key in match[2].split(".")[1:]:
            if not isinstance(value, Mapping) or key not in value:
                raise RenderError(f"{word}: there is no {key!r}")
            value = value[key]
        return value


def _fail(problem: str) -> None:
    raise RenderError(problem)


def _number(value: float) -> float | int:
    """Converts whole floats to integers, which is how Go prints them."""
    return int(value) if value.is_integer() else value


def _format(value: object) -> str:
    """Formats a value as Go does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping | list) or value is None:
        raise RenderError(f"{value!r} is printed as it is; use toJson")
    return str(value)


def overlay(values: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Returns `over` merged into `values`, table by table, as helm does with `--values`."""
    merged = dict(values)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = overlay(below, value)
        else:
            merged[key] = value
    return merged


def render(over: Mapping[str, object] | None = None, service: str = "Helm") -> dict[str, str]:
    """Returns the text of each template with `over` merged into the chart's values, as release `penstock` in `llm`."""
    values = overlay(load_yaml((CHART / "values.yaml").read_text()), over or {})
    release = {"Name": "penstock", "Namespace": "llm", "Service": service}
    return Renderer(CHART, values, release).render()


def manifests(over: Mapping[str, object] | None = None) -> list[dict[str, Any]]:
    """Returns the chart's objects."""
    texts = [text for name, text in render(over).items() if name.endswith(".yaml")]
    return [each for text in texts for each in load_all_yaml(text) if each]


def plain(values_file: str) -> str:
    """Returns what deploy/kuberay/ holds for one of the chart's value files."""
    over = load_yaml((CHART / values_file).read_text())
    texts = [text.strip() for name, text in render(over, "kubectl").items() if name.endswith(".yaml")]
    lines = "\n---\n".join(text for text in texts if text).splitlines()
    return (
        f"# The chart deploy/helm/penstock with its {values_file}, for `kubectl apply --namespace llm --filename`.\n"
        "# `python -m tests.support.repository.helm_render --write` makes this file: change the chart instead.\n"
        + "".join(f"{line.rstrip()}\n" for line in lines if line.strip())
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for name, values_file in PLAIN.items():
            (KUBERAY / name).write_text(plain(values_file))
    else:
        given: dict[str, object] = {}
        for name in sys.argv[1:]:
            given = overlay(given, load_yaml(Path(name).read_text()))
        for name, text in render(given).items():
            if name.endswith(".yaml") and text.strip():
                print(f"---\n{text.strip()}")
