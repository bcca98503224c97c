"""`penstock completion`: print a script that completes commands and flags."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping

from cluster.cli.catalog import GROUPS
from cluster.cli.command_parser import flags_of, nested_parsers

Tree = Mapping[str, ArgumentParser]  # the parser of each command


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell to print a script for")
    parser.epilog = "zsh needs compinit first."


def run(arguments: Namespace) -> int:
    sys.stdout.write(SCRIPTS[arguments.shell](_parsers()))
    return 0


def _parsers() -> Tree:
    """Returns the parser of each command; one without flags for commands that this installation cannot run."""
    from cluster.cli.main import make_parser  # it imports the catalog, which names this command

    found: dict[str, ArgumentParser] = {}
    for name in [name for group in GROUPS for name in group.help_lines]:
        try:
            found |= nested_parsers(make_parser(name))
        except ModuleNotFoundError:
            found[name] = ArgumentParser(name, add_help=False)
    return found


def words_of(parser: ArgumentParser) -> list[str]:
    """Returns what may follow a command: the names of its own commands and choices, then flags of all of these."""
    found = dict.fromkeys(_choices(parser))
    for name, inner in nested_parsers(parser).items():
        found |= dict.fromkeys([name, *words_of(inner)])
    return list(found | dict.fromkeys(flags_of(parser)))


def _choices(parser: ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            yield from map(str, action.choices or ())


def bash_script(tree: Tree) -> str:
    """Returns a script that completes a word from the lists, and files where no list fits."""
    cases = [f'    {name}) words="{" ".join(words_of(parser))}" ;;' for name, parser in tree.items()]
    return "\n".join(
        [
            "_penstock() {",
            "  local word=${COMP_WORDS[COMP_CWORD]} words",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    words="{" ".join(tree)} --help --version"',
            "  else",
            "    case ${COMP_WORDS[1]} in",
            *(f"  {case}" for case in cases),
            "    esac",
            "  fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o default -F _penstock penstock",
            "",
        ]
    )


def zsh_script(tree: Tree) -> str:
    """Returns the script for bash, after lines that let zsh run it."""
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash_script(tree)


def fish_script(tree: Tree) -> str:
    """Returns a line for each command and for each word that may follow it."""
    lines = []
    for group in GROUPS:
        for name, text in group.help_lines.items():
            lines.append(f"complete -c penstock -n __fish_use_subcommand -a {name} -d {_quoted(text)}")
            for word in words_of(tree[name]):
                what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
                lines.append(f"complete -c penstock -n '__fish_seen_subcommand_from {name}' {what}")
    return "\n".join([*lines, "complete -c penstock -n __fish_use_subcommand -l version", ""])


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Tree], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
