"""The `penstock` command. Exit status: 0 success, 2 an error that the message explains, 130 after Ctrl-C, which ends a
`serve` that is ready with 0."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

from cluster.cli.catalog import EXAMPLES, GROUPS, find_group, format_groups, load_command, suggest_command
from cluster.cli.command_parser import CommandParser, nested_parsers
from penstock.charts.table import printable
from penstock.process.setup import set_up_logging

ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] != ["serve"]:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC's own log lines precede error messages
    from penstock.errors import (
        PenstockError,  # it imports gRPC, which reads that variable, and which --help does without
    )

    try:
        arguments = _parse(words)
        set_up_logging("penstock")
        return int(arguments.run(arguments))
    except PenstockError as error:
        print(f"penstock: {printable(error.message)}", file=sys.stderr)
        return ERROR
    except ModuleNotFoundError as error:
        if find_spec((error.name or "penstock").partition(".")[0]) is not None:
            raise  # the package is installed, but one of its modules is missing
        print(f"penstock: {error.name} is not installed; run: pip install 'penstock[serve]'", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of the pipe has gone
        return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the words. An unknown flag ends the process with the usage of its own command."""
    names = _command_of(words)
    parser = make_parser(*names)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        command = nested_parsers(parser).get(names[0], parser)
        inner = nested_parsers(command)
        action = next((inner[word] for word in words[1:] if word in inner), command)
        action.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def _version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:  # a source tree that nobody installed
        return "of an unknown version"


def make_parser(*names: str) -> argparse.ArgumentParser:
    """Builds the parser of these commands, or of all of them without names. It imports the commands it parses."""
    parser = CommandParser(
        prog="penstock",
        usage="penstock COMMAND ...",
        description="Serve a language model, or call one that is served.",
        epilog=f"{format_groups()}\n\n`penstock COMMAND --help` shows the flags of a command, and examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.examples = [EXAMPLES[name][0] for name in ("serve", "generate", "status", "bench")]
    parser.add_argument("--version", action="version", version=f"penstock {_version()}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    for group in GROUPS:
        for name, text in group.help_lines.items():
            if names and name not in names:
                continue
            command = load_command(group, name)
            subparser = subparsers.add_parser(
                name, prog=f"penstock {name}", description=f"{text[0].upper()}{text[1:]}."
            )
            subparser.examples = EXAMPLES[name]
            subparser.set_defaults(run=command.run)
            command.add_arguments(subparser)
    return parser


def _command_of(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the command to import; none where the words only ask for help."""
    if not words or words[0].startswith("-"):
        return ("",)
    if find_group(words[0]) is None:
        from penstock.errors import InvalidInput

        raise InvalidInput("command", f"{words[0]!r} is unknown{suggest_command(words[0])}; see penstock --help")
    return (words[0],)


if __name__ == "__main__":
    sys.exit(main())
