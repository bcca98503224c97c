"""Tests that a draft model proposes what it generates alone, whatever happened to earlier drafts, and frees its
pages."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from decode_worker.drafting.draft_model import DraftModel, check_draft_model
from engine.engine import Engine
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import DecodeConfig, EngineConfig
from penstock.errors import ConfigError
from penstock.types import RequestId, SamplingParams

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGET, DRAFT = str(MODELS / "penstock-tiny"), str(MODELS / "penstock-tiny-draft")
CONFIG = EngineConfig(model=TARGET, dtype="bfloat16", page_size=8, num_threads=1)
PROMPT = [0, *((37 * place) % 1900 + 10 for place in range(30))]


@pytest.fixture
def draft() -> Iterator[DraftModel]:
    loaded = DraftModel.load(DRAFT, CONFIG, num_pages=64)
    yield loaded
    assert loaded.num_held_pages == 0
    loaded.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    engine = Engine.load(CONFIG.model_copy(update={"model": DRAFT, "num_pages": 64}))
    yield engine
    engine.close()


def make_sequence(number: int, **sampling: object) -> Sequence:
    params = SamplingParams(max_tokens=64, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Sequence(RequestId(str(number)), [*PROMPT, number + 5], len(PROMPT), params, b"")


def continuation(engine: Engine, sequence: Sequence, count: int) -> tuple[int, ...]:
    """Returns what the model generates alone after the text."""
    own = sequence.continued([])
    own.pages = engine.pool.allocate(-(-(len(own.token_ids) + count) // engine.layout.page_size))
    for _ in range(count):
        [token] = engine.step([ScheduledSequence(own, own.num_uncomputed_tokens)]).tokens
        assert token is not None
        own.num_computed_tokens = len(own.token_ids)
        own.token_ids.append(token.token_id)
    engine.pool.release(own.pages)
    return tuple(own.token_ids[len(sequence.token_ids) :])


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}])
def test_drafts_are_what_the_model_generates_alone(
    draft: DraftModel, alone: Engine, sampling: dict[str, object]
) -> None:
    """Some tokens of each draft are accepted, others are not; sequences join, pause and leave."""
    rng = random.Random(1)
    sequences = [make_sequence(number, **sampling) for number in range(3)]
    for turn in range(8):
        counts = {sequence: rng.randint(1, 6) for sequence in sequences if turn == 0 or rng.random() < 0.8}
        found = draft.propose(counts)
        assert found.keys() == counts.keys()
        for sequence, count in counts.items():
            proposal = found[sequence].token_ids
            assert proposal == continuation(alone, sequence, count)
            held = rng.randint(0, count)
            sequence.token_ids += [*proposal[:held], rng.randrange(10, 1900)]
    assert draft.predict_s(2) is not None
    for sequence in sequences:
        draft.forget(sequence)
        draft.forget(sequence)


def test_a_long_text_is_drafted_for_once_all_its_chunks_are_computed(draft: DraftModel, alone: Engine) -> None:
    sequence, short = make_sequence(0, temperature=0.0), make_sequence(1, temperature=0.0)
    sequence.token_ids = [PROMPT[place % len(PROMPT)] for place in range(300)]
    assert draft.propose({sequence: 3}) == {}
    found = draft.propose({sequence: 3, short: 2})
    assert found[sequence].token_ids == continuation(alone, sequence, 3)
    assert found[short].token_ids == continuation(alone, short, 2)
    draft.forget(sequence)
    draft.forget(short)


def test_no_draft_without_pages_or_beyond_the_drafts_context(draft: DraftModel) -> None:
    many = [make_sequence(number, temperature=0.0) for number in range(20)]  # each needs five of the 64 pages
    found = draft.propose(dict.fromkeys(many, 4))
    assert 0 < len(found) < len(many)
    for sequence in many:
        draft.forget(sequence)
    many[0].token_ids = [5] * 2047
    assert draft.propose({many[0]: 4}) == {}
    draft.forget(many[0])


def test_room_is_limited_by_free_pages_and_the_drafts_context(draft: DraftModel) -> None:
    first, second = make_sequence(0, temperature=0.0), make_sequence(1, temperature=0.0)
    assert draft.propose({first: 4})[first].token_ids
    assert draft.num_held_pages == 5
    assert draft.has_room(first, 4)
    second.token_ids = [5] * (59 * 8 - 4)
    assert draft.has_room(second, 4)
    assert not draft.has_room(second, 5)
    first.token_ids += [5] * 2048
    assert not draft.has_room(first, 1)
    assert draft.num_held_pages == 0, "it will never draft for that text again"
    assert draft.has_room(second, 5)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DRAFT, other)
    text = json.loads((other / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    first, second = list(vocabulary)[500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match=r"decode\.draft_model = '.*other' has another vocabulary .*: token \d+ is"):
        check_draft_model(str(other), TARGET)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 2000}))
    with pytest.raises(ConfigError, match=r"has 2000 tokens and engine\.model = .* has 2048; give a draft model with"):
        DraftModel.load(str(other), CONFIG, 64)


def test_heads_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["EagleLlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"is EagleLlamaForCausalLM, a head over .*; give an EAGLE-3 head \(Llama"):
        check_draft_model(str(tmp_path), TARGET)


def test_a_draft_model_without_speculation_is_refused() -> None:
    with pytest.raises(ValueError, match=r'proposes nothing while decode\.speculation = "off"; set that to "auto"'):
        DecodeConfig(draft_model=DRAFT)
