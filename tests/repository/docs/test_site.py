"""Tests mkdocs.yml without MkDocs: its navigation has every page once, and nothing is fetched from elsewhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site import hooks

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python functions that are not needed here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def listed(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        values = entry.values() if isinstance(entry, dict) else [entry]
        for value in values:
            yield from listed(value) if isinstance(value, list) else [value]


def test_the_navigation_has_every_page_once() -> None:
    found = Counter(listed(CONFIG["nav"]))
    assert set(found) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(found.values()) == {1}


def test_nothing_is_fetched_from_elsewhere() -> None:
    assert CONFIG["theme"]["font"] is False
    for file in (*CONFIG["extra_css"], *CONFIG.get("extra_javascript", ())):
        assert (DOCS / file).exists()
        assert "//" not in re.sub(r"/\*.*?\*/", "", (DOCS / file).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_reads_the_same_on_github_and_on_the_site(page: Path) -> None:
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text())
    assert re.match(r"# \S", text), "begins with its title"
    for target in re.findall(r"!?\[[^\]]*\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).resolve().is_relative_to(DOCS), f"{target} is not a part of the site"
            assert not target.endswith("/"), f"{target}: name the page"
    lines = text.splitlines()
    for before, line in pairwise(lines):
        if re.match(r"([*-]|1\.) ", line) and before.strip() and not re.match(r" *([*-]|\d+\.) |  ", before):
            pytest.fail(f"{line[:60]!r}: the site needs an empty line before a list")
        if line.startswith("|") and before.strip() and not before.startswith(("|", "<!--")):
            pytest.fail(f"{line[:60]!r}: the site needs an empty line before a table")


@pytest.mark.parametrize("has_script", [True, False])
def test_diagrams_use_the_script_from_the_environment(
    has_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Config:
        def __init__(self) -> None:
            self.extra_javascript: list[str] = []
            self.mdx_configs = {"pymdownx.superfences": {"custom_fences": ["mermaid"]}}

    script = tmp_path / "mermaid.min.js"
    if has_script:
        script.write_text("")
    monkeypatch.setenv("PENSTOCK_DOCS_MERMAID", str(script))
    config = hooks.on_config(Config())
    assert bool(config.extra_javascript) is has_script
    assert bool(config.mdx_configs["pymdownx.superfences"]["custom_fences"]) is has_script
