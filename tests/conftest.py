"""What must be settled before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Triton reads this when it is first imported, which any library may do: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each call that ends with its process is a line of the output
