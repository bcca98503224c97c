"""Every `penstock` command: its name, what its help line says, and the room of `cluster/cli/commands` that holds it.

The catalog is read for each call, so that `--help` and mistyped names import no command at all.
"""

from __future__ import annotations

import difflib
import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast


class CommandModule(Protocol):
    """A command: `plan_memory.py` is `penstock plan-memory`. Its module docstring says what it does."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Adds the command's flags."""

    def run(self, arguments: Namespace) -> int:
        """Runs the command and returns its exit status."""


@dataclass(frozen=True)
class CommandGroup:
    """The commands of one room, and their lines in `penstock --help`."""

    room: str
    title: str
    help_lines: Mapping[str, str]


GROUPS = (
    CommandGroup(
        "running",
        "start and end",
        {"serve": "start a deployment and keep it up", "stop": "end the deployment"},
    ),
    CommandGroup(
        "calling",
        "call the model",
        {"generate": "stream an answer to the terminal", "chat": "talk with the model"},
    ),
    CommandGroup(
        "inspecting",
        "look",
        {
            "status": "show the workers and their load",
            "top": "watch pools, workers, pages, tokens/s and latencies",
            "trace": "show where one request's time went, and why its workers were chosen",
            "events": "show what happened to the workers, and why",
            "explain": "show why the autoscaler changed a pool, or did not",
            "doctor": "look for faults, with advice for each; exit status 1 with problems",
        },
    ),
    CommandGroup(
        "operating",
        "change",
        {
            "scale": "change how many workers a pool has",
            "drain": "empty a worker, or all of a node, and end it; streams continue elsewhere",
            "flip": "change a worker's role; its weights and cached pages stay",
            "upgrade": "replace every worker, by another revision or by new code",
            "key": "make API keys for tenants",
        },
    ),
    CommandGroup(
        "sizing",
        "measure and plan",
        {
            "bench": "send traffic to any OpenAI-compatible server, measure latencies and goodput, compare results",
            "traffic": "describe a trace: lengths, bursts, reuse, and what caches of any size would hit",
            "plan": "size both pools for traffic, latency targets and priced accelerators, and say why",
            "plan-memory": "show what a model and its KV pages take of a device, and how many requests fit",
            "fit": "write what steps cost on a running deployment, for the simulator and for planning",
        },
    ),
    CommandGroup("shell", "set up your shell", {"completion": "print a script that completes commands and flags"}),
)


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
