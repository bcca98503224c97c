"""Tests with random sources what plans guarantee: times, order, shares, and prompts that share what their ids share."""

from __future__ import annotations

import gzip
import json
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.workloads.datasets import dataset_source
from penstock.bench.workloads.mixes import MIXES, MixSizes, mix_source, parse_mix
from penstock.bench.workloads.plan import Draft, PromptBlocks, PromptMessages, Source
from penstock.bench.workloads.prompts import PromptWriter
from penstock.bench.workloads.recorded import trace_source
from penstock.bench.workloads.schedule import Arrivals, Extras, arrival_times, schedule
from penstock.errors import InvalidInput
from penstock.types import Lane

BLOCK = PromptBlocks(((1, 1),), 16, 16)


def drafts() -> st.SearchStrategy[tuple[Draft, ...]]:
    draft = st.builds(
        Draft,
        prompt=st.just(BLOCK),
        num_output_tokens=st.integers(1, 50),
        arrival_s=st.floats(0, 100),
        conversation=st.sampled_from(["", "a", "b"]),
        lane=st.sampled_from([None, Lane.BULK]),
    )
    return st.lists(draft, min_size=1, max_size=12).map(tuple)


def arrivals() -> st.SearchStrategy[Arrivals]:
    rates = st.builds(Arrivals, rate=st.floats(0.1, 100), cv=st.floats(0.1, 5))
    speeds = st.builds(Arrivals, speed=st.floats(0.1, 100))
    return st.one_of(rates, speeds, st.builds(Arrivals, concurrency=st.integers(1, 5)))


@given(drafts(), arrivals(), st.booleans(), st.floats(0, 1), st.integers(0, 99))
def test_a_plan_has_every_draft_once_and_conversations_stay_in_order(
    found: tuple[Draft, ...], when: Arrivals, gaps_are_pauses: bool, cancel_share: float, seed: int
) -> None:
    source = Source("it", found, gaps_are_pauses)
    extras = Extras({Lane.INTERACTIVE: 1.0}, cancel_share)
    plan = schedule(source, when, extras, seed)
    requests = list(plan.requests())
    assert plan == schedule(source, when, extras, seed)
    assert sorted(request.number for request in requests) == list(range(len(found)))
    assert sorted(request.num_output_tokens for request in requests) == sorted(d.num_output_tokens for d in found)
    assert [chain.due_s for chain in plan.chains] == sorted(chain.due_s for chain in plan.chains)
    assert len(plan.chains) == sum(not draft.conversation for draft in found) + len(
        {draft.conversation for draft in found if draft.conversation}
    )
    for request in requests:
        assert request.lane in (Lane.BULK, Lane.INTERACTIVE)
        assert request.gap_s >= 0
        assert request.pause_s >= 0
        assert not (request.gap_s and request.pause_s)
        assert cancel_share > 0 or request.cancel_after is None


@given(drafts(), st.floats(0.5, 4))
def test_recorded_times_keep_their_proportions_at_every_speed(found: tuple[Draft, ...], speed: float) -> None:
    plan = schedule(Source("it", found), Arrivals(speed=speed), Extras(), 0)
    times = sorted(draft.arrival_s / speed for draft in found)
    planned = []
    for chain in plan.chains:
        now_s = chain.due_s
        for request in chain.requests:
            now_s += request.gap_s
            planned.append(now_s)
    assert sorted(planned) == pytest.approx(times)


def test_the_options_are_independent() -> None:
    source = Source("it", tuple(Draft(BLOCK, 5) for _ in range(200)))
    plain = schedule(source, Arrivals(rate=5.0), Extras({Lane.BULK: 1.0, Lane.STANDARD: 3.0}), 1)
    leaving = schedule(source, Arrivals(rate=5.0), Extras({Lane.BULK: 1.0, Lane.STANDARD: 3.0}, 0.3, 7), 1)
    assert [request.lane for request in plain.requests()] == [request.lane for request in leaving.requests()]
    assert [chain.due_s for chain in plain.chains] == [chain.due_s for chain in leaving.chains]
    bulk = sum(request.lane is Lane.BULK for request in plain.requests())
    cancelled = [request.cancel_after for request in leaving.requests() if request.cancel_after]
    assert 30 < bulk < 70
    assert 40 < len(cancelled) < 80
    assert set(cancelled) == {7}


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness(cv: float) -> None:
    times = arrival_times(20_000, 8.0, cv, random.Random(3))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": 0.0}, "rate: is 0; give a number above 0"),
        ({"rate": 1.0, "speed": 1.0}, "exactly one of rate, speed and concurrency"),
        ({}, "exactly one"),
        ({"rate": 1.0, "cv": 0.0}, "burstiness: is 0"),
    ],
)
def test_impossible_arrivals_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Arrivals(**wrong)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_prompts_share_exactly_the_blocks_that_their_ids_share(a: list[int], b: list[int]) -> None:
    writer = PromptWriter("salt")
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    made = [PromptBlocks(tuple((block, 1) for block in blocks), 16, 16 * len(blocks)) for blocks in (a, b)]
    first, second = map(writer.token_ids, made)
    assert first[: 16 * shared] == second[: 16 * shared]
    assert (
        a == b
        or first[16 * shared : 16 * shared + 16] != second[16 * shared : 16 * shared + 16]
        or shared
        in (
            len(a),
            len(b),
        )
    )
    texts = [writer.text(prompt).split() for prompt in made]
    assert texts[0][: 16 * shared] == texts[1][: 16 * shared]
    assert writer.token_ids(made[0]) != PromptWriter("other").token_ids(made[0])


@given(st.integers(1, 400), st.floats(0.3, 1.5))
def test_prompts_have_their_length(num_tokens: int, words_per_token: float) -> None:
    writer = PromptWriter("salt", range(10, 500), words_per_token)
    prompt = PromptBlocks(((7, -(-num_tokens // 32)),), 32, num_tokens)
    ids = writer.token_ids(prompt)
    assert len(ids) == num_tokens
    assert set(ids) <= set(range(10, 500))
    assert abs(len(writer.text(prompt).split()) - num_tokens * words_per_token) <= 1 + 0.5 * -(-num_tokens // 32)


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_has_the_requested_lengths_and_depends_only_on_its_seed(name: str) -> None:
    sizes = MixSizes(800, 50, think_s=2.0)
    source = mix_source({name: 1.0}, sizes, 300, seed=5)
    assert source == mix_source({name: 1.0}, sizes, 300, seed=5) != mix_source({name: 1.0}, sizes, 300, seed=6)
    assert len(source.drafts) == 300
    lengths = [draft.prompt.num_tokens for draft in source.drafts if isinstance(draft.prompt, PromptBlocks)]
    assert 400 < statistics.mean(lengths) < 2000
    first_blocks = {draft.prompt.runs[0] for draft in source.drafts if isinstance(draft.prompt, PromptBlocks)}
    assert (len(first_blocks) == 300) is (name == "random"), "all other mixes share prefixes"
    assert bool(source.drafts[-1].conversation) is (name in ("chat", "agents"))


def test_turns_of_a_conversation_extend_each_other_and_wait() -> None:
    plan = schedule(
        mix_source({"chat": 1.0}, MixSizes(400, 20, think_s=3.0), 60, 1), Arrivals(concurrency=4), Extras(), 1
    )
    longest = max(plan.chains, key=lambda chain: len(chain.requests))
    prompts = [request.prompt for request in longest.requests]
    assert len(prompts) > 3
    assert all(request.pause_s > 0 for request in longest.requests[1:])
    for before, after in pairwise(prompts):
        assert isinstance(before, PromptBlocks)
        assert isinstance(after, PromptBlocks)
        assert after.runs[: len(before.runs)] == before.runs


def test_requests_that_do_not_fit_are_replaced_and_counted() -> None:
    source = mix_source({"bulk": 1.0}, MixSizes(500, 50), 100, 0, max_context=1000)
    assert len(source.drafts) == 100
    assert all(draft.lane is Lane.BULK for draft in source.drafts)
    assert "need more than 1000 tokens and were left out" in source.notes[0]
    with pytest.raises(InvalidInput, match="max context = 10 tokens holds hardly any prompt of the mix"):
        mix_source({"rag": 1.0}, MixSizes(500, 50), 100, 0, max_context=10)


def test_mixes_are_read_by_name_and_share() -> None:
    assert parse_mix("chat=3, bulk") == {"chat": 3.0, "bulk": 1.0}
    for wrong in ("chats", "chat=x", "chat=0"):
        with pytest.raises(InvalidInput, match="mix: has"):
            parse_mix(wrong)


def test_a_scaled_trace_reports_what_it_lost(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 10 * number,
            "input_length": 512 * (number + 1),
            "output_length": 20,
            "hash_ids": [0, *range(number)],
        }
        for number in range(10)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = trace_source(file, input_factor=1 / 32, output_factor=0.5, max_context=138)
    lengths = [draft.prompt.num_tokens for draft in source.drafts if isinstance(draft.prompt, PromptBlocks)]
    assert lengths == [16 * (number + 1) for number in range(8)]
    assert {draft.num_output_tokens for draft in source.drafts} == {10}
    assert source.notes[0] == "prompts scaled by 0.03125, answers by 0.5"
    assert source.notes[1] == "2 of 10 requests (20.0%) need more than 138 tokens and were dropped"
    with pytest.raises(InvalidInput, match=r"holds no request of trace\.jsonl"):
        trace_source(file, max_context=5)


def test_datasets_are_read_in_every_format(tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl.gz"
    rows = [
        {"prompt": "one", "max_tokens": 7},
        {"turns": ["two", "three"]},
        {"messages": [{"role": "user", "content": "four"}]},
    ]
    plain.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    source = dataset_source(plain, 5, count=4)
    assert [draft.prompt for draft in source.drafts] == [
        "one",
        "two",
        PromptMessages(({"role": "user", "content": "four"},)),
        "one",
    ]
    assert [draft.num_output_tokens for draft in source.drafts] == [7, 5, 5, 7]
    assert "more than once" in source.notes[0]
    share = tmp_path / "share.json"
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    share.write_text(json.dumps([{"id": "x", "conversations": turns}]))
    (draft,) = dataset_source(share, 5).drafts
    assert draft.prompt == PromptMessages(({"role": "system", "content": "s"}, {"role": "user", "content": "q"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", r"d\.jsonl:1: .*expected JSON"),
        ("3\n", r"d\.jsonl:1 is not a JSON object"),
        ('{"a": 1}\n', r"d\.jsonl:1 has none of prompt"),
        ("\n", "has no rows"),
    ],
)
def test_malformed_datasets_are_refused_by_path(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        dataset_source(file, 5)
