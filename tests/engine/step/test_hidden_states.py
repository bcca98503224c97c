"""Tests that a step hands out the hidden states of its tokens, the same in every way to compute it, and that logits do
not change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.graphs.cuda_graphs import GraphRunner
from engine.layers.hidden_taps import HiddenTaps
from engine.step.batch import build_batch, build_host_batch, upload_step
from engine.step.compute import StepTokens
from engine.step.plan import EndConditions, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint

TAPS = (2, 3, 3, 1)
NUM_LAYERS = 4
TEXT = [(7 * place) % (VOCAB_SIZE - 2) + 2 for place in range(23)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hidden") / "llama"
    return make_checkpoint("llama", path, head_dim=32, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(params=["packed", "by layer"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    loaded = Engine.load(EngineConfig(model=str(folder), dtype="float32", page_size=8, num_pages=64))
    if request.param == "by layer":
        loaded.runner.stack = None
    elif loaded.runner.stack is None:
        pytest.skip("there is no packed decoder here")
    yield loaded
    loaded.close()


def make_sequence(engine: Engine, num_tokens: int, num_computed: int = 0, name: str = "s") -> Sequence:
    sampling = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    sequence = Sequence(RequestId(name), TEXT[:num_tokens], num_tokens - 1, sampling, b"")
    sequence.pages = engine.pool.allocate(4)
    if num_computed:
        engine.step([ScheduledSequence(sequence, num_computed)])
        sequence.num_computed_tokens = num_computed
    return sequence


def expected_states(folder: Path) -> torch.Tensor:
    """Returns the tapped states of `TEXT` as `transformers` computes them, [T, X]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap][0] for tap in TAPS], dim=1)


def test_hidden_states_equal_those_of_transformers_and_logits_stay(engine: Engine, folder: Path) -> None:
    work = [ScheduledSequence(make_sequence(engine, len(TEXT)), len(TEXT))]
    batch = build_batch(work, 8, CPU)
    plain = engine.runner.run(batch)
    assert plain.states_TX is None
    engine.runner.tap(TAPS)
    tapped = engine.runner.run(batch)
    assert torch.equal(tapped.logits_RV, plain.logits_RV)
    assert tapped.states_TX is not None
    torch.testing.assert_close(tapped.states_TX, expected_states(folder), atol=1e-4, rtol=1e-4)
    layers: list[int] = []
    each = engine.runner.run(batch, layers.append)
    assert layers == [1, 2, 3, 4]
    assert each.states_TX is not None
    assert torch.equal(each.states_TX, tapped.states_TX)


def compute(engine: Engine, plan: StepPlan) -> StepTokens:
    return engine.compute(engine.prepare(plan)).wait()


def test_each_sequence_gets_the_states_of_its_tokens(engine: Engine, folder: Path) -> None:
    """Rows, chunks of prompts and proposed tokens mix in one step, in another order than in the batch."""
    states_TX = expected_states(folder)
    engine.runner.tap(TAPS)
    table = RowTable(8, EndConditions())
    for number, length in enumerate((9, 12)):
        row = make_sequence(engine, length, length - 1, f"row {number}")
        row.start_decoding()
        table.add(row)
    chunk = make_sequence(engine, 20, 4, "chunk")
    verified = make_sequence(engine, 15, 14, "verified")
    items = [ScheduledSequence(chunk, 10), ScheduledSequence(verified, 1, proposed=tuple(TEXT[15:18]))]
    tokens = compute(engine, StepPlan(table.launch(1), items))
    found = {place: (each.start, len(each.states_TX)) for place, each in tokens.hidden.items()}
    assert found == {0: (8, 1), 1: (11, 1), 2: (4, 10), 3: (14, 4)}
    for each in tokens.hidden.values():
        wanted = states_TX[each.start : each.start + len(each.states_TX)]
        torch.testing.assert_close(each.states_TX, wanted, atol=1e-4, rtol=1e-4)


def test_no_states_are_kept_if_a_plan_wants_none(engine: Engine) -> None:
    engine.runner.tap(TAPS)
    rows, items = RowTable(8, EndConditions()).launch(1), [ScheduledSequence(make_sequence(engine, 9), 9)]
    assert compute(engine, StepPlan(rows, items, taps=False)).hidden == {}


def test_no_states_are_kept_without_a_tap(engine: Engine) -> None:
    table = RowTable(8, EndConditions())
    assert compute(engine, StepPlan(table.launch(1), [ScheduledSequence(make_sequence(engine, 9), 9)])).hidden == {}


def test_replayed_steps_hand_out_copies(engine: Engine, folder: Path) -> None:
    """A replay runs the captured function over its buffers, as a graph does."""
    engine.runner.tap(TAPS)
    [spare] = engine.pool.allocate(1)
    graphs = GraphRunner(engine.runner.run, [1, 2], 64, 8, spare, CPU)
    for size in graphs.sizes():
        graphs.capture(size, lambda: lambda run: run)
    works = [
        [ScheduledSequence(make_sequence(engine, length, length - 1, str(length)), 1) for length in lengths]
        for lengths in ((6, 10), (20,))
    ]
    outputs = [
        graphs.forward(upload_step(build_host_batch(work, 8), CPU, graphs.tables).batch).states_TX for work in works
    ]
    assert graphs.num_replays == 2
    unwanted = replace(build_host_batch(works[0], 8), taps=False)
    assert graphs.forward(upload_step(unwanted, CPU, graphs.tables).batch).states_TX is None
    assert graphs.num_replays == 3
    states_TX = expected_states(folder)
    for states, rows in zip(outputs, ([5, 9], [19]), strict=True):
        assert states is not None
        torch.testing.assert_close(states, states_TX[rows], atol=1e-4, rtol=1e-4)


def test_a_step_of_more_values_than_one_copy_takes_is_copied_whole() -> None:
    residual_TD = torch.randn(50, 2000)
    taps = HiddenTaps((2, 3), residual_TD)
    taps.keep(1, -residual_TD)
    taps.keep(3, 3 * residual_TD)
    taps.keep(2, 2 * residual_TD)
    assert torch.equal(taps.states_TX, torch.cat((2 * residual_TD, 3 * residual_TD), dim=1))
