"""The README tells the truth: its tree is the repository's, its make targets exist, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()

# Folders whose files the tree names one by one.
LISTED = ("penstock", "engine", "kv_transfer", "prefill_worker", "decode_worker", "router", "cluster")


def tracked_files() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listing.stdout.splitlines() if (ROOT / name).exists()]


def tree_entries() -> set[str]:
    """Paths that the README's tree names; names are indented by two spaces a level and end where the text begins."""
    block = re.search(r"```tree\n(.*?)```", README, re.DOTALL)
    assert block, "README.md has no ```tree block"
    parents: list[str] = []
    entries = set()
    for line in block.group(1).splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        names = line.strip().split("  ")[0]
        parents = parents[:indent]
        for name in names.split():
            entries.add("/".join([*parents, name.rstrip("/")]))
        parents.append(names.split()[0].rstrip("/"))
    return entries


def test_the_tree_names_every_folder_and_every_module() -> None:
    files = tracked_files()
    folders = {name.split("/")[0] for name in files if "/" in name and not name.startswith(".")}
    modules = {
        name
        for name in files
        if name.split("/")[0] in LISTED and name.endswith(".py") and "_pb2" not in name and "__init__" not in name
    }
    assert (folders | modules) - tree_entries() == set(), "missing from the README's tree"


def test_the_tree_names_nothing_else() -> None:
    files = tracked_files()
    known = set(files) | {str(parent) for name in files for parent in Path(name).parents}
    assert tree_entries() - known == set(), "the README's tree names what is not there"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_ci_runs_the_readme_test_command() -> None:
    assert "make test" in README
    assert "make test" in (ROOT / ".ci" / "run").read_text()
