"""`penstock stop`: end the deployment."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from cluster.cli.admin import admin_call
from cluster.cli.options import add_admin_options
from cluster.cli.progress import Progress
from penstock.v1 import admin_pb2

_TIMEOUT_S = 90.0


def add_arguments(parser: ArgumentParser) -> None:
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    with Progress("stopping; requests in flight may finish"):
        admin_call(arguments, "Stop", admin_pb2.StopRequest(), _TIMEOUT_S)
    print("stopped")
    return 0
