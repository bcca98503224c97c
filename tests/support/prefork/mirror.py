"""`python -m tests.support.prefork.mirror STATUS`: describes its own process, then ends; without STATUS it waits."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

if __name__ == "__main__":
    seen = {
        "pid": os.getpid(),
        "arguments": sys.argv[1:],
        "environment": os.environ.get("ONLY_HERE"),
        "folder": os.getcwd(),
        "num_threads": threading.active_count(),
    }
    print(json.dumps(seen), flush=True)
    print("to the log", file=sys.stderr, flush=True)
    if not sys.argv[1:]:
        signal.pause()
    sys.exit(int(sys.argv[1]))
