"""Tests that the README's tree matches the repository, its make targets exist, and every link in the docs resolves."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.repository.readme_tree import FOLDERS, make_tree

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_tree_matches_the_repository() -> None:
    assert make_tree() in README, "run `python -m tests.support.repository.readme_tree --write`"


def test_every_folder_is_in_the_tree() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    ignored = {name for name in folders if not any((ROOT / name).rglob("*.*"))} | {"build", "dist"}
    packages = {name for name in folders - ignored if not name.endswith(".egg-info")}
    assert packages <= {name.rstrip("/") for name in FOLDERS}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"(?m)(?:`|^)make ([a-z-]+)", README)) <= targets


def test_every_link_resolves() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_ci_runs_the_readme_test_command() -> None:
    assert "make test" in README
    assert "make test" in (ROOT / ".ci" / "run").read_text()
