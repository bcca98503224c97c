"""Tests that the speculation benchmark compares equal texts: replayed, in a model's own words, and with its draft."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

import decode_worker
from benchmarks.common.shapes import BUNDLED
from benchmarks.engine.loop import EngineLoop
from benchmarks.engine.speculation.__main__ import AGAIN, AUTO, DRAFT, HEAD, HEAD_FOLDER, gain_rows, median_interval
from benchmarks.engine.speculation.replay import ReplayEngine
from benchmarks.engine.speculation.texts import BundledTexts, code_files, pages
from decode_worker.drafting.draft_head import DraftHead
from decode_worker.drafting.draft_model import DraftModel
from decode_worker.events import DecodeEvents
from engine.engine import Engine
from engine.step.speculation.proposal import ProposalKind
from penstock.config import DecodeConfig, EngineConfig

CONFIG = EngineConfig(model=str(BUNDLED), dtype="bfloat16", num_pages=256, num_threads=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[ReplayEngine]:
    loaded = ReplayEngine.load(CONFIG)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftModel]:
    loaded = DraftModel.load(str(BUNDLED.with_name("penstock-tiny-draft")), CONFIG, 256)
    yield loaded
    assert loaded.num_held_pages == 0
    loaded.close()


def generate(
    engine: ReplayEngine, prompts: list[list[int]], num_tokens: int, speculation: str, draft: DraftModel | None = None
) -> tuple[list[list[int]], dict[ProposalKind, int], int]:
    """Returns the output, how many proposed tokens of each kind were accepted, and the number of steps."""
    settings = {"max_batch_sequences": 4, "placement": "local", "speculation": speculation}
    right, steps = dict.fromkeys(ProposalKind, 0), []
    events = DecodeEvents(
        on_step=lambda *step: steps.append(step),
        on_verified=lambda kind, lane, proposed, accepted: right.update({kind: right[kind] + accepted}),
    )
    loop = EngineLoop(engine, DecodeConfig.model_validate(settings), draft, events)
    try:
        return loop.generate(prompts, num_tokens).outputs, right, len(steps)
    finally:
        loop.close()


def test_a_replayed_text_is_generated_word_for_word_in_fewer_steps(engine: ReplayEngine) -> None:
    rng = random.Random(1)
    prompts = [rng.choices(range(10, 2000), k=40) for _ in range(3)]
    answers = [prompt[5:35] for prompt in prompts]
    engine.set_texts([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    try:
        plain = generate(engine, prompts, 30, "off")
        always = generate(engine, prompts, 30, "always")
    finally:
        engine.set_texts([])
    assert plain[0] == always[0] == answers
    assert sum(plain[1].values()) == 0
    assert always[1][ProposalKind.LONG_MATCH] > 30
    assert always[2] < plain[2] / 2


@pytest.mark.parametrize("speculation", ["always", "auto"])
def test_a_draft_model_changes_no_output(engine: ReplayEngine, draft: DraftModel, speculation: str) -> None:
    texts = BundledTexts(BUNDLED)
    prompts = [script.prompt for kind in texts.kinds for script in texts.scripts(kind, 1, 0)]
    plain = generate(engine, prompts, 40, "off")
    drafted = generate(engine, prompts, 40, speculation, draft)
    assert drafted[0] == plain[0]
    if speculation == "always":
        assert drafted[1][ProposalKind.DRAFT] > 30
        assert drafted[2] < plain[2]


def test_every_setting_of_the_bundled_model_gives_the_same_output(draft: DraftModel) -> None:
    texts, engine = BundledTexts(BUNDLED), Engine.load(CONFIG)
    head = DraftHead.load(str(HEAD_FOLDER), str(BUNDLED), engine)
    rows = gain_rows(engine, "records", partial(texts.scripts, "records", 1), 40, 2, {DRAFT: draft, HEAD: head})
    assert {f"records: {setting}" for setting in (AGAIN, AUTO, DRAFT, HEAD)} <= {row.metric for row in rows}
    assert head.num_held_pages == 0
    engine.close()


def test_the_interval_of_a_median_holds_it_and_shrinks_with_more_rounds() -> None:
    rng = random.Random(3)
    few, many = ([rng.gauss(1.0, 0.1) for _ in range(count)] for count in (12, 300))
    (few_low, few_high), (low, high) = median_interval(few), median_interval(many)
    assert few_low < statistics.median(few) < few_high
    assert low < statistics.median(many) < high
    assert high - low < few_high - few_low
    assert median_interval([2.0] * 5) == (2.0, 2.0)


def test_texts_differ_by_turn_and_are_the_same_in_every_run() -> None:
    texts = BundledTexts(BUNDLED)
    for kind in texts.kinds:
        turns = [texts.scripts(kind, 2, turn) for turn in range(3)]
        assert turns[0] == texts.scripts(kind, 2, 0)
        assert all(first != second for first, second in pairwise(turns))


def test_texts_are_taken_from_this_repository() -> None:
    assert Path(decode_worker.__file__) in code_files()
    assert "speculation.md" in {page.name for page in pages()}
