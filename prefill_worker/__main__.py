"""`python -m prefill_worker --config FILE`."""

import sys

import uvloop

from penstock.worker_main import main
from prefill_worker.server import PrefillServer

if __name__ == "__main__":
    sys.exit(main(PrefillServer, uvloop.run))
