"""The parser of one command: a mistyped flag is answered with the nearest one and the usage of that command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Prints errors under the command's own usage, with exit status 2, and examples at the end of its help."""

    examples: Sequence[str] = ()

    def format_help(self) -> str:
        shown = "".join(f"  {line}\n" for line in self.examples)
        return super().format_help() + (f"\nexamples:\n{shown}" if shown else "")

    def error(self, message: str) -> NoReturn:
        """Prints the message, with the nearest flag if it names an unknown one, and exits."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message += suggest_flag(self, unknown.split()[0])
        super().error(message)


def suggest_flag(parser: argparse.ArgumentParser, word: str) -> str:
    """Returns `; did you mean ...?` for a mistyped flag, or nothing."""
    if not word.startswith("-"):
        return ""
    near = difflib.get_close_matches(word.partition("=")[0], list(flags_of(parser)), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the long flags of a parser."""
    for action in parser._actions:
        yield from (flag for flag in action.option_strings if flag.startswith("--"))


def nested_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of a command's own commands by name, such as those of `penstock bench run`."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found
