"""Tests that an EAGLE-3 head drafts what a plain computation of the paper drafts, from whatever hidden states it was
given, and that heads of other models are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode_worker.drafting.draft_head import MOST_PENDING, DraftHead
from engine.engine import Engine
from engine.step.plan import EndConditions, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.types import RequestId, SamplingParams
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.engine.heads import PlainHead, make_head

TAPS = [1, 2, 4]
PROMPT = [(7 * place) % (VOCAB_SIZE - 2) + 2 for place in range(23)]


class World:
    """A target with a head, whose steps it feeds to the head as a worker does."""

    def __init__(self, target: Path, head: Path, **settings: Any) -> None:
        config = EngineConfig(model=str(target), dtype="float32", page_size=8, num_pages=256, **settings)
        self.engine = Engine.load(config)
        self.head = DraftHead.load(str(head), str(target), self.engine)
        self.plain = PlainHead(target, head)
        self._rows = RowTable(8, EndConditions()).launch(1)

    def make_sequence(self, name: str, prompt: list[int], **sampling: Any) -> Sequence:
        params = SamplingParams(max_tokens=400, ignore_eos=True, **({"temperature": 0.0} | sampling))
        sequence = Sequence(RequestId(name), list(prompt), len(prompt), params, b"")
        sequence.pages = self.engine.pool.allocate(-(-(len(prompt) + 40) // 8))
        return sequence

    def step(self, sequence: Sequence, num_tokens: int | None = None, proposed: tuple[int, ...] = ()) -> None:
        """Computes a step of one sequence, appends its tokens, and shows the head the hidden states."""
        item = ScheduledSequence(sequence, num_tokens or sequence.num_uncomputed_tokens, proposed=proposed)
        tokens = self.engine.compute(self.engine.prepare(StepPlan(self._rows, [item]))).wait()
        sequence.num_computed_tokens += item.num_tokens
        if tokens.chunks[0] is not None:
            further = [each.token_id for each in tokens.further.get(0, [])]
            sequence.token_ids += [tokens.chunks[0], *further]
            sequence.num_computed_tokens += len(further)
        self.head.observe(sequence, tokens.hidden[0])

    def forget(self, sequence: Sequence) -> None:
        self.engine.pool.release(sequence.pages)
        self.head.forget(sequence)

    def close(self) -> None:
        assert self.head.num_held_pages == 0
        self.engine.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head") / "llama"
    return make_checkpoint("llama", path, head_dim=32, num_hidden_layers=5)


@pytest.fixture(
    scope="module",
    params=[
        {"eagle_aux_hidden_state_layer_ids": TAPS},
        {"norm_before_residual": True, "prefix": "layers.0.", "embeds": True, "draft_vocab_size": VOCAB_SIZE},
    ],
    ids=["named layers", "own embedding"],
)
def world(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(target, make_head(target, tmp_path_factory.mktemp("head") / "eagle3", **request.param))
    yield made
    made.close()


def test_drafts_equal_a_plain_computation(world: World) -> None:
    """Some proposed tokens hold and others do not; sequences are drafted for together, and pause."""
    rng = random.Random(1)
    sequences = [world.make_sequence(str(number), PROMPT[number:]) for number in range(3)]
    for sequence in sequences:
        world.step(sequence, 9)
        world.step(sequence)
    for turn in range(6):
        counts = {sequence: rng.randint(1, 5) for sequence in sequences if turn == 0 or rng.random() < 0.7}
        found = world.head.propose(counts)
        assert found.keys() == counts.keys()
        for sequence, count in counts.items():
            assert list(found[sequence].token_ids) == world.plain.draft(sequence.token_ids, count)
        for sequence in sequences:
            proposal = found[sequence].token_ids if sequence in found else ()
            own = world.plain.target.generate(
                torch.tensor([sequence.token_ids]), max_new_tokens=3, do_sample=False, eos_token_id=None
            )
            right = own[0, len(sequence.token_ids) :].tolist()  # of which a verification may accept some
            held = rng.randint(0, 2)
            world.step(sequence, proposed=(*right[:held], *proposal))
            assert len(sequence.token_ids) - sequence.num_prompt_tokens > turn + held
    assert world.head.predict_s(2) is not None
    for sequence in sequences:
        world.forget(sequence)
        world.head.forget(sequence)


def test_a_sequence_from_elsewhere_is_drafted_for_after_its_first_step(world: World) -> None:
    """The hidden states of its prompt are missing here, and so are those of a step that had to be recomputed."""
    sequence = world.make_sequence("moved", PROMPT)
    world.engine.step([ScheduledSequence(sequence, len(PROMPT) - 1)])
    sequence.num_computed_tokens = len(PROMPT) - 1
    assert world.head.propose({sequence: 3}) == {}
    world.step(sequence)
    first = len(PROMPT) - 1
    assert list(world.head.propose({sequence: 3})[sequence].token_ids) == world.plain.draft(
        sequence.token_ids, 3, first
    )
    [token] = world.engine.step([ScheduledSequence(sequence, 1)]).tokens
    assert token is not None
    sequence.num_computed_tokens += 1
    sequence.token_ids.append(token.token_id)
    assert world.head.propose({sequence: 3}) == {}
    world.step(sequence)
    assert len(world.head.propose({sequence: 3})[sequence].token_ids) == 3
    world.forget(sequence)


def test_recomputed_tokens_are_not_stored_twice(world: World) -> None:
    sequence = world.make_sequence("preempted", PROMPT)
    world.step(sequence)
    world.head.propose({sequence: 2})
    sequence.num_computed_tokens = 0
    world.step(sequence, 10)
    world.step(sequence)
    assert list(world.head.propose({sequence: 4})[sequence].token_ids) == world.plain.draft(sequence.token_ids, 4)
    world.forget(sequence)


def test_only_the_newest_hidden_states_of_a_long_text_are_kept(world: World) -> None:
    prompt = [PROMPT[place % len(PROMPT)] for place in range(2 * MOST_PENDING + 30)]
    sequence = world.make_sequence("long", prompt)
    for count in (40, MOST_PENDING + 50, 60):
        world.step(sequence, count)
    world.step(sequence)
    first = len(prompt) - MOST_PENDING
    assert list(world.head.propose({sequence: 3})[sequence].token_ids) == world.plain.draft(
        sequence.token_ids, 3, first
    )
    world.forget(sequence)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"target_hidden_size": 48}, ConfigError, r"hidden states of 48 values and those of .* have 32; give the head"),
        (
            {"vocab_size": 640},
            ConfigError,
            r"is a head for 640 tokens and engine\.model = .* has 320",
        ),
        ({"hidden_size": 48}, ConfigError, r"hidden states of 48 values and those of"),
        ({"num_hidden_layers": 2}, CheckpointError, r"num_hidden_layers = 2: a head of one layer is needed"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            CheckpointError,
            r"use_aux_hidden_state is false",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
            CheckpointError,
            r"3 layers of the target .* from 1 to 4",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, CheckpointError, r"ids = \[1, 2\]: 3 layers of the target"),
        (
            {"draft_vocab_size": 100},
            CheckpointError,
            r"tensor d2t is I64 \[160\], .* asks for I64 \[100",
        ),
        ({"intermediate_size": 32}, CheckpointError, r"mlp\.\w+\.weight has shape .*, config\.json asks for"),
        ({"parallel_drafting": True}, CheckpointError, r"parallel_drafting = True is unknown"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    head = make_head(target, tmp_path / "head", eagle_aux_hidden_state_layer_ids=TAPS)
    edit_config(head, **changes)
    engine = Engine.load(EngineConfig(model=str(target), dtype="float32", num_pages=8))
    with pytest.raises(error, match=match):
        DraftHead.load(str(head), str(target), engine)
    engine.close()


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda tensors: tensors.pop("d2t"), r"predicts 160 of 320 tokens and has no tensor d2t"),
        (lambda tensors: tensors["d2t"].fill_(-3), r"d2t must lead to different tokens below 320"),
        (
            lambda tensors: tensors.update(d2t=tensors["d2t"].int()),
            r"tensor d2t is I32 \[160\], and config",
        ),
        (lambda tensors: tensors.pop("fc.weight"), r"tensor fc\.weight \(1 in all\) is missing"),
    ],
)
def test_a_head_with_wrong_tensors_is_refused(target: Path, tmp_path: Path, spoil: Any, match: str) -> None:
    head = make_head(target, tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    spoil(tensors)
    save_file(tensors, head / "model.safetensors")
    engine = Engine.load(EngineConfig(model=str(target), dtype="float32", num_pages=8))
    with pytest.raises(CheckpointError, match=match):
        DraftHead.load(str(head), str(target), engine)
    engine.close()
