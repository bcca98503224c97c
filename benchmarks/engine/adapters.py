"""Measures what adapters cost a decode step, and how long one takes to load: random models of 135M and 1.1B parameters.

Steps of a batch in which every sequence has a different adapter alternate with steps of the same batch without any, at
the same positions, so that a busy machine slows both alike. One sequence with an adapter among 64 shows what adapters
cost apart from reading their matrices. The wider a model is, the less an adapter's matrices weigh beside its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import LLAMA_1B, LLAMA_135M, random_llama
from benchmarks.common.timing import Stopwatch
from engine.engine import Engine
from engine.generate import use_adapter
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.kv.adapter_files import CONFIG_FILE, AdapterRef, read_adapter_ref
from penstock.types import RequestId, SamplingParams
from tests.support.engine.adapters import make_adapter

BATCH = 64
STEPS = 40
PROMPT = [(7 * place) % 900 + 20 for place in range(32)]
SAMPLING = SamplingParams(max_tokens=STEPS + 1, temperature=0.0, ignore_eos=True)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
SHAPES = {"135M": LLAMA_135M, "1.1B": LLAMA_1B}
KINDS = {"attention": ATTENTION, "attention and feed-forward": DENSE}


class AdaptedBatch:
    """A batch of sequences, the first of which have an adapter each."""

    def __init__(self, engine: Engine, refs: list[AdapterRef]) -> None:
        self._engine = engine
        self.sequences = []
        for number in range(BATCH):
            sequence = Sequence(RequestId(f"r{number}"), list(PROMPT), len(PROMPT), SAMPLING, b"bench")
            if number < len(refs):
                use_adapter(engine, sequence, refs[number])
            num_pages = -(-(len(PROMPT) + STEPS + 1) // engine.layout.page_size)
            sequence.pages = engine.pool.allocate(num_pages)
            self.sequences.append(sequence)

    def step(self) -> float:
        """Computes all tokens without KV and samples; returns the seconds."""
        work = [ScheduledSequence(sequence, sequence.num_uncomputed_tokens) for sequence in self.sequences]
        with Stopwatch() as watch:
            output = self._engine.step(work)
        for sequence, token in zip(self.sequences, output.tokens, strict=True):
            assert token is not None
            sequence.num_computed_tokens = len(sequence.token_ids)
            sequence.token_ids.append(token.token_id)
        return watch.seconds

    def release(self) -> None:
        assert self._engine.adapters is not None
        for sequence in self.sequences:
            self._engine.pool.release(sequence.pages)
            if sequence.adapter is not None:
                self._engine.adapters.slots.release(sequence.adapter.revision)


def step_row(engine: Engine, name: str, refs: list[AdapterRef]) -> Row:
    """Returns the median step with these adapters, with that of a batch without any as its baseline."""
    plain, adapted = AdaptedBatch(engine, []), AdaptedBatch(engine, refs)
    times: dict[AdaptedBatch, list[float]] = {plain: [], adapted: []}
    for step in range(STEPS):
        for streams in (plain, adapted) if step % 2 else (adapted, plain):
            times[streams].append(streams.step())
    medians = {streams: statistics.median(seconds[3:]) * 1e3 for streams, seconds in times.items()}
    plain.release()
    adapted.release()
    return Row(name, medians[adapted], "ms", "no adapters", medians[plain])


def make_adapters(model: Path, folder: Path, rank: int, modules: tuple[str, ...]) -> list[AdapterRef]:
    """Writes as many adapters as there are sequences; they differ only by their scale, and each takes a slot."""
    first = make_adapter(model, folder, rank=rank, size=0.01, modules=modules)
    refs = []
    for number in range(BATCH):
        path = folder.with_name(f"{folder.name}-{number}")
        shutil.copytree(first.path, path)
        config = json.loads((path / CONFIG_FILE).read_text())
        (path / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": number + 1}))
        refs.append(read_adapter_ref(path.name, str(path)))
    return refs


def rows_of(shape: str, folder: Path, rank: int) -> list[Row]:
    model = random_llama(SHAPES[shape])
    settings = {"model": str(model), "num_pages": 2 * BATCH * 8, "device": "cpu", "dtype": "bfloat16"}
    config = EngineConfig.model_validate(settings | {"max_adapters": BATCH, "max_adapter_rank": rank})
    engine = Engine.load(config)
    assert engine.adapters is not None
    rows = []
    for kind, modules in KINDS.items():
        refs = make_adapters(model, folder / f"{shape}-{kind}-{rank}", rank, modules)
        rows.append(step_row(engine, f"{shape}: decode step, {BATCH} adapters of rank {rank}, {kind}", refs))
        rows.append(
            step_row(engine, f"{shape}: decode step, 1 adapter of rank {rank} in {BATCH} sequences, {kind}", refs[:1])
        )
        loads = []
        for number in range(20):
            with Stopwatch() as watch:
                engine.adapters.load(refs[number], 1 + number)
            loads.append(watch.seconds)
        megabytes = sum(path.stat().st_size for path in Path(refs[0].path).iterdir()) / 1e6
        name = f"{shape}: load one of rank {rank}, {kind}, {megabytes:.1f} MB"
        rows.append(Row(name, statistics.median(loads) * 1e3, "ms"))
    engine.close()
    return rows


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.engine.adapters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-adapters-") as folder:
        rows = [row for shape in SHAPES for rank in (8, 16) for row in rows_of(shape, Path(folder), rank)]
    isa, load = torch.backends.cpu.get_cpu_capability(), os.getloadavg()[0]
    publish("adapters", f"random Llamas in bf16, {torch.get_num_threads()} cores of {isa}, load {load:.1f}", rows)


if __name__ == "__main__":
    main()
