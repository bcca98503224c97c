"""Runs other projects' commands against a deployment, and reports what passed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import jsonschema

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "penstock-tiny"
ADAPTER = "adapted"  # the deployment's adapter
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
    """Sends generated cases of every call in the OpenAPI document: no 5xx, and no undocumented status."""
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


def run_clients(bins: Path, url: str, scratch: Path, max_examples: int) -> dict[str, object]:
    """Runs OpenAI's and Anthropic's own clients through their features, with the model and with its adapter."""
    return _run_pytest(bins, url, "clients_suite.py")


def run_langchain(bins: Path, url: str, scratch: Path, max_examples: int) -> dict[str, object]:
    """Runs LangChain's standard tests of chat models with its OpenAI and Anthropic clients."""
    return _run_pytest(bins, url, "langchain_suite.py")


def _run_pytest(bins: Path, url: str, file: str) -> dict[str, object]:
    command = [
        *(str(bins / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"),
        *("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"),  # its clients keep connections
        str(Path(__file__).with_name(file)),
    ]
    environment = {"PENSTOCK_URL": url, "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "PYTHONPATH": ""}
    status, output = _run(command, environment)
    counts = {word: int(count) for count, word in _OUTCOMES.findall(output)}
    return {"passed": status == 0, "tests": counts.pop("passed", 0), **counts}


def run_lm_eval(bins: Path, url: str, scratch: Path, max_examples: int) -> dict[str, object]:
    """Runs lm-eval's local-completions over log-likelihoods of endings and over texts; the model must prefer most of
    the right endings, which random likelihoods would not."""
    model = {
        "model": "penstock-tiny",
        "base_url": f"{url}/v1/completions",
        "num_concurrent": 4,
        "max_retries": 1,
        "tokenizer_backend": "huggingface",
        "tokenizer": MODEL,
        "max_length": 2048,
    }
    command = [
        *(str(bins / "lm_eval"), "run", "--model", "local-completions", "--tasks", "penstock"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--include_path", str(Path(__file__).with_name("tasks")), "--output_path", str(scratch / "lm_eval")),
    ]
    status, _ = _run(command, {"HF_HUB_OFFLINE": "1"})
    files = sorted((scratch / "lm_eval").rglob("results*.json"))
    found = json.loads(files[-1].read_text())["results"] if files else {}
    accuracy = next((each["acc,none"] for each in found.values() if "acc,none" in each), 0.0)
    return {"passed": status == 0 and len(found) >= 2 and accuracy >= 0.7, "accuracy": round(accuracy, 3)}


def run_guidellm(bins: Path, url: str, scratch: Path, max_examples: int) -> dict[str, object]:
    """Runs GuideLLM's synthetic load with 8 streams; every request must succeed."""
    report = scratch / "guidellm.json"
    command = [
        *(str(bins / "guidellm"), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url}", "--profile", "kind=concurrent,streams=8"),
        *("--constraint", "kind=max_requests,count=40"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL}", "--output", f"kind=json,path={report}"),
    ]
    status, _ = _run(command, {"HF_HUB_OFFLINE": "1"})
    made = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"] if report.exists() else {}
    counts = {name: made.get(name, 0) for name in ("successful", "errored", "incomplete")}
    return {"passed": status == 0 and counts == {"successful": 40, "errored": 0, "incomplete": 0}, **counts}


# vLLM's CPU build has another package name than its command line expects.
_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


# Asks for a grammar whose outputs are all shorter than 96 tokens, so that none is cut off.
_ANSWER = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "choice": {"enum": ["red", "green", "blue"]}},
    "required": ["sure", "choice"],
}
_GRAMMARS: Mapping[str, object] = {
    "openai": {"structured_outputs": {"json": _ANSWER}},
    "openai-chat": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _ANSWER}},
    },
}
_ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def run_vllm_bench(bins: Path, url: str, scratch: Path, max_examples: int) -> dict[str, object]:
    """Runs `vllm bench serve` with 1000 prompts at once, and with 200 as chats and with grammars: none may be refused
    and no answer cut off. Needs vLLM in the environment."""
    found: dict[str, object] = {}
    passed = True
    for backend, has_grammar, num_prompts in (
        ("openai", False, 1000),
        ("openai-chat", False, 200),
        ("openai", True, 200),
        ("openai-chat", True, 200),
    ):
        report = _bench_serve(bins, url, scratch, backend, has_grammar, num_prompts)
        name = f"{backend} with a grammar" if has_grammar else backend
        found[name] = {key: report.get(key) for key in ("completed", "failed", "whole", "duration", "median_itl_ms")}
        passed = passed and report.get("completed") == report.get("whole") == num_prompts
    return {"passed": passed, **found}


def _bench_serve(
    bins: Path, url: str, scratch: Path, backend: str, has_grammar: bool, num_prompts: int
) -> dict[str, object]:
    """Returns the report of a run, with the number of complete answers."""
    report, num_output = scratch / "vllm.json", 96 if has_grammar else 32
    report.unlink(missing_ok=True)
    command = [
        *(str(bins / "python"), "-c", _BENCH_SERVE, "--backend", backend, "--endpoint", _ENDPOINTS[backend]),
        *("--base-url", url, "--model", "penstock-tiny", "--tokenizer", str(MODEL), "--dataset-name", "random"),
        *("--random-input-len", "128", "--random-output-len", str(num_output), "--num-prompts", str(num_prompts)),
        *("--request-rate", "inf", "--save-result", "--save-detailed", "--result-filename", str(report)),
        *(("--extra-body", json.dumps(_GRAMMARS[backend])) if has_grammar else ("--ignore-eos",)),
    ]
    status, _ = _run(command, {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    if status != 0 or not report.exists():
        return {}
    found: dict[str, object] = json.loads(report.read_text())
    if has_grammar:
        found["whole"] = sum(_is_answer(text) for text in found["generated_texts"])  # type: ignore[attr-defined]
    else:
        found["whole"] = sum(length == num_output for length in found["output_lens"])  # type: ignore[attr-defined]
    return found


def _is_answer(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), _ANSWER)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


SUITES: Mapping[str, Callable[[Path, str, Path, int], dict[str, object]]] = {
    "schemathesis": run_schemathesis,
    "clients": run_clients,
    "langchain": run_langchain,
    "lm_eval": run_lm_eval,
    "guidellm": run_guidellm,
    "vllm_bench": run_vllm_bench,
}
DEFAULT = tuple(name for name in SUITES if name != "vllm_bench")


def read_other_results(file: Path | None, chosen: Collection[str]) -> dict[str, dict[str, object]]:
    """Returns the file's results of the suites that are not chosen; none if there is no file yet."""
    if file is None or not file.exists():
        return {}
    return {name: result for name, result in json.loads(file.read_text()).items() if name not in chosen}


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
