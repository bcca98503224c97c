"""Measures how soon a stream continues after its decode worker was killed, with its KV kept and without.

A local Ray serves the 135M shape (bf16, one thread) from one decode worker without prefill workers, with a warm spare,
in turns with a keeper and without (`make bench-kept`). The time from SIGKILL to the next token includes noticing the
loss, the spare taking the place of the worker, its canary, and copying or recomputing the KV of the stream. Every
stream must have the tokens of an undisturbed one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.cluster.status_follower import StatusFollower, worker
from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import LLAMA_135M, random_llama
from cluster.ray.launch import RayDeployment, launch
from penstock.client.sync_client import Client
from penstock.config import KeeperConfig, PoolConfig, ServeConfig

TARGET_S = 1.0
PROMPT_TOKENS = (500, 1500, 3000)
KILLED_AFTER = 24  # tokens of the stream
WORKER = "decode-0"
_SAMPLING: dict[str, Any] = {"max_tokens": 96, "temperature": 0.8, "seed": 1, "ignore_eos": True}


@dataclass(slots=True)
class Resumed:
    """Collects what clients saw of the kills of one deployment, by the length of the prompt."""

    seconds: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # kill to next token
    cached_tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by the new worker


def config(keeps: bool) -> ServeConfig:
    return ServeConfig(
        model=str(random_llama()),
        http_port=0,
        grpc_port=0,
        admin_port=0,
        prefill_pool=PoolConfig(replicas=0),
        decode_pool=PoolConfig(replicas=1, num_cpus=0.5, spares=1),
        engine={"num_pages": 1200, "dtype": "bfloat16", "num_threads": 1},
        keeper=KeeperConfig(name=f"bench-{uuid.uuid4().hex}") if keeps else None,
    )


def settled(deployment: RayDeployment) -> int:
    """Waits until the worker and its spare are ready. Returns the worker's process id."""
    status = StatusFollower(deployment).until(
        lambda status: (
            status.ready
            and worker(status, WORKER).state == "ready"
            and [each.state for each in status.spares] == ["warm"]
        )
    )
    return worker(status, WORKER).pid


def kill_once(deployment: RayDeployment, prompt: Sequence[int], found: Resumed) -> None:
    """Kills the worker of a stream and records when the stream continues. Raises RuntimeError if a token differs."""
    with Client(deployment.grpc_address, timeout_s=120) as client:
        expected = client.complete(prompt, **_SAMPLING).token_ids
        pid, tokens, times_s, cached = settled(deployment), list[int](), list[float](), 0
        for chunk in client.generate(prompt, **_SAMPLING):
            tokens += chunk.token_ids
            if times_s:
                times_s.append(time.monotonic())
            elif len(tokens) >= KILLED_AFTER:
                os.kill(pid, signal.SIGKILL)
                times_s.append(time.monotonic())
            if chunk.timing is not None:
                cached = chunk.timing.cached_tokens
    if tuple(tokens) != expected:
        raise RuntimeError(f"a stream of {len(prompt)} tokens has other tokens after a kill")
    # Tokens that were sent before the kill may arrive after it; the stream continues where its longest gap ends.
    _, end_s = max(pairwise(times_s), key=lambda gap: gap[1] - gap[0])
    found.seconds[len(prompt)].append(end_s - times_s[0])
    found.cached_tokens[len(prompt)].append(cached)


def measure(keeps: bool, repeats: int, found: Resumed) -> None:
    rng = random.Random(0)
    with launch(config(keeps)) as deployment:
        for length in PROMPT_TOKENS:
            for _ in range(repeats):
                kill_once(deployment, rng.choices(range(3, LLAMA_135M["vocab_size"]), k=length), found)


def rows(kept: Resumed, lost: Resumed) -> list[Row]:
    found = []
    for length in PROMPT_TOKENS:
        seconds, label = kept.seconds[length], f"{length} tokens of prompt"
        ways = {
            "KV kept": (statistics.median(seconds), "s, median"),
            "KV kept, worst": (max(seconds), "s"),
            "recomputed": (statistics.median(lost.seconds[length]), "s, median"),
        }
        for way, (value, unit) in ways.items():
            found.append(Row(f"{label}, killed to next token, {way}", value, unit, "target", TARGET_S))
        found.append(Row(f"{label}, not recomputed, KV kept", min(kept.cached_tokens[length]), "tokens, fewest"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster.kept",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=1, help="deployments of each kind, alternating")
    parser.add_argument("--repeats", type=int, default=5, help="kills for each length of prompt in each deployment")
    arguments = parser.parse_args()
    kept, lost = Resumed(), Resumed()
    for _ in range(arguments.rounds):
        measure(True, arguments.repeats, kept)
        measure(False, arguments.repeats, lost)
    workload = f"one stream, {arguments.rounds} x {arguments.repeats} kills of each; 135M Llama, bf16, one thread"
    publish("kept", workload, rows(kept, lost))


if __name__ == "__main__":
    main()
