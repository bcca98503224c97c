"""What a client sees of the KV transfer: the time from a stream's first token to its second, over every wire.

The first token is sampled by the prefill worker and relayed at once; the second needs every page here and one decode
step. One prefill and one decode worker with a core each, the 135M shape in bf16, one request at a time.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from itertools import pairwise

from benchmarks.shapes import random_llama
from cluster.processes import Deployment
from penstock import AsyncClient
from penstock.config import DecodeConfig, EngineConfig, RouterConfig, TransferConfig, WorkerConfig
from penstock.types import Role

_NUM_REQUESTS = 7  # the first one does not count
_MAX_TOKENS = 12
_TIMEOUT_S = 60.0


def exposed(wire: str, num_tokens: int) -> tuple[float, float]:
    """Seconds from the first token to the second, and of one decode step; medians over requests of `num_tokens`."""
    model = str(random_llama())

    def worker(name: str, role: Role) -> WorkerConfig:
        return WorkerConfig(
            worker_id=name,
            role=role,
            engine=EngineConfig(model=model, num_threads=1, num_pages=1000, prefix_caching=False),
            decode=DecodeConfig(placement="remote"),
            transfer=TransferConfig.model_validate({"transport": wire}),
        )

    with Deployment() as deployment:
        started = deployment.start_workers([worker("prefill-0", Role.PREFILL), worker("decode-0", Role.DECODE)])
        addresses = tuple(process.address for process in started)
        router = deployment.start_router(RouterConfig(model=model, grpc_port=0, http_port=0, workers=addresses))
        return asyncio.run(_measure(router.address, num_tokens))


async def _measure(address: str, num_tokens: int) -> tuple[float, float]:
    rng = random.Random(0)
    firsts: list[float] = []
    steps: list[float] = []
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        for number in range(_NUM_REQUESTS):
            prompt = rng.choices(range(3, 32000), k=num_tokens)
            times = []
            stream = client.generate(prompt, max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
            async for chunk in stream:
                times += [time.perf_counter()] * len(chunk.token_ids)
            if number:
                firsts.append(times[1] - times[0])
                steps += [later - earlier for earlier, later in pairwise(times[1:])]
    return statistics.median(firsts), statistics.median(steps)
