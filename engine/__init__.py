"""A model replica: its weights, its KV pages, and the step that computes a batch of sequences.

Workers take `Engine`, `Replica` and what schedulers need (`engine.step`, `engine.cache`). The engine imports no grpc
and no ray; it knows neither requests nor transfers. Importing the package sets how idle OpenMP threads wait, which
torch reads when it is loaded.
"""

import os

# GNU OpenMP lets idle threads spin for milliseconds, which ruins steps on shared cores (a decode step took 5 times as
# long next to one busy process); sleeping at once costs a tenth of a step on quiet cores. Spinning for a tenth of a
# millisecond costs neither (measured 2026-11, docs/lab-notes/). The C++ kernels have threads of their own.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
