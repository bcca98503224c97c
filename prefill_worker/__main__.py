"""Runs `python -m prefill_worker --config FILE`."""

import sys

import uvloop

from prefill_worker.server import PrefillServer
from worker.main import main

if __name__ == "__main__":
    sys.exit(main(PrefillServer, uvloop.run))
