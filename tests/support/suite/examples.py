"""Sets how many examples a property test takes: the same in every run, and many times as many with `make test-deep`."""

from __future__ import annotations

import os

from hypothesis import settings

DEPTH = "PENSTOCK_TEST_DEPTH"  # an environment variable with the factor by which examples are multiplied


def examples(count: int, **options: object) -> settings:
    """Returns settings with `count` examples in an ordinary run, however long each takes."""
    return settings(max_examples=count * int(os.environ.get(DEPTH, "1")), deadline=None, **options)  # type: ignore[arg-type]
