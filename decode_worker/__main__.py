"""Runs `python -m decode_worker --config FILE`."""

import sys

import uvloop

from decode_worker.server import DecodeServer
from worker.main import main

if __name__ == "__main__":
    sys.exit(main(DecodeServer, uvloop.run))
