"""Reads the prompts of datasets: JSON lines with one prompt each, or conversations in ShareGPT's format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.bench.workloads.plan import AnyPrompt, Draft, PromptMessages, Source
from penstock.errors import InvalidInput

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_TEXTS = ("prompt", "text", "question", "instruction", "input")


def dataset_source(file: str | Path, num_output_tokens: int, count: int | None = None) -> Source:
    """Returns the prompts of a file, or `count` of them, which starts over if the file has fewer.

    A row has `prompt` (or text, question, instruction, input), `turns` (a list of texts, of which the first is sent),
    `messages` (OpenAI's), or `conversations` (ShareGPT's: all messages up to the first answer are sent). A row's
    `output_tokens` or `max_tokens` is the length of its answer, by default `num_output_tokens`. Raises InvalidInput
    that names the row.
    """
    path = Path(file)
    if not path.exists():
        raise InvalidInput("dataset", f"no file {file}; name one")
    drafts = []
    for where, row in _rows(path):
        prompt = _prompt(row)
        if prompt is None:
            raise InvalidInput("dataset", f"{where} has none of {', '.join(_TEXTS)}, turns, messages, conversations")
        drafts.append(Draft(prompt, int(row.get("output_tokens") or row.get("max_tokens") or num_output_tokens)))
    if not drafts:
        raise InvalidInput("dataset", f"{path} has no rows; name a file with at least one")
    notes = []
    if count is not None:
        if count > len(drafts):
            notes.append(f"the file's {len(drafts)} prompts are sent more than once: prefix caches hold them by then")
        drafts = [drafts[index % len(drafts)] for index in range(count)]
    return Source(path.name, tuple(drafts), notes=tuple(notes))


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as opened:
        text = opened.read()
    rows: list[tuple[str, Any]]
    if text.lstrip().startswith("["):  # ShareGPT is one JSON list
        rows = [(f"{path}[{index}]", row) for index, row in enumerate(_parse(text, str(path)))]
    else:
        lines = [(f"{path}:{number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        rows = [(where, _parse(line, where)) for where, line in lines]
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise InvalidInput("dataset", f"{where} is not a JSON object; expected one with a prompt")
        yield where, row


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput("dataset", f"{where}: {error}; expected JSON") from error


def _prompt(row: Mapping[str, Any]) -> AnyPrompt | None:
    if turns := row.get("turns"):
        return str(turns[0])
    if messages := row.get("messages") or row.get("conversations"):
        return _messages(messages)
    for name in _TEXTS:
        if isinstance(row.get(name), str) and row[name]:
            return str(row[name])
    return None


def _messages(turns: Any) -> PromptMessages | None:
    """Returns the messages up to the first answer."""
    found: list[dict[str, str]] = []
    for turn in turns:
        role = _ROLES.get(str(turn.get("role") or turn.get("from")))
        if role is None or (role == "assistant" and found):
            break
        if role != "assistant":
            found.append({"role": role, "content": str(turn.get("content") or turn.get("value") or "")})
    return PromptMessages(tuple(found)) if found else None
