"""`penstock key`: make API keys for tenants."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from penstock.config.tenants import TENANT_NAME
from penstock.errors import InvalidInput
from penstock.rpc.secret import digest_of, make_api_key


def add_arguments(parser: ArgumentParser) -> None:
    new = parser.add_subparsers(required=True, metavar="COMMAND").add_parser("new", help="make a key and show it once")
    new.add_argument("tenant", help="the tenant's name in the configuration")


def run(arguments: Namespace) -> int:
    """Prints a new key, which is stored nowhere, and the configuration that holds its digest."""
    if not TENANT_NAME.fullmatch(arguments.tenant):
        raise InvalidInput("tenant", f"is {arguments.tenant!r}; give letters, digits, '-' and '_', 64 at most")
    key = make_api_key()
    print(key)
    print(
        f"The key of tenant {arguments.tenant}; it is shown only once. Put its digest into the configuration:\n\n"
        f'[tenants.{arguments.tenant}]\nkeys = ["{digest_of(key)}"]',
        file=sys.stderr,
    )
    return 0
