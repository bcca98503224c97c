"""Starts a deployment of the bundled model with an adapter, runs each suite against it, and reports what passed.

The file keeps its results of suites that do not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from penstock.config import DecodeConfig, EngineConfig, RouterConfig, WorkerConfig
from penstock.types import Role
from tests.conformance.suites import ADAPTER, DEFAULT, MODEL, ROOT, SUITES, read_other_results
from tests.support.engine.adapters import make_adapter
from tests.support.plain_processes import Deployment


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-conformance", help="where the suites are installed")
    parser.add_argument(
        "--suites",
        nargs="+",
        choices=SUITES,
        default=DEFAULT,
        help="vllm_bench is not among them: it needs vLLM, as `make bench-vllm` installs it, in --venv",
    )
    parser.add_argument("--max-examples", type=int, default=200, help="cases of schemathesis for each call")
    parser.add_argument("--file", type=Path, help="where the results go, as JSON")
    chosen = parser.parse_args()
    results = read_other_results(chosen.file, chosen.suites)
    with tempfile.TemporaryDirectory() as scratch, Deployment() as deployment:
        adapter = make_adapter(MODEL, Path(scratch) / ADAPTER, size=0.05)
        engine = EngineConfig.model_validate({"model": str(MODEL), "num_threads": 1, "max_adapters": 1})
        workers = [
            WorkerConfig(worker_id=f"{role.value}-0", role=role, engine=engine, decode=DecodeConfig()) for role in Role
        ]
        addresses = tuple(process.address for process in deployment.start_workers(workers))
        router = deployment.start_router(
            RouterConfig(
                model=str(MODEL),
                grpc_port=0,
                http_port=0,
                workers=addresses,
                adapters={ADAPTER: adapter.path},
                default_timeout_s=600.0,
            )
        )
        for name in chosen.suites:
            results[name] = SUITES[name](
                chosen.venv / "bin", f"http://{router.http}", Path(scratch), chosen.max_examples
            )
    for name, result in results.items():
        print(name, result)
    if chosen.file:
        chosen.file.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(results[name]["passed"] for name in chosen.suites) else 1


if __name__ == "__main__":
    sys.exit(main())
