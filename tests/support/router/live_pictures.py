"""Takes pictures of the live page for the docs: `python -m tests.support.router.live_pictures` writes them to
docs/images.

A deployment of two prefill and two decode workers on an embedded Ray is shown idle, under load, during a drain and
after a kill. Only the pictures of 200 workers have made-up state, because no such fleet is at hand.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.support.router.browser import Page, browser_page

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "router" / "live" / "page"
MODEL = ROOT / "models" / "penstock-tiny"
_START_S, _TIMEOUT_S = 300.0, 60.0
_HTTP, _GRPC, _ADMIN = 18450, 18451, 18452
_WIDE, _PHONE = (1280, 900), (390, 844)
_SETTINGS = f"""
model = "{MODEL}"
http_port = {_HTTP}
grpc_port = {_GRPC}
admin_port = {_ADMIN}
routers = 1
[prefill_pool]
replicas = 2
[decode_pool]
replicas = 2
[decode]
placement = "remote"
max_batch_sequences = 24
"""


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Runs `penstock serve` until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "serve.toml"), Path(folder, "log")
        config.write_text(_SETTINGS)
        with log.open("w") as output:
            command = [sys.executable, "-m", "cluster.cli", "serve", "--config", str(config)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            limit_s = time.monotonic() + _START_S
            while not _is_ready():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < limit_s, log.read_text()
                time.sleep(0.5)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_TIMEOUT_S)


def _is_ready() -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{_HTTP}/ready", timeout=5).status_code == 200
    return False


def penstock(*argv: str) -> str:
    """Runs a command of an operator, and returns what it prints."""
    command = [sys.executable, "-m", "cluster.cli", *argv, "--admin", f"localhost:{_ADMIN}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=_START_S).stdout


@contextlib.contextmanager
def load(num_callers: int = 8, longest: int = 256) -> Iterator[None]:
    """Sends prompts of several lengths, some with a common beginning, until the block ends."""
    stopping, numbers = threading.Event(), itertools.count()

    def call() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{_HTTP}", timeout=_TIMEOUT_S) as http:
            while not stopping.wait(0.05):
                number = next(numbers)
                prompt = f"Story {number % 7}." + " and then" * (8 << number % 6) + f" {number}"
                http.post(
                    "/v1/completions", json={"prompt": prompt, "max_tokens": longest >> number % 4, "ignore_eos": True}
                )

    with ThreadPoolExecutor(num_callers) as pool:
        for _ in range(num_callers):
            pool.submit(call)
        try:
            yield
        finally:
            stopping.set()


def shoot(page: Page, name: str, size: tuple[int, int] = _WIDE, *, dark: bool = False) -> None:
    """Writes the whole page as a picture."""
    page.resize(*size, dark=dark)
    time.sleep(1.5)  # the page shows new state once a second
    page.resize(size[0], max(size[1], int(page.evaluate("document.documentElement.scrollHeight"))), dark=dark)
    time.sleep(1.5)
    page.screenshot(IMAGES / f"{name}.png")


def shoot_deployment(page: Page) -> None:
    """Writes the pictures of a real deployment."""
    page.resize(*_WIDE)
    page.open(f"http://127.0.0.1:{_HTTP}/ui/")
    page.wait_for("document.querySelectorAll('.worker').length === 4")
    shoot(page, "live-page-idle")
    with load():
        time.sleep(60)
        page.evaluate("document.querySelector('#play button').click()")
        page.wait_for("document.querySelector('#way .stages') !== null")
        shoot(page, "live-page")
        shoot(page, "live-page-dark", dark=True)
        shoot(page, "live-page-phone", _PHONE)
        page.resize(1280, 1900)
        workers = {each["member"]["worker_id"]: each for each in json.loads(penstock("status", "--json"))["workers"]}
        os.kill(workers["decode-0"]["pid"], signal.SIGKILL)
        page.wait_for(
            "![...document.querySelectorAll('#figures strong')].some((each) => each.textContent === '4 of 4')"
        )
        page.screenshot(IMAGES / "live-page-kill.png")
    penstock("status", "--wait", "120")
    # Both workers are full, so sequences must finish where they are.
    with load(num_callers=48, longest=1024), ThreadPoolExecutor(1) as pool:
        time.sleep(20)
        drained = pool.submit(penstock, "drain", "decode-1")
        page.wait_for("document.querySelector('[data-worker=\"decode-1\"].leaving') !== null")
        page.screenshot(IMAGES / "live-page-drain.png")
        drained.result()


def made_up_state(rng: random.Random, after: int) -> dict[str, Any]:
    """Returns the state of 80 prefill and 120 decode workers under load; 60 requests end in each second."""
    now_s, number = time.time(), int(time.time() * 60) % 1_000_000
    fresh = range(max(after + 1, number - 300), number + 1)
    return {
        "unix_time_s": now_s,
        "router": "1",
        "model": "llama-3.1-8b",
        "slo": {"ttft_s": 1.0, "ttft_token_s": 0.0, "itl_s": 0.05},
        "workers": [
            _worker(rng, role, index, now_s)
            for role, size in (("prefill", 80), ("decode", 120))
            for index in range(size)
        ],
        "lanes": {"interactive": 3, "standard": 14, "bulk": 122},
        "in_flight": 3400,
        "saturation": 0.62,
        "spares": {},
        "ends": {},
        "last_request": number,
        "requests": [_request(rng, each, now_s - (number - each) / 60) for each in fresh],
    }


def _worker(rng: random.Random, role: str, index: int, now_s: float) -> dict[str, Any]:
    own = random.Random(f"{role} {index}")
    share = min(1.0, max(0.0, own.uniform(0.1, 0.95) + rng.uniform(-0.05, 0.05)))
    tokens = int(now_s % 100_000 * own.uniform(900, 1300))
    return {
        "id": f"{role}-{index}", "role": role, "epoch": str(index), "host": f"node-{index // 8}", "cohort": "",
        "ready": index != 40 and (role, index) != ("decode", 81),
        "leaving": index in (52, 105), "avoided": index in (36, 73),
        "running": int(48 * share), "waiting": 0, "sent": 0, "max_running": 48, "pages": 9000,
        "free_pages": int(9000 * own.uniform(0.05, 0.8)), "queued_prefill_tokens": int(8192 * share),
        "prefill_tokens": tokens if role == "prefill" else 0, "decode_tokens": tokens if role == "decode" else 0,
        "step_ms": 24.0 * own.uniform(0.7, 1.3), "cache_queries": 1000, "cache_hits": int(1000 * own.uniform(0.3, 0.7)),
        "metrics": {},
    }  # fmt: skip


def _request(rng: random.Random, number: int, ended_s: float) -> dict[str, Any]:
    prompt, output = int(rng.lognormvariate(7.3, 0.8)), int(rng.lognormvariate(5.2, 0.6)) + 2
    prefill_ms, queue_ms = prompt * rng.uniform(0.05, 0.08), rng.expovariate(1 / 40)
    decode_ms = output * rng.uniform(18, 36)
    stages = {
        "tokenize": 1.2, "admission": 0.4, "placement": 0.3, "queue": queue_ms, "prefill": prefill_ms,
        "transfer": rng.uniform(1, 6), "decode queue": rng.uniform(2, 20), "decode": decode_ms,
    }  # fmt: skip
    return {
        "number": number, "request_id": f"{rng.getrandbits(32):08x}", "ended_s": ended_s,
        "lane": rng.choice(["interactive", "standard", "standard", "bulk"]), "finish_reason": "stop",
        "prompt_tokens": prompt, "cached_tokens": 64 * int(prompt * rng.uniform(0, 0.8) / 64), "output_tokens": output,
        "stages_ms": stages, "decode_ms": decode_ms,
        "first_token_ms": sum(stages.values()) - decode_ms + rng.uniform(3, 12),
        "prefill_worker": f"prefill-{rng.randrange(80)}", "decode_worker": f"decode-{rng.randrange(120)}",
        "pages_moved": prompt // 16 + 1, "preemptions": 0, "migrations": 0, "redispatches": 0,
    }  # fmt: skip


def made_up_controller() -> dict[str, Any]:
    now_s = time.time()
    event = {"what": "ready", "reason": "model loaded"}
    return {
        "mode": "on",
        "events": [{"unix_time_s": now_s - 30 * n, "subject": f"decode-{n}", **event} for n in range(8, 0, -1)],
        "scaling": [
            {"unix_time_s": now_s - 60, "pool": "decode", "verdict": "grow", "current": 120, "decided": 124,
             "reason": "ITL p90 of 47 ms is near 50 ms"}
        ],
    }  # fmt: skip


class MadeUpRouter(BaseHTTPRequestHandler):
    """Serves the page's own files, and made-up state."""

    def do_GET(self) -> None:
        path, _, query = self.path.removeprefix("/ui/").partition("?")
        if path == "state":
            after = int(dict(part.split("=") for part in query.split("&")).get("after") or 0)
            return self._send(json.dumps(made_up_state(random.Random(), after)).encode(), "application/json")
        if path == "controller":
            return self._send(json.dumps(made_up_controller()).encode(), "application/json")
        file = PAGE / (path or "index.html")
        if not file.is_file():
            return self.send_error(404)
        kinds: Mapping[str, str] = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
        return self._send(file.read_bytes(), kinds[file.suffix])

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def shoot_many(page: Page) -> None:
    """Writes the pictures of 200 workers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), MadeUpRouter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page.resize(*_WIDE)
        page.open(f"http://127.0.0.1:{server.server_port}/ui/")
        page.wait_for("document.querySelectorAll('.worker').length === 200")
        time.sleep(45)
        shoot(page, "live-page-200-light")
        shoot(page, "live-page-200-dark", dark=True)
        shoot(page, "live-page-200-phone", _PHONE)
    finally:
        server.shutdown()


def main() -> None:
    with browser_page() as page:
        if "--made-up-only" not in sys.argv:
            with served():
                shoot_deployment(page)
        shoot_many(page)


if __name__ == "__main__":
    main()
