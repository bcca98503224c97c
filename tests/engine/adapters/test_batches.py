"""Tests that mixed batches of several adapters equal one request at a time, on every path that computes a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.generate import generate, use_adapter
from engine.graphs.cuda_graphs import GraphRunner
from engine.kernels import adapter_weights
from engine.kernels.adapter_weights import AdapterRows, AdapterWeights
from engine.kernels.layer_ops import TorchOps
from engine.kernels.triton.backend import TritonOps
from engine.parallel.step_codec import BroadcastStep, decode, encode
from engine.step.batch import Batch, ForwardOutput, build_batch, build_host_batch, upload_step
from engine.step.plan import EndConditions, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.kv.adapter_files import AdapterRef
from penstock.types import RequestId, SamplingParams
from tests.support.engine.adapters import make_adapter
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.isas import needs_native

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},  # sums of up to 123 products in another order
    torch.bfloat16: {"rtol": 1e-2, "atol": 5e-2},  # up to 16 intermediate results near 1 are rounded, too
    torch.float16: {"rtol": 4e-3, "atol": 6e-3},
}
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
on_every_isa = pytest.mark.usefixtures("isa")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_weights(ranks: Seq[Seq[int]], ends: Seq[int], inputs: int, rank: int, dtype: torch.dtype) -> AdapterWeights:
    """Returns slots, the first of which is empty; `ranks` has one row for each of the others."""
    weights = AdapterWeights.zeros(len(ranks) + 1, rank, inputs, ends, dtype, DEVICE)
    for slot, of_slot in enumerate(ranks, start=1):
        up_RO = torch.zeros((rank, ends[-1]), device=DEVICE)
        for part, own in enumerate(of_slot):
            begin = ends[part - 1] if part else 0
            weights.down_SQI[slot, part * rank : part * rank + own] = noise(own, inputs, seed=slot) / inputs**0.5
            up_RO[:own, begin : ends[part]] = noise(own, ends[part] - begin, seed=slot + 50)
        weights.write_up(slot, up_RO)
    weights.ranks_SP[1:] = torch.tensor(ranks)
    return weights


SHAPES = {
    "one-part": ([[3]], [33], 17, 3, [1, 0, 1, 1, 1, 1]),
    "parts": ([[4, 2, 0], [8, 8, 8], [0, 0, 5]], [64, 80, 123], 123, 8, [2, 0, 3, 1, 1, 1, 1, 1, 2, 0, 0, 3]),
    "many-rows": ([[16, 16], [5, 5]], [130, 200], 64, 16, [1] * 37 + [2] * 20 + [0] * 5),
    "nobody": ([[4]], [16], 32, 4, [0, 0, 0]),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_triton_kernel_equals_the_reference(shape: str, dtype: torch.dtype) -> None:
    ranks, ends, inputs, rank, slots = SHAPES[shape]
    weights = make_weights(ranks, ends, inputs, rank, dtype)
    x_TI, y_TO = noise(len(slots), inputs, seed=7).to(dtype), noise(len(slots), ends[-1], seed=8).to(dtype)
    slot_T = torch.tensor(slots, device=DEVICE)
    wanted_TO, plain_TO = y_TO.clone(), y_TO.clone()
    adapter_weights.add_adapters(wanted_TO, x_TI, weights, AdapterRows(slot_T))
    ops = TritonOps()
    ops.add_adapters(y_TO, x_TI, weights, ops.adapter_rows(slot_T, len(ranks) + 1))
    torch.testing.assert_close(y_TO, wanted_TO, **TOLERANCE[dtype])
    assert torch.equal(y_TO[slot_T == 0], plain_TO[slot_T == 0])


@needs_native
@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_kernel_equals_the_reference_and_a_row_depends_only_on_itself(shape: str, dtype: torch.dtype) -> None:
    from engine.cpu.library import load_native
    from engine.cpu.native import NativeOps

    kernels = load_native()
    assert kernels is not None
    ranks, ends, inputs, rank, slots = SHAPES[shape]
    weights = make_weights(ranks, ends, inputs, rank, dtype)
    ops, slot_T = NativeOps(kernels), torch.tensor(slots)
    x_TI = noise(len(slots), inputs + 9, seed=7).to(dtype)[:, 9:]
    y_TO = noise(len(slots), ends[-1], seed=8).to(dtype)
    wanted_TO, alone_TO = y_TO.clone(), y_TO.clone()
    TorchOps().add_adapters(wanted_TO, x_TI, weights, AdapterRows(slot_T))
    for row in range(len(slots)):
        alone = slice(row, row + 1)
        ops.add_adapters(alone_TO[alone], x_TI[alone], weights, ops.adapter_rows(slot_T[alone], 0))
    ops.add_adapters(y_TO, x_TI, weights, ops.adapter_rows(slot_T, 0))
    assert torch.equal(y_TO, alone_TO)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # in bf16 both round the same sum once
    torch.testing.assert_close(y_TO, wanted_TO, rtol=tolerance, atol=tolerance)


def load(folder: Path, **settings: Any) -> Engine:
    base = {"model": str(folder), "page_size": 8, "num_pages": 128, "max_adapters": 4, "max_adapter_rank": 6}
    return Engine.load(EngineConfig.model_validate(base | settings))


def adapters_of(folder: Path, root: Path, count: int = 3) -> list[AdapterRef]:
    return [make_adapter(folder, root / f"adapter-{i}", seed=i, rank=2 + 2 * i) for i in range(count)]


def sequence_of(engine: Engine, name: str, token_ids: list[int], ref: AdapterRef | None) -> Sequence:
    sequence = Sequence(RequestId(name), list(token_ids), len(token_ids), GREEDY, name.encode())
    if ref is not None:
        use_adapter(engine, sequence, ref)
    sequence.pages = engine.pool.allocate(-(-(len(token_ids) + GREEDY.max_tokens) // engine.layout.page_size))
    return sequence


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"dtype": "float32", "attention": "triton"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_a_mixed_batch_equals_one_request_at_a_time(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", head_dim=32)
    refs: list[AdapterRef | None] = [None, *adapters_of(folder, tmp_path), None]
    engine = load(folder, **settings)
    prompts = [[(11 * i + 3 * number) % 300 + 5 for i in range(9 + number)] for number in range(len(refs))]
    sampling = replace(GREEDY, max_tokens=3) if "attention" in settings else GREEDY  # Triton's interpreter is slow
    asked = list(zip(prompts, refs, strict=True))
    alone = [generate(engine, prompt, sampling, use_prefix_cache=False, adapter=ref) for prompt, ref in asked]
    assert len({tuple(tokens) for tokens in alone}) == len(refs)
    sequences = [sequence_of(engine, f"s{i}", prompt, ref) for i, (prompt, ref) in enumerate(asked)]
    for _ in range(sampling.max_tokens):
        work = [ScheduledSequence(sequence, sequence.num_uncomputed_tokens) for sequence in sequences]
        for item, token in zip(work, engine.step(work).tokens, strict=True):
            item.sequence.num_computed_tokens += item.num_tokens
            assert token is not None
            item.sequence.token_ids.append(token.token_id)
    assert [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences] == alone
    engine.close()


@needs_native
def test_rows_without_an_adapter_equal_a_step_without_adapters_to_the_bit(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", head_dim=32, dtype=torch.bfloat16)
    [ref] = adapters_of(folder, tmp_path, 1)
    engine = load(folder, dtype="bfloat16")
    assert engine.runner.stack is not None
    plain = [sequence_of(engine, f"p{i}", list(range(5 + i, 30)), None) for i in range(3)]
    adapted = sequence_of(engine, "a", list(range(40, 60)), ref)

    def work(sequences: list[Sequence]) -> list[ScheduledSequence]:
        return [ScheduledSequence(sequence, len(sequence.token_ids)) for sequence in sequences]

    wanted = engine.runner.forward(build_batch(work(plain), 8, DEVICE))
    mixed = engine.runner.forward(build_batch(work([plain[0], adapted, *plain[1:]]), 8, DEVICE))
    assert torch.equal(mixed[[0, 2, 3]], wanted)
    engine.close()


def test_a_batch_holds_the_slot_of_each_row_and_chunk() -> None:
    table = RowTable(8, EndConditions())

    def sequence(name: str, slot: int, num_tokens: int) -> Sequence:
        made = Sequence(RequestId(name), list(range(num_tokens)), num_tokens, GREEDY, b"", pages=[1, 2])
        made.adapter_slot = slot
        return made

    first, second = sequence("first", 0, 5), sequence("second", 3, 6)
    for each in (first, second):
        each.num_computed_tokens = len(each.token_ids) - 1
        table.add(each)
    chunk = sequence("chunk", 2, 4)
    mixed = build_host_batch(StepPlan(table.launch(1), [ScheduledSequence(chunk, 4)]), 8)
    assert mixed.adapter_T is not None
    assert mixed.adapter_T.tolist() == [0, 3, 2, 2, 2, 2]
    sent = decode(BroadcastStep, encode(BroadcastStep(mixed))).host
    assert np.array_equal(sent.adapter_T, mixed.adapter_T)
    table.remove(second)
    plain = build_host_batch(StepPlan(table.launch(2), [ScheduledSequence(sequence("plain", 0, 3), 3)]), 8)
    assert plain.adapter_T is None


def test_captured_steps_read_slots_from_their_buffer() -> None:
    """Replays run the captured function over its buffers, as a graph does."""
    seen: list[torch.Tensor | None] = []

    def forward(batch: Batch) -> ForwardOutput:
        seen.append(None if batch.adapter_T is None else batch.adapter_T.clone())
        return ForwardOutput(torch.zeros((len(batch.sampled_places), 4)))

    graphs = GraphRunner(forward, [2, 4], 64, 8, 99, torch.device("cpu"), has_adapters=True)
    for size in graphs.sizes():
        graphs.capture(size, lambda: lambda run: run)
    seen.clear()

    def decode_rows(slots: list[int]) -> list[ScheduledSequence]:
        made = []
        for slot in slots:
            sequence = Sequence(RequestId("r"), [1, 2, 3], 2, GREEDY, b"", pages=[1])
            sequence.num_computed_tokens, sequence.adapter_slot = 2, slot
            made.append(ScheduledSequence(sequence, 1))
        return made

    for slots, wanted in (([1, 0, 2], [1, 0, 2, 0]), ([0, 0, 0], None), ([3], [3, 0])):
        host = build_host_batch(decode_rows(slots), 8)
        graphs.forward(upload_step(host, torch.device("cpu"), graphs.tables).batch)
        found = seen.pop()
        assert (None if found is None else found.tolist()) == wanted
    assert graphs.num_replays == 3
