"""Starts workers and a router as plain processes for benchmarks of the serving path: disaggregated or colocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock.config import DecodeConfig, EngineConfig, RouterConfig, TransferConfig, WorkerConfig
from penstock.types import Role
from tests.support.plain_processes import Deployment, Process

SERVED_MODEL = "bench"


@contextmanager
def serving_router(
    model: Path,
    decode: DecodeConfig,
    engine: Mapping[str, object],
    transport: str = "auto",
    is_colocated: bool = False,
    num_threads: int = 2,
) -> Iterator[Process]:
    """Yields a router in front of one prefill and one decode worker with a thread each, or of one colocated worker with
    `num_threads`.
    """

    def worker(role: Role, num_threads: int) -> WorkerConfig:
        return WorkerConfig(
            worker_id=f"{role.value}-0",
            role=role,
            engine=EngineConfig.model_validate({**engine, "model": str(model), "num_threads": num_threads}),
            decode=decode,
            transfer=TransferConfig.model_validate({"transport": transport}),
        )

    configs = [worker(Role.DECODE, num_threads)] if is_colocated else [worker(Role.PREFILL, 1), worker(Role.DECODE, 1)]
    with Deployment() as deployment:
        addresses = tuple(process.address for process in deployment.start_workers(configs))
        yield deployment.start_router(
            RouterConfig(model=str(model), served_model=SERVED_MODEL, grpc_port=0, http_port=0, workers=addresses)
        )
