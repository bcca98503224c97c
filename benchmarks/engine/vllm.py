"""Serves vLLM's CPU build to `benchmarks.engine`: a process of vLLM's own interpreter that answers over pipes.

It prints a line after its first token, then, for each line of JSON that it reads (a `RequestBurst`), the seconds that
`LLM.generate` took. It ends with its input. Everything else that vLLM prints goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

from benchmarks.engine.workload import BATCH_TOKENS, BATCHES, KV_TOKENS, PROMPTS, RequestBurst


def make_engine(folder: str) -> tuple[Any, Any]:
    """Returns vLLM and its engine, configured like ours: whole batches of prompts in a step, prefix cache, no text."""
    vllm: Any = importlib.import_module("vllm")  # not in every environment
    tokens_per_gib = 2**30 // kv_bytes_per_token(folder)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(-(-KV_TOKENS // tokens_per_gib)))
    engine = vllm.LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=max(PROMPTS) + 64,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=BATCH_TOKENS,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    return vllm, engine


def kv_bytes_per_token(folder: str) -> int:
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    return int(2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def serve(folder: str, bursts: TextIO, answers: TextIO) -> None:
    vllm, engine = make_engine(folder)

    def run(prompts: list[list[int]], num_tokens: int) -> float:
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        begun_s = time.perf_counter()
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        took_s = time.perf_counter() - begun_s
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == [num_tokens] * len(prompts), f"{counts} tokens came instead of {num_tokens}"
        return took_s

    run([list(range(10, 26))], 1)
    print("ready", file=answers, flush=True)
    for line in bursts:
        burst = RequestBurst(**json.loads(line))
        print(run(burst.prompts(), burst.new_tokens), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.vllm", description=__doc__)
    parser.add_argument("folder", help="the checkpoint's folder")
    folder = parser.parse_args().folder
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(folder, sys.stdin, answers)


if __name__ == "__main__":
    main()
