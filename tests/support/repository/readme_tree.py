"""Makes the annotated tree of README.md from the root folders.

`python -m tests.support.repository.readme_tree --write` writes it into README.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COLUMN = 20

FOLDERS = {
    "proto/": "the protocol: public API, workers, administration",
    "penstock/": "the public client and the shared vocabulary; neither torch nor ray",
    "engine/": "one model replica: steps, KV pages, kernels, models; no gRPC, no ray",
    "kv_transfer/": "pages between workers: sessions, transports, layouts",
    "worker/": "what both kinds of worker process share",
    "prefill_worker/": "computes prompts and pushes their pages",
    "decode_worker/": "owns requests and streams their tokens",
    "router/": "authenticates, admits, tokenizes, chooses the pair, streams text; neither torch nor ray",
    "cluster/": "Ray, the controller, scaling, the command line",
    "simulator/": "the same decisions in virtual time: trace replays, seeded faults",
    "benchmarks/": "each prints a table and writes results/NAME.json with charts",
    "models/": "the bundled model, a draft model and an EAGLE-3 head for it, and the code that trains them",
    "deploy/": "ray up, KubeRay, a Helm chart, the image, example configurations",
    "docs/": "quickstarts, concepts, one page a folder, references, deployment, runbooks, results, lab notes",
    "tests/": "unit, property, process and fault tests; they mirror this tree",
}
BLOCK = re.compile(r"```tree\n.*?```", re.DOTALL)


def make_tree() -> str:
    """Returns the fenced block."""
    lines = [f"{folder.ljust(COLUMN)}{note}" for folder, note in FOLDERS.items()]
    return "\n".join(["```tree", *lines, "```"])


def main() -> None:
    page = ROOT / "README.md"
    text = page.read_text()
    assert BLOCK.search(text), "README.md has no ```tree block"
    if "--write" in sys.argv:
        page.write_text(BLOCK.sub(lambda _: make_tree(), text))
    else:
        print(make_tree())


if __name__ == "__main__":
    main()
