"""`python -m tests.support.repository.reference [--write]`: writes the pages, or says which are stale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.repository.reference import grpc_page, http_page, python_page

FOLDER = Path(__file__).resolve().parents[4] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "http.md": http_page.render,
    "grpc.md": grpc_page.render,
    "python.md": python_page.render,
}


def stale_pages() -> list[str]:
    """Returns the names of the pages that differ from the code."""
    return [
        name
        for name, render in PAGES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text() != render()
    ]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        for name, render in PAGES.items():
            (FOLDER / name).write_text(render())
    elif stale := stale_pages():
        sys.exit(f"stale: {', '.join(stale)}: python -m tests.support.repository.reference --write")
