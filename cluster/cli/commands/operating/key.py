"""`penstock key`: make API keys for tenants, and show the admin token."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from cluster.cli.admin import admin_token
from cluster.cli.options import add_admin_options
from penstock.config.tenants import TENANT_NAME
from penstock.errors import InvalidInput, Unauthenticated
from penstock.rpc.secret import digest_of, make_api_key


def add_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="make a key and show it once")
    new.add_argument("tenant", help="the tenant's name in the configuration")
    admin = commands.add_parser("admin", help="show the admin token, for calls that load and unload adapters")
    add_admin_options(admin)
    new.set_defaults(show=_show_new_key)
    admin.set_defaults(show=_show_admin_token)


def run(arguments: Namespace) -> int:
    arguments.show(arguments)
    return 0


def _show_admin_token(arguments: Namespace) -> None:
    token = admin_token(arguments)
    if not token:
        raise Unauthenticated(
            f"no deployment has left a token for {arguments.admin} here; call from the account that runs it, or give "
            "its --secret-file"
        )
    print(token)


def _show_new_key(arguments: Namespace) -> None:
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
