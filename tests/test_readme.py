"""The README tells the truth: its tree is the repository's, its make targets exist, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.readme_tree import FOLDERS, PAGES, make_tree

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tree_is_that_of_the_repository() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for page, modules in PAGES.items():
        tree = make_tree(modules=modules)
        assert tree in (ROOT / page).read_text(), "run `python -m tests.readme_tree --write`"


def test_every_folder_is_in_the_tree() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    ignored = {name for name in folders if not any((ROOT / name).rglob("*.*"))} | {"build", "dist"}
    packages = {name for name in folders - ignored if not name.endswith(".egg-info")}
    assert packages <= {name.rstrip("/") for name in FOLDERS}


def test_no_module_is_without_a_first_line() -> None:
    assert not [line for line in make_tree(modules=True).splitlines() if re.search(r"\.(py|proto|cpp|h)$", line)]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"(?m)(?:`|^)make ([a-z-]+)", README)) <= targets


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_ci_runs_the_readme_test_command() -> None:
    assert "make test" in README
    assert "make test" in (ROOT / ".ci" / "run").read_text()
