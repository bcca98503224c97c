"""A model's chat template: messages in, prompt text out. The template comes with the checkpoint and is not trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import CheckpointError, InvalidInput


class ChatTemplate:
    """Compiled once. Rendering is pure but for `strftime_now`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """`special_tokens` (bos_token, eos_token ...) are the template's variables. Raises CheckpointError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], undefined=jinja2.Undefined
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            problem = f"{origin}: line {error.lineno} of the chat template: {error.message}; mend the template"
            raise CheckpointError(problem) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant's answer begins. Raises InvalidInput where the template refuses."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # a template may fail like any program, and these messages made it fail
            raise InvalidInput("messages", f"the model's chat template refuses them: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """From chat_template.jinja, else tokenizer_config.json; None where the model has none."""
    config = read_json(folder / "tokenizer_config.json")
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (value := config.get(name)) is not None
    }
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return ChatTemplate(separate.read_text(encoding="utf-8"), special, str(separate))
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), None))
    return ChatTemplate(source, special, str(folder / "tokenizer_config.json")) if source else None


def read_json(path: Path) -> dict[str, Any]:
    """An object, empty where the file is absent. Raises CheckpointError on anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; copy the file again from the model's source") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, not an object; copy it again")
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
