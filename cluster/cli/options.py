"""Flags that several commands share, and the settings that they make."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from typing import Any

from penstock.client.auth import ClientTls
from penstock.errors import InvalidInput
from penstock.types import Lane

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[^\]\s/]+)?\]|[^:/\s\[\]]+):(?P<port>\d{1,5})")
_GRPC_NAMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:", "vsock:", "xds:")  # gRPC's other kinds of target


def add_admin_options(parser: ArgumentParser) -> None:
    """Adds the flags of commands that call the Admin service."""
    add = parser.add_argument
    admin = os.environ.get("PENSTOCK_ADMIN", "localhost:50052")
    add(
        "--admin",
        default=admin,
        metavar="HOST:PORT",
        help="the deployment's Admin service; default: $PENSTOCK_ADMIN, else port 50052",
    )
    add("--secret-file", metavar="FILE", help="the deployment's secret, if another account runs it")
    add_tls_options(parser, "PENSTOCK_ADMIN_")


def add_client_options(parser: ArgumentParser) -> None:
    """Adds the flags of commands that call the model."""
    add = parser.add_argument
    server = os.environ.get("PENSTOCK_SERVER", "localhost:50051")
    add(
        "--server",
        default=server,
        metavar="HOST:PORT",
        help="a router's gRPC address; default: $PENSTOCK_SERVER, else localhost:50051",
    )
    add("--api-key", metavar="KEY", help="default: $PENSTOCK_API_KEY, which other users of the machine cannot read")
    add_tls_options(parser)
    add("--lookaside", action="store_true", help="stream from the decode worker itself, if the deployment allows it")
    add("--timeout", type=float, metavar="SECONDS", help="deadline of each answer")
    add("--lane", choices=[lane.value for lane in Lane], help="priority class; default: the caller's own")
    add("--max-tokens", type=int, metavar="N", help="end after so many tokens; default: the end of the context")
    add("--temperature", type=float, metavar="T", help="0 is greedy")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that have this share together")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add("--seed", type=int, metavar="N", help="the same seed samples the same answer")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")


def add_tls_options(parser: ArgumentParser, variables: str = "") -> None:
    """Adds the TLS flags. Their defaults come from environment variables that begin with `variables`."""
    add = parser.add_argument
    found = {name: os.environ.get(f"{variables}{name}") for name in ("CA", "CERT", "CERT_KEY")} if variables else {}
    add("--tls", action="store_true", help="encrypt, and trust the default certificate authorities")
    add("--ca", metavar="FILE", default=found.get("CA"), help="encrypt, and trust this certificate authority (PEM)")
    add(
        "--cert",
        metavar="FILE",
        default=found.get("CERT"),
        help="a client certificate (PEM), with --cert-key",
    )
    add("--cert-key", metavar="FILE", default=found.get("CERT_KEY"), help="the private key of --cert (PEM)")
    add("--server-name", metavar="NAME", help="encrypt, and expect this name in the certificate instead of the host")


def client_tls(arguments: Namespace) -> ClientTls | None:
    """Returns the TLS settings of the call, or None for plain text."""
    if not (arguments.tls or arguments.ca or arguments.cert or arguments.server_name):
        return None
    return ClientTls(arguments.ca, arguments.cert, arguments.cert_key, arguments.server_name)


def check_address(flag: str, address: str, example: str) -> None:
    """Raises InvalidInput unless `address` is HOST:PORT, or a target in one of gRPC's other forms."""
    found = _HOST_PORT.fullmatch(address)
    if found is not None and 0 < int(found["port"]) <= 65535:
        return
    if found is not None or not address.startswith(_GRPC_NAMES):
        raise InvalidInput(flag, f"is {address!r}; give HOST:PORT, such as {example}")


def sampling_fields(arguments: Namespace) -> dict[str, Any]:
    """Returns the sampling fields that were given; the server has defaults for the others."""
    return {name: value for name in _SAMPLING if (value := getattr(arguments, name)) is not None}


def local_folder(model: str, *, config_only: bool = False) -> str:
    """Returns a folder for `model`: itself, or what an id of the Hugging Face Hub is downloaded into.

    Raises CheckpointError or Unavailable that says what to do where that fails.
    """
    from engine.weights.hub import HubModel

    found = HubModel.parse(model)
    return str(found.fetch(config_only=config_only)) if found else model


def require_positive(name: str, seconds: float) -> None:
    """Raises InvalidInput unless `seconds` is above 0."""
    if seconds <= 0:
        raise InvalidInput(name, f"is {seconds:g}; give a number of seconds above 0")
