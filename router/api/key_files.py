"""Reads files that operators may replace while a router runs: the tenants and the metrics token."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import RouterConfig, load
from penstock.config.tenants import TenantsFile
from penstock.errors import ConfigError
from penstock.rpc.reload import FileWatcher
from penstock.rpc.secret import read_private
from router.api.identity import TenantDirectory


def watch_tenants(config: RouterConfig, watcher: FileWatcher) -> Callable[[], TenantDirectory]:
    """Returns a function that returns the current tenants. Raises ConfigError."""
    if not config.tenants_file:
        directory = TenantDirectory(config.tenants)
        return lambda: directory
    path = config.tenants_file

    def read() -> TenantDirectory:
        try:
            return TenantDirectory(load(TenantsFile, path).tenants)
        except ConfigError as error:
            raise ConfigError(f"tenants_file = {path}: {error.message}") from None

    files = watcher.watch("tenants_file", (path,), read)
    return lambda: files.value


def watch_metrics_token(config: RouterConfig, watcher: FileWatcher) -> Callable[[], str]:
    """Returns a function that returns the current bearer token of /metrics, "" if there is none. Raises ConfigError."""
    path = config.metrics_token_file
    if not path:
        return lambda: ""

    def read() -> str:
        token = read_private(path, "metrics_token_file")
        if not token:
            raise ConfigError(f"metrics_token_file = {path}: the file is empty; write a token into it")
        return token

    files = watcher.watch("metrics_token_file", (path,), read)
    return lambda: files.value
