"""Tests that the layer of a checkpoint that predicts further tokens (MTP) drafts what a plain computation drafts, that
outputs stay the same, and that checkpoints without one are refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.local.role_host import RoleHost
from decode_worker.drafting.draft_head import DraftHead
from decode_worker.drafting.load_draft import load_draft
from engine.engine import Engine
from engine.step.plan import EndConditions, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from engine.weights.checkpoint import weights_digest
from penstock.config import EngineConfig, LoadedWeightsConfig, WorkerConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.types import RequestId, SamplingParams
from tests.engine.parallel.test_tensor_parallel import launch_threads
from tests.engine.weights.test_quantized_weights import LAYOUTS
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint, perturb_weights
from tests.support.engine.mtp_layers import PlainMtp, make_mtp_checkpoint

PROMPT = [(7 * place) % (VOCAB_SIZE - 2) + 2 for place in range(23)]
FAMILIES = ("deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_checkpoint(request.param, tmp_path_factory.mktemp("mtp") / request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def often_right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp") / request.param
    return make_mtp_checkpoint(request.param, path, is_often_right=True)


class World:
    """A target with its own head, whose steps it feeds to the head as a worker does."""

    def __init__(self, folder: Path, plain: Path | None = None, num_ranks: int = 1) -> None:
        """`plain` holds the values of a folder with quantized weights."""
        self._config = EngineConfig(
            model=str(folder), dtype="float32", page_size=8, num_pages=128, num_threads=1, tensor_parallel=num_ranks
        )
        self.engine = Engine.load(self._config, launch=launch_threads)
        self.head = DraftHead.load("mtp", str(folder), self.engine)
        self.plain = PlainMtp(plain or folder)
        self._rows = RowTable(8, EndConditions()).launch(1)

    def update(self, weights: LoadedWeightsConfig, plain: PlainMtp) -> None:
        """Replaces the weights and loads the draft again, as a worker does."""
        self.engine.prepare_weights(weights)
        self.engine.apply_weights()
        draft = load_draft("mtp", self._config.model_copy(update={"weights": weights}), self.engine)
        assert isinstance(draft, DraftHead)
        self.head, self.plain = draft, plain

    def make_sequence(self, name: str, prompt: list[int]) -> Sequence:
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
        sequence = Sequence(RequestId(name), list(prompt), len(prompt), params, b"")
        sequence.pages = self.engine.pool.allocate(-(-(len(prompt) + 60) // 8))
        return sequence

    def step(self, sequence: Sequence, num_tokens: int | None = None, proposed: tuple[int, ...] = ()) -> int:
        """Computes a step of one sequence, and returns how many proposed tokens were right."""
        item = ScheduledSequence(sequence, num_tokens or sequence.num_uncomputed_tokens, proposed=proposed)
        step = self.engine.prepare(StepPlan(self._rows, [item]))
        self.engine.announce(step)
        tokens = self.engine.compute(step).wait()
        sequence.num_computed_tokens += item.num_tokens
        further = [each.token_id for each in tokens.further.get(0, [])]
        if tokens.chunks[0] is not None:
            sequence.token_ids += [tokens.chunks[0], *further]
            sequence.num_computed_tokens += len(further)
        self.head.observe(sequence, tokens.hidden[0])
        return len(further)


@pytest.fixture(scope="module")
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    yield made
    made.engine.close()


def test_a_step_hands_out_what_the_output_head_reads(world: World) -> None:
    sequence = world.make_sequence("states", PROMPT)
    item = ScheduledSequence(sequence, len(PROMPT) - 4)
    rows = RowTable(8, EndConditions()).launch(1)
    tokens = world.engine.compute(world.engine.prepare(StepPlan(rows, [item]))).wait()
    wanted = world.plain.states(PROMPT)[: len(PROMPT) - 4]
    torch.testing.assert_close(tokens.hidden[0].states_TX, wanted, atol=1e-4, rtol=1e-4)
    unwanted = world.engine.prepare(StepPlan(rows, [item], taps=False))
    assert world.engine.compute(unwanted).wait().hidden == {}
    world.engine.pool.release(sequence.pages)


def test_drafts_equal_a_plain_computation(world: World) -> None:
    draft_and_verify(world)


def test_drafts_that_hold_change_no_output(often_right: Path) -> None:
    world = World(often_right)
    assert draft_and_verify(world) > 5
    world.engine.close()


def test_a_layer_of_fp8_blocks_drafts_what_its_values_draft(folder: Path, tmp_path: Path) -> None:
    LAYOUTS["fp8 blocks"].convert(folder, tmp_path / "quantized", tmp_path / "plain")
    world = World(tmp_path / "quantized", tmp_path / "plain")
    draft_and_verify(world)
    world.engine.close()


def test_rank_0_of_a_split_replica_runs_the_whole_layer(folder: Path) -> None:
    world = World(folder, num_ranks=2)
    draft_and_verify(world)
    world.engine.close()


def num_layers(folder: Path) -> int:
    """Returns the number of the model's own layers, which is that of the MTP layer behind them."""
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def draft_and_verify(world: World) -> int:
    """Drafts for three sequences, checks drafts and outputs, and returns how many drafted tokens were right."""
    rng = random.Random(1)
    sequences = [world.make_sequence(str(number), PROMPT[number:]) for number in range(3)]
    for sequence in sequences:
        world.step(sequence, 9)
        world.step(sequence)
    num_held = 0
    for turn in range(6):
        counts = {sequence: rng.randint(1, 5) for sequence in sequences if turn == 0 or rng.random() < 0.7}
        found = world.head.propose(counts)
        assert found.keys() == counts.keys()
        for sequence, count in counts.items():
            assert list(found[sequence].token_ids) == world.plain.draft(sequence.token_ids, count)
        for sequence in sequences:
            num_held += world.step(sequence, proposed=found[sequence].token_ids if sequence in found else ())
    for sequence in sequences:
        text = sequence.token_ids
        own = world.plain.target.generate(
            torch.tensor([text[: sequence.num_prompt_tokens]]),
            max_new_tokens=len(text) - sequence.num_prompt_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        assert own[0].tolist() == text
        world.engine.pool.release(sequence.pages)
        world.head.forget(sequence)
    assert world.head.num_held_pages == 0
    return num_held


def test_a_sequence_from_elsewhere_is_drafted_for_after_its_first_step(world: World) -> None:
    sequence = world.make_sequence("moved", PROMPT)
    world.engine.step([ScheduledSequence(sequence, len(PROMPT) - 1)])
    sequence.num_computed_tokens = len(PROMPT) - 1
    assert world.head.propose({sequence: 3}) == {}
    world.step(sequence)
    first = len(PROMPT) - 1
    assert list(world.head.propose({sequence: 3})[sequence].token_ids) == world.plain.draft(
        sequence.token_ids, 3, first
    )
    world.engine.pool.release(sequence.pages)
    world.head.forget(sequence)


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    engine = Engine.load(EngineConfig(model=str(folder), dtype="float32", num_pages=8))
    with pytest.raises(ConfigError, match=r"'mtp': engine\.model = .*llama' has no layers that predict further tokens"):
        DraftHead.load("mtp", str(folder), engine)
    engine.close()


def test_a_checkpoint_that_has_lost_the_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    number = num_layers(folder)
    tensors = load_file(next(folder.glob("*.safetensors")))
    kept = {name: each for name, each in tensors.items() if not name.startswith(f"model.layers.{number}.")}
    save_file(kept, tmp_path / "model.safetensors")
    engine = Engine.load(EngineConfig(model=str(tmp_path), dtype="float32", num_pages=8))
    with pytest.raises(CheckpointError, match=rf"tensor model\.layers\.{number}\.\S+ \(\d+ in all\) is missing"):
        DraftHead.load("mtp", str(tmp_path), engine)
    engine.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_update_of_the_weights_replaces_the_layer(folder: Path, tmp_path: Path, num_ranks: int) -> None:
    weights = perturb_weights(folder, tmp_path / "v1", 1)
    updated = load_file(tmp_path / "v1" / "model.safetensors")
    world = World(folder, num_ranks=num_ranks)
    world.update(weights, plain_mtp(folder, updated, tmp_path / "plain"))
    draft_and_verify(world)
    world.engine.close()


def test_the_own_layer_of_the_model_drafts_after_an_update_without_one(folder: Path, tmp_path: Path) -> None:
    perturb_weights(folder, tmp_path / "v1", 1)
    own, updated = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "v1"))
    layer = {name for name in own if name.startswith(f"model.layers.{num_layers(folder)}.")}
    save_file({name: updated[name] for name in own.keys() - layer}, tmp_path / "v1" / "model.safetensors")
    weights = LoadedWeightsConfig(version=1, path=str(tmp_path / "v1"), digest=weights_digest(tmp_path / "v1"))
    world = World(folder)
    world.update(weights, plain_mtp(folder, updated | {name: own[name] for name in layer}, tmp_path / "plain"))
    draft_and_verify(world)
    world.engine.close()


def plain_mtp(folder: Path, tensors: dict[str, torch.Tensor], into: Path) -> PlainMtp:
    """Returns the plain computation with other tensors of a checkpoint's model."""
    into.mkdir()
    (into / "config.json").write_bytes((folder / "config.json").read_bytes())
    prefix = f"model.layers.{num_layers(folder)}."
    shared = {
        f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{prefix}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | shared, into / "model.safetensors", {"format": "pt"})
    return PlainMtp(into)


async def test_an_update_with_a_part_of_the_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = perturb_weights(folder, tmp_path / "v1", 1)
    file, name = tmp_path / "v1" / "model.safetensors", f"model.layers.{num_layers(folder)}.eh_proj.weight"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    config = WorkerConfig.model_validate(
        {
            "worker_id": "decode-0",
            "role": "decode",
            "engine": {"model": str(folder), "dtype": "float32", "page_size": 8, "num_pages": 64, "num_threads": 1},
            "decode": {"placement": "local", "speculation": "auto", "draft_model": "mtp"},
            "transfer": {"transport": "shm"},
        }
    )
    host = RoleHost(config)
    await host.start()
    try:
        with pytest.raises(CheckpointError, match=rf"v1: tensor {re.escape(name)} \(1 in all\) is missing"):
            await host.prepare_weights(weights)
    finally:
        await host.stop()
