"""Tests every cell of the feature x hand-off matrix: the client gets the answer of a single process, token for token.

Texts, finish reasons and log-probabilities are compared too. One run of a hand-off serves its whole column.
"""

from __future__ import annotations

import json
import unittest.mock
from collections.abc import Iterator

import pytest

from engine.step.sequence import Sequence
from engine.step.speculation.proposal import ProposalKind
from engine.step.speculation.speculator import Speculator
from tests.support.router.parsed_outputs import parse_whole
from tests.system.matrix.features import FEATURES, TOOL, Feature, parser_choice, spelling
from tests.system.matrix.hand_offs import Runs
from tests.system.matrix.reference import options_of, single_process, without_window
from tests.system.matrix.table import ABSENT, BREAKS, CELLS, PAGE, REFUSED, with_table

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """Yields the hand-offs. A worker in this process that verifies proposals for `no_speculation` fails."""
    refused = FEATURES["no_speculation"].prompt
    on_verified = Speculator.on_verified

    def checked(speculator: Speculator, sequence: Sequence, num_proposed: int, num_held: int) -> ProposalKind:
        assert sequence.token_ids[: len(refused)] != refused
        return on_verified(speculator, sequence, num_proposed, num_held)

    with unittest.mock.patch.object(Speculator, "on_verified", checked):
        yield Runs()


@pytest.mark.parametrize(("hand_off", "feature"), sorted((hand_off, feature) for feature, hand_off in CELLS))
def test_the_answer_is_that_of_a_single_process(runs: Runs, hand_off: str, feature: str) -> None:
    results, state = runs[hand_off], CELLS[feature, hand_off]
    if state in (ABSENT, REFUSED):
        assert feature not in results
    elif state == BREAKS:
        assert results[feature].is_broken
    else:
        assert not results[feature].is_broken
        results[feature].check()


@pytest.mark.parametrize("feature", FEATURES.values(), ids=lambda feature: feature.name)
def test_a_feature_changes_the_answer_of_a_single_process(feature: Feature) -> None:
    """A feature without effect would be the same everywhere."""
    answers = single_process(feature)
    plain = {**options_of(FEATURES["seed"])}
    if feature.name in ("seed", "lane", "kv_hints", "batch"):
        assert dict(options_of(feature)) == plain
    elif feature.adapter:
        [without] = single_process(FEATURES["seed"])
        assert dict(options_of(feature)) == plain
        assert feature.prompt == FEATURES["seed"].prompt
        assert answers[0].token_ids != without.token_ids
    elif feature.is_mtp:
        assert answers[0].token_ids != single_process(FEATURES["seed"])[0].token_ids
    elif feature.is_windowed or feature.is_alternating or feature.has_sinks:
        assert answers[0].token_ids != without_window(feature)[0].token_ids
    elif feature.end_is_late:
        assert answers[0].finish_reason == "stop"
        if feature.name != "stop_token_ids":
            includes = answers[0].text.endswith(options_of(feature)["stop"][0])
            assert includes == (feature.name == "include_stop")
        assert plain["max_tokens"] // 2 < len(answers[0].token_ids) < plain["max_tokens"]
    elif feature.name == "n":
        assert answers[0].token_ids != answers[1].token_ids
    elif feature.name in ("logprobs", "prompt_logprobs", "echo"):
        assert (len(answers[0].logprobs) > 0) == (feature.name != "prompt_logprobs")
        assert (len(answers[0].prompt_logprobs) > 0) == (feature.name != "logprobs")
    elif feature.is_chat:
        [call] = parse_whole(parser_choice(), answers[0].text, [TOOL]).tool_calls
        assert call.complete
        assert set(json.loads(call.arguments)) == {"text", "is_urgent"}
    elif feature.name in ("ignore_eos", "keep_special_tokens"):
        shown = spelling().token_text(1) in answers[0].text
        assert shown == (feature.name == "keep_special_tokens")
        assert 1 in answers[0].token_ids[:-1]
    elif feature.name == "min_tokens":
        assert 1 not in answers[0].token_ids[:80]
        assert answers[0].finish_reason == "stop"
    elif feature.name == "allowed_token_ids":
        assert set(answers[0].token_ids) <= set(feature.options["allowed_token_ids"])
    elif feature.name == "bad_words":
        assert not any(word in answers[0].text.split() for word in feature.options["bad_words"])
    else:
        without = Feature("seed", {}) if feature.name != "seed" else feature
        assert options_of(feature) != options_of(without)


def test_the_docs_show_the_same_table() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run `python -m tests.system.matrix.table --write`"
