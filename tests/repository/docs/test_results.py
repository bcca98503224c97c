"""Tests that docs/results.md and its charts show the committed results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.results_page import DOCS, main


def test_the_page_shows_the_committed_results(tmp_path: Path) -> None:
    main(["--docs", str(tmp_path)])
    stale = "docs/results.md is stale: run `make results` (python -m benchmarks.common.results_page)"
    assert (tmp_path / "results.md").read_text() == (DOCS / "results.md").read_text(), stale
    written = {file.name: file.read_text() for file in (tmp_path / "results").iterdir()}
    assert written == {file.name: file.read_text() for file in (DOCS / "results").iterdir()}, stale
