"""Which variants of Triton kernels an engine needs on a Hopper, without one: launches are noted and not computed.

`python -m tests.hopper_steps FOLDER...` warms up an engine on each checkpoint as a worker does and then takes steps of
all sizes; it prints how many variants that was, and those that only the steps needed. In a process of its own with
TRITON_INTERPRET=0, like `tests.hopper`.
"""

from __future__ import annotations

import json
import random
import sys
from unittest import mock

import numpy as np
import torch

from engine import engine as engine_module
from engine import sampler
from engine.batch import build_batch
from engine.draws import DrawColumns
from engine.engine import Engine
from engine.kernels import join_splits
from engine.kernels.sample import draw_tokens
from engine.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import PageId, RequestId, SamplingParams
from tests.hopper import launching, variant

_PAGE_SIZE = 16
_NUM_STEPS = 40


def needed(folder: str, kv_dtype: str, quantization: str) -> tuple[int, list[str]]:
    """By warming up; and what steps need beside."""
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
    """Decodes, chunks or both; what they compute is whatever memory holds, so nothing is drawn of it in earnest."""
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
    columns = DrawColumns.of([item.sequence for item in work])
    columns.records["is_greedy"] = rng.random() < 0.5
    columns.records["temperature"] = np.float32(rng.choice([0.5, 1.0]))
    columns.records["top_k"], columns.records["top_p"] = rng.choice([0, 5]), rng.choice([1.0, 0.5])
    sampler.draw(logits_RV.float() if rng.random() < 0.5 else logits_RV, columns)


def main() -> int:
    found = {}
    with (
        mock.patch.object(join_splits, "_num_multiprocessors", return_value=132),
        mock.patch.object(sampler, "_kernel_for", return_value=draw_tokens),
        mock.patch.object(engine_module, "saturating_tokens", return_value=2048),
    ):
        for argument in sys.argv[1:]:
            found[argument] = needed(*argument.split(","))
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
