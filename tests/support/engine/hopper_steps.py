"""Lists the variants of Triton kernels that an engine needs on a Hopper, without having one: launches are recorded, not
computed.

`python -m tests.support.engine.hopper_steps FOLDER...` warms up an engine on each checkpoint as a worker does, then
takes steps of all sizes. It prints how many variants that needed, and which ones only the steps needed. It runs in its
own process with TRITON_INTERPRET=0, like `tests.support.engine.hopper`.
"""

from __future__ import annotations

import json
import random
import sys
from unittest import mock

import numpy as np
import torch

from engine import engine as engine_module
from engine.engine import Engine
from engine.kernels.triton import common
from engine.kernels.triton.sample import sample_tokens
from engine.sampling import sampler
from engine.sampling.row_params import SamplingRows
from engine.step.batch import build_batch
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import PageId, RequestId, SamplingParams
from tests.support.engine.hopper import launching, variant

_PAGE_SIZE = 16
_NUM_STEPS = 40


def needed(folder: str, kv_dtype: str, quantization: str) -> tuple[int, list[str]]:
    """Returns the variants that warm-up compiles, and those that steps need beyond them."""
    settings = {"kv_dtype": kv_dtype, "quantization": quantization, "dtype": "bfloat16", "attention": "triton"}
    config = EngineConfig.model_validate({"model": folder, "num_pages": 64, "share_weights": False, **settings})
    warm: set[tuple[str, str, str]] = set()
    later: set[tuple[str, str, str]] = set()
    engine = Engine.load(config)
    with launching(lambda *launch: warm.add(variant(*launch))):
        engine.warm_up()
    with launching(lambda *launch: later.add(variant(*launch))):
        rng = random.Random(0)
        for _ in range(_NUM_STEPS):
            _step(engine, rng)
    return len(warm), sorted(f"{name} {rest} {options}" for name, rest, options in later - warm)


def _step(engine: Engine, rng: random.Random) -> None:
    """Takes a step of decodes, chunks or both. Results are stale memory, so no real token is sampled from them."""
    work = []
    decodes, chunks = rng.choice([(0, 1), (1, 0), (3, 0), (17, 1), (40, 0), (64, 2), (2, 3), (1, 1)])
    for number in range(decodes + chunks):
        count = 1 if number < decodes else min(rng.choice([2, 3, 15, 40, 100, 250, 600]), engine.max_context)
        context = rng.randint(count, engine.max_context)
        sequence = Sequence(RequestId(str(number)), [0] * context, context, SamplingParams(max_tokens=1), b"")
        sequence.num_computed_tokens = context - count
        sequence.pages = [PageId(rng.randrange(64)) for _ in range(-(-context // _PAGE_SIZE))]
        work.append(ScheduledSequence(sequence, count))
    logits_RV = engine.runner.forward(build_batch(work, _PAGE_SIZE, torch.device("cpu")))
    columns = SamplingRows.of([item.sequence for item in work])
    columns.records["is_greedy"] = rng.random() < 0.5
    columns.records["temperature"] = np.float32(rng.choice([0.5, 1.0]))
    columns.records["top_k"], columns.records["top_p"] = rng.choice([0, 5]), rng.choice([1.0, 0.5])
    sampler.sample_rows(logits_RV.float() if rng.random() < 0.5 else logits_RV, columns)


def main() -> int:
    found = {}
    with (
        mock.patch.object(common, "num_multiprocessors", return_value=132),
        mock.patch.object(sampler, "_kernel_for", return_value=sample_tokens),
        mock.patch.object(sampler, "_cpu_kernels", return_value=None),
        mock.patch.object(engine_module, "saturating_tokens", return_value=2048),
    ):
        for argument in sys.argv[1:]:
            found[argument] = needed(*argument.split(","))
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
