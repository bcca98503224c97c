"""Holds a loaded engine and the log of its cache's events, which both stay when their worker changes its role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.engine import Engine
from engine.parallel.leader import Launch
from penstock.config import EngineConfig
from penstock.kv.events import KvEventLog


@dataclass(frozen=True, slots=True)
class Replica:
    """Used by one server at a time. Cached pages and the numbering of their events carry over from one to the next."""

    engine: Engine
    events: KvEventLog

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_progress: Callable[[float], None] = lambda share: None,
        launch: Launch | None = None,
        *,
        has_prompt_stream: bool = False,
    ) -> Replica:
        """Loads an engine and warms it up for its first request; see `Engine.load`. Blocks; raises CheckpointError or
        ConfigError.
        """
        events = KvEventLog()
        engine = Engine.load(config, on_progress, events, launch, has_prompt_stream=has_prompt_stream)
        engine.warm_up()
        return cls(engine, events)

    @property
    def num_pinned_pages(self) -> int:
        """Pages that are referenced or that a transfer may still write. There must be none when one server replaces
        another.
        """
        return self.engine.pool.num_pages - self.engine.pool.num_available
