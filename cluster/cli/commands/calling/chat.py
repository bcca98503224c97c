"""`penstock chat`: talk with the model."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from cluster.cli.client import open_client, with_key_advice
from cluster.cli.commands.calling.generate import print_stream
from cluster.cli.options import add_client_options, sampling_fields
from penstock.charts.table import printable
from penstock.client.results import ChatMessage
from penstock.client.sync_client import Client
from penstock.errors import PenstockError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message at the start of the conversation")
    add_client_options(parser)


def run(arguments: Namespace) -> int:
    """Reads a line, streams the answer, keeps both as history. Ctrl-C ends the answer, Ctrl-D the conversation.

    The exit status is 2 if the last answer failed, so that a script that pipes its lines in sees it.
    """
    exit_status = 0
    messages: list[ChatMessage] = []
    if arguments.system:
        messages.append({"role": "system", "content": arguments.system})
    prompt = "> " if sys.stdin.isatty() else ""
    with open_client(arguments) as client:
        while True:
            try:
                line = input(prompt).strip()
            except (EOFError, KeyboardInterrupt):
                if prompt:
                    print()
                return exit_status
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            answer = _answer(client, arguments, messages)
            exit_status = 2 if answer is None else 0
            if answer is None:
                messages.pop()  # a turn that failed is not part of the conversation
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(client: Client, arguments: Namespace, messages: list[ChatMessage]) -> str | None:
    try:
        with client.generate(messages, lane=arguments.lane, **sampling_fields(arguments)) as stream:
            return print_stream(stream).text
    except PenstockError as error:
        print(printable(with_key_advice(error, arguments.server).message), file=sys.stderr)
        return None
