"""Makes the annotated trees from the folders and the modules' own first lines, so that they cannot grow old.

README.md has the folders, docs/modules.md every module. `python -m tests.readme_tree --write` puts them there.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 118
COLUMN = 30

FOLDERS = {
    "proto/": "the protocol: public API, workers, administration",
    "penstock/": "the shared vocabulary and the public client; neither torch nor ray",
    "engine/": "one model replica; no gRPC, no ray",
    "kv_transfer/": "pages between pools: transports, fences, hand-shakes",
    "prefill_worker/": "computes prompts and pushes their pages",
    "decode_worker/": "owns requests and streams their tokens",
    "router/": "the front: tokenizes, chooses the pair, streams text; neither torch nor ray",
    "cluster/": "Ray: pools, controller, command line",
    "simulator/": "the same decisions in virtual time: trace replays, faults by seed",
    "benchmarks/": "each prints a table and writes results/NAME.json",
    "models/": "the bundled model, a smaller one that only tests load, and the script that trains both",
    "deploy/": "manifests: ray up, KubeRay, a Helm chart, the image, example configurations",
    "docs/": "architecture, every module, deployment, security, runbooks, lab notes",
    "tests/": "unit, property, process and fault tests",
}
PAGES = {"README.md": False, "docs/modules.md": True}  # whether each module is named
BLOCK = re.compile(r"```tree\n.*?```", re.DOTALL)


def make_tree(*, modules: bool) -> str:
    lines = []
    for folder, note in FOLDERS.items():
        lines.append(_line(0, folder, note))
        if modules and folder not in ("benchmarks/", "models/", "deploy/", "docs/", "tests/"):
            lines += _children(ROOT / folder, 1)
    return "\n".join(["```tree", *lines, "```"])


def _children(folder: Path, depth: int) -> list[str]:
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.name.startswith(("__", ".")) or "_pb2" in path.name or path not in _tracked():
            continue
        if path.is_dir():
            lines.append(_line(depth, f"{path.name}/", "generated stubs" if path.name == "v1" and depth == 1 else ""))
            lines += _children(path, depth + 1)
        elif path.suffix in (".py", ".proto", ".cpp", ".h"):
            lines.append(_line(depth, path.name, _first_line(path)))
    return lines


@functools.cache
def _tracked() -> frozenset[Path]:
    """Files and the folders that hold them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    return frozenset(path for file in files for path in (file, *file.parents))


def _first_line(path: Path) -> str:
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
    else:
        found = re.match(r"(?://|/\*+)\s*(.*)", path.read_text())
        text = found.group(1) if found else ""
    return text.split("\n")[0].rstrip(".")


def _line(depth: int, name: str, note: str) -> str:
    line = f"{'  ' * depth}{name}".ljust(COLUMN) + note
    return line.rstrip() if len(line) <= WIDTH else line[: WIDTH - 1].rsplit(" ", 1)[0].rstrip(" ,;:(") + " …"


def main() -> None:
    for path, modules in PAGES.items():
        page = ROOT / path
        text = page.read_text()
        assert BLOCK.search(text), f"{path} has no ```tree block"
        tree = make_tree(modules=modules)
        if "--write" in sys.argv:
            page.write_text(BLOCK.sub(lambda _: tree, text))  # noqa: B023
        else:
            print(tree)


if __name__ == "__main__":
    main()
