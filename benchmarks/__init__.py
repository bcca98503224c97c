"""Benchmarks: one room per subject, each started with `python -m benchmarks.NAME` or a `make bench-...` target.

They measure Penstock and a baseline in the same run and write tables to `benchmarks/results/`. Tests use some helpers;
no other room imports from here.
"""

import engine  # noqa: F401  # before torch, which reads the setting for idle threads when it is loaded
