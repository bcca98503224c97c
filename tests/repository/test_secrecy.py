"""Tests that no log holds prompts, answers, keys or secrets, and that no source unpickles data."""

from __future__ import annotations

import ast
import base64
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock import Client
from penstock.config import RouterConfig
from penstock.config.security import SecurityConfig
from penstock.errors import PenstockError
from penstock.rpc.secret import ClusterSecret, digest_of, make_api_key
from penstock.types import Role
from tests.support.plain_processes import Deployment
from tests.support.serving import worker_config

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "penstock-tiny"
MARKER = "xylophone-7361"
FOLDERS = (
    "penstock",
    "engine",
    "kv_transfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
    "simulator",
)


def provoke(address: str, http: str, key: str) -> list[str]:
    """Sends requests that succeed, and requests that fail in each way that might echo input; returns the answers."""
    prompt = f"{MARKER} said the fox. " * 12
    with Client(address, api_key=key, timeout_s=60) as client:
        answers = [client.complete(prompt, max_tokens=12, temperature=0.0, ignore_eos=True).text]
        client.tokenize(prompt)
        for bad in ({"model": MARKER}, {"stop": [MARKER] * 99}, {"request_id": MARKER + "\n"}, {"max_tokens": 10**9}):
            with pytest.raises(PenstockError):
                client.complete(prompt, **bad)
        assert next(client.generate(prompt, max_tokens=200)).token_ids  # then abandons the stream
    with Client(address, api_key=f"{MARKER}-key") as stranger, pytest.raises(PenstockError):
        stranger.complete(prompt)
    for token in (key, f"{MARKER}-key"):
        for body in ({"prompt": prompt, "max_tokens": 4}, {"prompt": [prompt, 3]}, {"messages": MARKER}):
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(
                    f"http://{http}/v1/completions", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60
                )
    return answers


@pytest.mark.processes
def test_no_log_of_any_process_holds_a_prompt_an_answer_a_key_or_the_secret(tmp_path, monkeypatch):
    """Logs at the most verbose level."""
    monkeypatch.setenv("PENSTOCK_LOG", "DEBUG")
    secret, key = ClusterSecret.make(), make_api_key()
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(secret.reveal())
    security = SecurityConfig(secret_file=str(path))
    with Deployment() as deployment:
        configs = [worker_config(role, MODEL).model_copy(update={"security": security}) for role in Role]
        processes = deployment.start_workers(configs)
        config = RouterConfig.model_validate(
            {
                "model": str(MODEL), "grpc_port": 0, "http_port": 0, "security": security,
                "workers": [process.address for process in processes],
                "tenants": {"acme": {"keys": [digest_of(key)]}},
            }
        )  # fmt: skip
        processes.append(deployment.start_router(config))
        answers = provoke(processes[-1].address, processes[-1].http, key)
        logs = {process.log.name: process.log.read_text(errors="replace") for process in processes}
    assert all(logs.values())  # every process has logged
    tokens = [secret.token(use) for use in ("peer token", "admin token", "canary", "page salts")]
    hidden = [MARKER, base64.b64encode(MARKER.encode()).decode()[:16], key, secret.reveal(), *tokens, *answers]
    for name, text in logs.items():
        assert [each for each in hidden if each in text] == [], name


UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load"}
UNSAFE_ATTRIBUTES = {"broadcast_object_list", "send_object_list", "recv_object_list", "all_gather_object", "recv_pyobj"}
UNSAFE_WORDS = re.compile(
    r"\b(" + "|".join({*UNSAFE_MODULES, *UNSAFE_ATTRIBUTES, *(call.split(".")[-1] for call in UNSAFE_CALLS)}) + r")\b"
)


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (ROOT / folder).rglob("*.py")


def unsafe(source: str) -> list[str]:
    """Returns the uses in `source` that could execute bytes from a network or a file."""
    found: list[str] = []
    if not UNSAFE_WORDS.search(source):  # most sources need no parsing
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.Attribute) and node.attr in UNSAFE_ATTRIBUTES:
            found.append(node.attr)
    return found


def test_nothing_is_unpickled():
    assert unsafe("import pickle.x\nfrom dill import a\ntorch.load(f)\neval(x)\ndist.all_gather_object(x)") == [
        "pickle.x", "dill", "torch.load", "eval", "all_gather_object",
    ]  # fmt: skip
    files = list(sources())
    assert len(files) > 100
    assert {str(file): found for file in files if (found := unsafe(file.read_text()))} == {}
