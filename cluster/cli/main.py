"""The `penstock` command. Exit status: 0 success, 2 an error that the message explains, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

from cluster.cli import commands
from penstock.errors import PenstockError
from penstock.process import set_up_logging

ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    set_up_logging("penstock")
    try:
        return int(arguments.run(arguments))
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of the pipe has gone
        return 0


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser from the modules of `cluster.cli.commands`: `plan_memory.py` is `penstock plan-memory`.

    Each module defines HELP, `add_arguments(parser)` and `run(arguments)`, which returns the exit status. Modules are
    imported for every command, so they import Ray, torch and rich only where they run.
    """
    parser = argparse.ArgumentParser(prog="penstock", description="Serve a language model, or call one that is served.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for info in pkgutil.iter_modules(commands.__path__):
        command = importlib.import_module(f"{commands.__name__}.{info.name}")
        subparser = subparsers.add_parser(info.name.replace("_", "-"), help=command.HELP)
        subparser.set_defaults(run=command.run)
        command.add_arguments(subparser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
