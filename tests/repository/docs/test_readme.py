"""Tests that the README's tree matches the repository, its make targets exist, and every link and anchor resolves."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.repository.readme_tree import FOLDERS, make_tree

ROOT = Path(__file__).resolve().parents[3]
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


def test_served_latencies_are_those_of_the_committed_result() -> None:
    """The table has the figures of both rates, to two or three digits."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "serving.json").read_text())["rows"]
    measured = {row["metric"]: row["value"] for row in rows}
    of_vllm = {row["metric"]: row["baseline_value"] for row in rows if row["baseline"] == "vLLM colocated"}

    def cell(values: dict[str, float], figure: str, side: str) -> str:
        found = (values[f"{figure} at {rate}/s, {side}"] for rate in (2, 4))
        return " / ".join(f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in found)

    for name, values, side in (
        ("colocated", measured, "colocated"),
        ("1 prefill + 1 decode", measured, "1P+1D"),
        ("vLLM (CPU build), one server", of_vllm, "colocated"),
    ):
        figures = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "output")
        cells = [cell(values, figure, side) for figure in figures]
        assert f"| {name} | {' | '.join(cells)} |" in README


def make_anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives the headings of `page`; repeated headings are numbered."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    anchors: list[str] = []
    for heading in re.findall(r"(?m)^#+ +(.*)", text):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchors.append(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return {name + (f"-{n}" if (n := anchors[:i].count(name)) else "") for i, name in enumerate(anchors)}


def test_every_anchor_exists() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            linked = page.parent / target if target else page
            if linked.suffix == ".md":
                assert anchor in make_anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_ci_runs_the_readme_test_command() -> None:
    assert "make test" in README
    assert "make test" in (ROOT / ".ci" / "run").read_text()
