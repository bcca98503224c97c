"""Generates the table of features and hand-offs, which docs/features.md shows and `test_matrix` checks cell by cell.

`python -m tests.system.matrix.table --write` writes it into the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.system.matrix.features import FEATURES
from tests.system.matrix.hand_offs import HAND_OFFS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "features.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"

SAME = "same"
WHOLE = "same, computed whole"  # the decode worker computes every token of the prompt
BREAKS = "breaks"  # the client's connection ends without `[DONE]`
ABSENT = "absent"  # such a request does not exist
REFUSED = "refused"  # the workers' configuration is refused by name
STAYS = "same, stays"  # the sequence does not migrate
_CACHED_OR_REMOTE = ("disaggregated", "split", "split, prompts apart", "prefix hit", "pulled", "stored", "lookaside")
_OVER_HTTP = {"lookaside": ABSENT, "router killed": BREAKS}


def cell(feature: str, hand_off: str) -> str:
    """Returns what a client gets: the answer of a single process, unless the cell says otherwise."""
    if FEATURES[feature].over_http and hand_off in _OVER_HTTP:
        return _OVER_HTTP[hand_off]
    if FEATURES[feature].is_batched and hand_off == "lookaside":
        return ABSENT
    if FEATURES[feature].is_alternating and hand_off in ("pulled", "stored"):
        return WHOLE if hand_off == "pulled" else REFUSED
    if FEATURES[feature].has_sinks and hand_off in ("stored", "migrated"):
        return REFUSED if hand_off == "stored" else STAYS
    if FEATURES[feature].scores_prompt and hand_off in _CACHED_OR_REMOTE:
        return WHOLE
    return SAME


CELLS = {(feature, hand_off): cell(feature, hand_off) for feature in FEATURES for hand_off in HAND_OFFS}


def render() -> str:
    lines = [f"| | {' | '.join(HAND_OFFS)} |", f"|---|{'---|' * len(HAND_OFFS)}"]
    for feature in FEATURES:
        lines.append(f"| `{feature}` | {' | '.join(CELLS[feature, hand_off] for hand_off in HAND_OFFS)} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__" and "--write" in sys.argv[1:]:
    PAGE.write_text(with_table(PAGE.read_text()))
