"""vLLM's CPU build on the workloads of `benchmarks.engine`, in a process of its own; prints one line of JSON.

Decode is what further tokens of a batch cost beside its first ones, because vLLM shows no single step. Names are those
of `benchmarks.engine`, milliseconds of a step or a prompt, seconds of the start.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

BATCHES, CONTEXT, PROMPTS, MORE_TOKENS, ROUNDS = (1, 16, 64), 512, (512, 2048), 16, 3


def main(folder: str, num_threads: int) -> dict[str, float]:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    started_s = time.perf_counter()
    vllm: Any = importlib.import_module("vllm")  # not in every environment
    engine = vllm.LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=max(PROMPTS) + 64,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def run(batch: int, prompt: int, num_tokens: int) -> float:
        """Seconds of the quickest of a few rounds."""
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": [5 + row % 50] * prompt} for row in range(batch)]
        times = []
        for _ in range(ROUNDS):
            begun_s = time.perf_counter()
            engine.generate(prompts, sampling, use_tqdm=False)
            times.append(time.perf_counter() - begun_s)
        return min(times)

    engine.generate([{"prompt_token_ids": [5] * 16}], vllm.SamplingParams(max_tokens=1, detokenize=False))
    found = {"start to first token": time.perf_counter() - started_s}
    for batch in BATCHES:
        more_s = run(batch, CONTEXT, 1 + MORE_TOKENS) - run(batch, CONTEXT, 1)
        found[f"decode step, {batch} at {CONTEXT}"] = more_s / MORE_TOKENS * 1e3
    for prompt in PROMPTS:
        found[f"prompt of {prompt}"] = run(1, prompt, 1) * 1e3
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
