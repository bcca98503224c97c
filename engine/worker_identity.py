"""How a worker around an engine describes itself to routers and to the workers that it moves pages with."""

from __future__ import annotations

import platform
from pathlib import Path

from engine.engine import Engine
from penstock import wire
from penstock.config import WorkerConfig
from penstock.types import Epoch, Labels
from penstock.v1 import worker_pb2


def describe(engine: Engine, config: WorkerConfig, epoch: Epoch) -> worker_pb2.WorkerDescription:
    # A sequence must fit into the pool alone, else it could never finish.
    context_length = min(engine.model.context_length, engine.pool.num_pages * engine.layout.page_size)
    return worker_pb2.WorkerDescription(
        worker_id=config.worker_id,
        epoch=epoch,
        role=config.role.value,
        model=config.served_model or Path(config.engine.model).name,
        model_revision=engine.layout.model_revision,
        page_size=engine.layout.page_size,
        num_pages=engine.pool.num_pages,
        layout_digest=engine.model_layout.digest(),
        context_length=min(context_length, config.engine.max_context or context_length),
        page_bytes=engine.model_layout.page_bytes,
        kv_digest=engine.model_layout.kv_digest(),
        num_ranks=engine.num_ranks,
        silent_cache=config.engine.prefix_caching and not config.engine.kv_events,
        labels=wire.labels_to_wire(
            Labels(config.labels.host or platform.node(), config.labels.rack, config.labels.zone)
        ),
    )
