"""One model replica. Importing the package sets how idle OpenMP threads wait, which torch reads when it is loaded."""

import os

# GNU OpenMP lets idle threads spin for milliseconds, which ruins steps where cores are shared (a decode step took 5
# times as long beside one busy process); sleeping at once costs a tenth of a step on quiet cores. A tenth of a
# millisecond costs neither (measured 2026-11, docs/lab-notes.md). The C++ kernels have threads of their own.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
