"""Starts a deployment of the bundled model and runs each suite against it; reports what passed."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.config import DecodeConfig, EngineConfig, RouterConfig, WorkerConfig
from penstock.types import Role
from tests.support.plain_processes import Deployment

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "penstock-tiny"
_SUITE_TIMEOUT_S = 1800.0
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
_CASES = re.compile(r"(\d+) generated")
_OUTCOMES = re.compile(r"(\d+) (passed|failed|skipped|xfailed|errors?)")


def run_schemathesis(bins: Path, url: str, scratch: Path, max_examples: int) -> dict[str, object]:
    """Sends generated cases of every call in the OpenAPI document: no 5xx, and no status that it does not name."""
    settings = scratch / "schemathesis.toml"
    settings.write_text("")
    command = [
        *(str(bins / "schemathesis"), "--config-file", str(settings), "run", f"{url}/openapi.json"),
        *("--checks", ",".join(_CHECKS), "--max-examples", str(max_examples), "--phases", "examples,coverage,fuzzing"),
        *(
            "--request-timeout",
            "120",
            "--seed",
            "1",
            "--generation-database",
            "none",
            "--no-color",
            "--warnings",
            "off",
        ),
    ]
    status, output = _run(command, {})
    cases = _CASES.search(output)
    return {"passed": status == 0, "cases": int(cases[1]) if cases else 0}


def run_langchain(bins: Path, url: str, scratch: Path, max_examples: int) -> dict[str, object]:
    """Runs LangChain's standard tests of chat models with its OpenAI client."""
    suite = Path(__file__).with_name("langchain_suite.py")
    command = [
        *(str(bins / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"),
        *("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"),  # its clients keep connections
        str(suite),
    ]
    environment = {"PENSTOCK_URL": url, "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "PYTHONPATH": ""}
    status, output = _run(command, environment)
    counts = {word: int(count) for count, word in _OUTCOMES.findall(output)}
    return {"passed": status == 0, **counts}


SUITES: Mapping[str, Callable[[Path, str, Path, int], dict[str, object]]] = {
    "schemathesis": run_schemathesis,
    "langchain": run_langchain,
}


def _run(command: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Returns the exit status and the output of a command, which may take `_SUITE_TIMEOUT_S`."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SUITE_TIMEOUT_S,
        check=False,
    )
    print(done.stdout, flush=True)
    return done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-conformance", help="where the suites are installed")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--max-examples", type=int, default=200, help="cases of schemathesis for each call")
    parser.add_argument("--file", type=Path, help="where the results go, as JSON")
    chosen = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch, Deployment() as deployment:
        engine = EngineConfig.model_validate({"model": str(MODEL), "num_threads": 1})
        workers = [
            WorkerConfig(worker_id=f"{role.value}-0", role=role, engine=engine, decode=DecodeConfig()) for role in Role
        ]
        addresses = tuple(process.address for process in deployment.start_workers(workers))
        router = deployment.start_router(
            RouterConfig(model=str(MODEL), grpc_port=0, http_port=0, workers=addresses, default_timeout_s=60.0)
        )
        for name in chosen.suites:
            results[name] = SUITES[name](
                chosen.venv / "bin", f"http://{router.http}", Path(scratch), chosen.max_examples
            )
    for name, result in results.items():
        print(name, result)
    if chosen.file:
        chosen.file.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
