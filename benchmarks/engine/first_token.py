"""Loads a checkpoint and samples one token; `benchmarks.engine` starts it as a process and times it from outside."""

from __future__ import annotations

import argparse
from typing import Any

PROMPT = list(range(10, 26))


def sample(subject: str, folder: str, num_threads: int) -> None:
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
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print(model.generate(torch.tensor([PROMPT]), max_new_tokens=1, do_sample=False)[0, -1:].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.first_token", description=__doc__)
    parser.add_argument("subject", choices=["penstock", "transformers"])
    parser.add_argument("folder", help="the checkpoint's folder")
    parser.add_argument("num_threads", type=int)
    given = parser.parse_args()
    sample(given.subject, given.folder, given.num_threads)


if __name__ == "__main__":
    main()
