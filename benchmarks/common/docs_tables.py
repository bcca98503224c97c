"""Writes tables of benchmarks into pages of docs/, between two lines that mark the place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_between(file: Path, begin: str, end: str, body: str) -> None:
    """Replaces the text between the lines `begin` and `end` of a page, which must have both."""
    text = file.read_text()
    assert begin in text, f"{file} has no line {begin}"
    whole = "\n\n".join([begin, body, end])
    file.write_text(re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: whole, text, flags=re.DOTALL))
