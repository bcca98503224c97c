"""Adds the engines that a router's configuration names to its fleet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.config import EngineEndpointConfig, RouterConfig
from penstock.errors import ConfigError
from penstock.rpc.ticket import page_salt
from penstock.rpc.trust import Trust
from router.fleet.engines.engine_follower import EngineFollower
from router.fleet.engines.engine_link import PrefillEnd
from router.fleet.fleet_worker import WorkerRecords
from router.fleet.worker_fleet import WorkerFleet


def follow_engines(config: RouterConfig, model: str, fleet: WorkerFleet, trust: Trust) -> None:
    """Adds every engine to the fleet. Call it on the event loop. Raises ConfigError if an API key cannot be read."""
    followers: dict[str, EngineFollower] = {}

    def root_salt(revision: str) -> bytes:
        return page_salt(trust.secrets.current if trust.secrets is not None else None, revision, "")

    def find_prefill(name: str) -> PrefillEnd | None:
        return followers[name].prefill_end if name in followers else None

    def make(
        name: str,
        engine: EngineEndpointConfig,
        records: WorkerRecords,
        on_change: Callable[[], None],
        on_load: Callable[[], None],
    ) -> EngineFollower:
        followers[name] = EngineFollower(
            name,
            engine,
            model,
            records,
            api_key=_read_key(name, engine),
            root_salt=root_salt,
            find_prefill=find_prefill,
            on_change=on_change,
            on_load=on_load,
        )
        return followers[name]

    for name, engine in config.engines.items():
        fleet.add(partial(make, name, engine))


def _read_key(name: str, engine: EngineEndpointConfig) -> str:
    if not engine.api_key_file:
        return ""
    try:
        return Path(engine.api_key_file).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"engines.{name}.api_key_file = {engine.api_key_file}: {error.strerror}; name a file that this process can "
            "read"
        ) from error
