"""Finds every `penstock` command: a file in a room of `cluster/cli/commands` that begins with "`penstock NAME`: ...".

Only these first lines are read, so that `--help` and mistyped names import no command at all.
"""

from __future__ import annotations

import difflib
import importlib
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, cast

_COMMAND = re.compile(r'"""`penstock (?P<name>[a-z-]+)`: (?P<text>.+?)\.(?:""")?')


class CommandModule(Protocol):
    """A command: `plan_memory.py` is `penstock plan-memory`. Its docstring begins with its name and its help line."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Adds the command's flags."""

    def run(self, arguments: Namespace) -> int:
        """Runs the command and returns its exit status."""


@dataclass(frozen=True)
class CommandGroup:
    """The commands of one room, and their lines in `penstock --help`."""

    room: str
    title: str

    @cached_property
    def help_lines(self) -> Mapping[str, str]:
        """The lines by the names of the commands, in alphabetical order."""
        first_lines = map(_first_line, sorted((Path(__file__).parent / "commands" / self.room).glob("*.py")))
        return {found["name"]: found["text"] for line in first_lines if (found := _COMMAND.fullmatch(line))}


GROUPS = (
    CommandGroup("running", "start and end"),
    CommandGroup("calling", "call the model"),
    CommandGroup("inspecting", "look"),
    CommandGroup("operating", "change"),
    CommandGroup("sizing", "measure and plan"),
    CommandGroup("shell", "set up your shell"),
)

# Shown at the end of `penstock COMMAND --help`. A test parses each line.
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "import-gguf": ("penstock import-gguf model.Q8_0.gguf ./model",),
    "serve": (
        "penstock serve --model penstock-tiny --decode 2",
        "penstock serve --config deploy/config/gpu-host.toml --model meta-llama/Llama-3.1-8B-Instruct",
    ),
    "demo": ("penstock demo",),
    "stop": ("penstock stop",),
    "chat": ("penstock chat --system 'Answer in one sentence.'",),
    "generate": ("penstock generate --timing 'Once upon a time'", "penstock generate --explain - < prompt.txt"),
    "doctor": ("penstock doctor", "penstock doctor --model ./model"),
    "events": ("penstock events -f",),
    "explain": ("penstock explain decode --changes",),
    "status": ("penstock status --wait 120", "penstock status --json"),
    "top": ("penstock top", "penstock top -n 1 --json"),
    "trace": ("penstock trace cmpl-cbb6360b82f6418a8352e1e3aa393405",),
    "drain": ("penstock drain decode-1", "penstock drain --node NODE --within 60"),
    "flip": ("penstock flip decode-1 prefill",),
    "key": ("penstock key new acme",),
    "scale": ("penstock scale decode 4 --wait 120",),
    "upgrade": ("penstock upgrade --model ./model-v2 --share 0.1",),
    "weights": ("penstock weights update ./step-2000 --mode keep", "penstock weights status"),
    "bench": (
        "penstock bench run --url http://localhost:8000/v1 --rate 2,4,8 --requests 200",
        "penstock bench compare before after",
    ),
    "fit": ("penstock fit costs.json",),
    "plan": ("penstock plan --model ./model --accelerator H100=2.5 --rate 20 --input-tokens 2000 --ttft 1",),
    "plan-memory": ("penstock plan-memory ./model --device 80GiB --tp 4",),
    "traffic": ("penstock traffic trace.jsonl",),
    "completion": ("source <(penstock completion bash)", "penstock completion fish | source"),
}


def _first_line(file: Path) -> str:
    with file.open(encoding="utf-8") as opened:
        return opened.readline().rstrip()


def find_group(name: str) -> CommandGroup | None:
    """Returns the group that holds a command, or None."""
    return next((group for group in GROUPS if name in group.help_lines), None)


def load_command(group: CommandGroup, name: str) -> CommandModule:
    """Imports a command."""
    module = importlib.import_module(f"cluster.cli.commands.{group.room}.{name.replace('-', '_')}")
    return cast(CommandModule, module)


def format_groups() -> str:
    """Returns the commands by group, a line each, for `penstock --help`."""
    width = max(len(name) for group in GROUPS for name in group.help_lines)
    lines: list[str] = []
    for group in GROUPS:
        lines += ["", f"{group.title}:"]
        lines += [f"  {name:{width}}  {text}" for name, text in group.help_lines.items()]
    return "\n".join(lines)


def suggest_command(name: str) -> str:
    """Returns `; did you mean ...?` for a mistyped command, or nothing."""
    near = difflib.get_close_matches(name, [known for group in GROUPS for known in group.help_lines], n=1)
    return f"; did you mean {near[0]}?" if near else ""
