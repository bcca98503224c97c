"""Starts the modes: deployments of two workers with the same number of threads each, and vLLM on the cores of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

from benchmarks.common.vllm_process import Vllm, own_cores
from benchmarks.serving.deployments import SERVED_MODEL
from benchmarks.serving.vllm_server import VllmServer
from penstock.config import DecodeConfig, EngineConfig, RouterConfig, WorkerConfig
from penstock.types import Role
from tests.support.plain_processes import Deployment, wait_until_followed

COLOCATED, SPLIT, AUTO, VLLM = "2 colocated", "1P+1D", "1P+1D auto", "vLLM"
_MAX_SEQUENCES, _NUM_PAGES, _MAX_CONTEXT = 64, 6000, 4096

Placement = Literal["auto", "remote", "local"]


def modes(model: Path, vllm: Vllm | None, itl_target_s: float | None) -> Mapping[str, AbstractContextManager[str]]:
    """Returns the modes by name; entering one starts it and gives its HTTP address.

    Decode workers bound by `itl_target_s` the steps in which they compute chunks of prompts.
    """
    found: dict[str, AbstractContextManager[str]] = {
        COLOCATED: _penstock(model, (Role.DECODE, Role.DECODE), "local", itl_target_s),
        SPLIT: _penstock(model, (Role.PREFILL, Role.DECODE), "remote", itl_target_s),
        AUTO: _penstock(model, (Role.PREFILL, Role.DECODE), "auto", itl_target_s),
    }
    if vllm is not None:
        found[VLLM] = _vllm(model, vllm)
    return found


@contextmanager
def _penstock(model: Path, roles: tuple[Role, Role], placement: Placement, itl_target_s: float | None) -> Iterator[str]:
    """Starts a worker of each role, each bound to its own core, and a router in front of them."""
    configs = [
        WorkerConfig(
            worker_id=f"{role.value}-{index}",
            role=role,
            engine=EngineConfig.model_validate({"model": str(model), "num_threads": 1, "num_pages": _NUM_PAGES}),
            decode=DecodeConfig(max_batch_sequences=_MAX_SEQUENCES, placement=placement, itl_target_s=itl_target_s),
        )
        for index, role in enumerate(roles)
    ]
    cores = own_cores(2)
    with Deployment() as deployment:
        workers = deployment.start_workers(configs, cores if len(cores) == 2 else ())
        addresses = tuple(worker.address for worker in workers)
        router = deployment.start_router(
            RouterConfig(model=str(model), served_model=SERVED_MODEL, grpc_port=0, http_port=0, workers=addresses)
        )
        wait_until_followed(router, len(workers))
        yield router.http


@contextmanager
def _vllm(model: Path, vllm: Vllm) -> Iterator[str]:
    """Starts one server with both cores: vLLM's own way to use them."""
    with VllmServer(vllm, model, own_cores(2), _MAX_SEQUENCES, _MAX_CONTEXT) as server:
        yield server.address
