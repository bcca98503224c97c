"""A loaded engine and the log of its cache's events: what stays when the worker around it changes its role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.engine import Engine
from engine.ranks import Launch
from penstock.config import EngineConfig
from penstock.kv_events import KvEventLog


@dataclass(frozen=True, slots=True)
class Replica:
    """One server at a time works with it. Cached pages and the numbers of their events go on from one to the next."""

    engine: Engine
    events: KvEventLog

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_progress: Callable[[float], None] = lambda share: None,
        launch: Launch | None = None,
    ) -> Replica:
        """Ready for its first request. Blocks; raises CheckpointError or ConfigError."""
        events = KvEventLog()
        engine = Engine.load(config, on_progress, events, launch)
        engine.warm_up()
        return cls(engine, events)

    @property
    def num_pinned_pages(self) -> int:
        """That somebody holds, or that a transfer may still write. None of them may be left when the server changes."""
        return self.engine.pool.num_pages - self.engine.pool.num_available
