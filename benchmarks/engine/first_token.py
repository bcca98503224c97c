"""Loads a checkpoint and samples one token; `benchmarks.engine` starts it as a process and times it from outside."""

from __future__ import annotations

import sys

PROMPT = list(range(10, 26))


def main(subject: str, folder: str, num_threads: int) -> None:
    if subject == "penstock":
        from engine.engine import Engine
        from engine.generate import generate
        from penstock.config import EngineConfig
        from penstock.types import SamplingParams

        engine = Engine.load(EngineConfig(model=folder, num_threads=num_threads, num_pages=64))
        print(generate(engine, PROMPT, SamplingParams(max_tokens=1, temperature=0.0)))
        return
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print(model.generate(torch.tensor([PROMPT]), max_new_tokens=1, do_sample=False)[0, -1:].tolist())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
