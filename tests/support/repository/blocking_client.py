"""Generates the blocking client in penstock/client from the asyncio one, or checks that it is current.

Drops `async` and `await`, renames what is listed in NAMES, removes statements marked `# async only` and restores those
behind `# sync only:`. `python -m tests.support.repository.blocking_client --write` writes the files.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CLIENT = ROOT / "penstock" / "client"
FILES = {"async_stream.py": "sync_stream.py", "async_client.py": "sync_client.py"}
NAMES = {
    "AsyncClient": "Client",
    "AsyncGenerateStream": "GenerateStream",
    "AsyncRoutedCall": "RoutedCall",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aiter": "iter",
    "anext": "next",
    "async_io": "sync_io",
    "async_stream": "sync_stream",
}
# Replacements in docstrings and comments.
PHRASES = {
    "The public client for asyncio.": "The blocking public client.",
    "of the asyncio client": "of the blocking client",
    "Make and use it inside one running event loop.": "Thread-safe; connects on first use.",
    "async with": "with",
    "async for": "for",
    "Waits for": "Blocks until",
    "and while another reader waits": "and from another thread",
}
_ASYNC_ONLY = "# async only"
_SYNC_ONLY = re.compile(r"(?m)^( *)# sync only: ")


def rewrite(source: str, name: str) -> str:
    """Returns the blocking counterpart of `source`, the text of penstock/client/`name`."""
    header = f"# Generated from penstock/client/{name} by tests/support/repository/blocking_client.py (make client).\n"
    tokens = _rewrite_tokens(_SYNC_ONLY.sub(r"\1", _drop_async_only(source)))
    sorted_imports = _ruff(header + tokens, "check", "--select", "I", "--fix", "--quiet")
    return _ruff(sorted_imports, "format")


def _ruff(source: str, *command: str) -> str:
    arguments = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(CLIENT / "generated.py"), "-"]
    return subprocess.run(arguments, input=source, capture_output=True, text=True, check=True, timeout=60).stdout


def _drop_async_only(source: str) -> str:
    """Removes each statement whose first line ends with the mark, functions with their bodies."""
    lines = source.splitlines(keepends=True)
    dropped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and lines[node.lineno - 1].rstrip().endswith(_ASYNC_ONLY):
            assert node.end_lineno is not None
            dropped |= set(range(node.lineno, node.end_lineno + 1))
    return "".join(line for number, line in enumerate(lines, 1) if number not in dropped)


def _rewrite_tokens(source: str) -> str:
    rewritten: list[str] = []
    last = 0
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type == tokenize.NAME and token.string in ("async", "await"):
            new, end = "", end + 1  # including the blank after it
        elif token.type == tokenize.NAME:
            new = NAMES.get(token.string, token.string)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            new = _rewrite_text(token.string)
        else:
            continue
        rewritten += (source[last:start], new)
        last = end
    return "".join(rewritten) + source[last:]


def _rewrite_text(text: str) -> str:
    for phrase, other in (PHRASES | NAMES).items():
        text = re.sub(rf"\b{re.escape(phrase)}" if phrase[0].isalnum() else re.escape(phrase), other, text)
    return text


def stale() -> list[str]:
    """Returns the generated files that differ from what their sources give."""
    return [
        made
        for source, made in FILES.items()
        if not (CLIENT / made).exists() or (CLIENT / made).read_text() != rewrite((CLIENT / source).read_text(), source)
    ]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        for source, made in FILES.items():
            (CLIENT / made).write_text(rewrite((CLIENT / source).read_text(), source))
    elif found := stale():
        sys.exit(f"stale: {', '.join(found)}; run `make client`")
