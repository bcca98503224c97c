"""Makes the README's annotated tree from the modules' own first lines, so that it cannot grow old.

`python -m tests.readme_tree --write` puts it into README.md.
"""

from __future__ import annotations

import ast
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
    "models/": "the bundled model, its draft, and the script that trains them",
    "deploy/": "manifests: ray up, KubeRay, a Helm chart, the image, example configurations",
    "docs/": "architecture.md, lab-notes.md",
    "tests/": "unit, property, process and fault tests",
}
BLOCK = re.compile(r"```tree\n.*?```", re.DOTALL)


def make_tree() -> str:
    lines = []
    for folder, note in FOLDERS.items():
        lines.append(_line(0, folder, note))
        if folder not in ("benchmarks/", "models/", "deploy/", "docs/", "tests/"):
            lines += _children(ROOT / folder, 1)
    return "\n".join(["```tree", *lines, "```"])


def _children(folder: Path, depth: int) -> list[str]:
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.name.startswith(("__", ".")) or "_pb2" in path.name or not _tracked(path):
            continue
        if path.is_dir():
            lines.append(_line(depth, f"{path.name}/", "generated stubs" if path.name == "v1" and depth == 1 else ""))
            lines += _children(path, depth + 1)
        elif path.suffix in (".py", ".proto", ".cpp", ".h"):
            lines.append(_line(depth, path.name, _first_line(path)))
    return lines


def _tracked(path: Path) -> bool:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", str(path)]
    return bool(subprocess.run(command, cwd=ROOT, capture_output=True, timeout=30, check=True).stdout)


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
    readme = ROOT / "README.md"
    text = readme.read_text()
    assert BLOCK.search(text), "README.md has no ```tree block"
    if "--write" in sys.argv:
        readme.write_text(BLOCK.sub(lambda _: make_tree(), text))
    else:
        print(make_tree())


if __name__ == "__main__":
    main()
