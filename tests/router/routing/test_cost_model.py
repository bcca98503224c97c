"""Tests cost models with synthetic workers: they converge, stay finite, and resist a single false report."""

from __future__ import annotations

import math
import random
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.scheduling.linear_cost import LinearCost, ThreeTermCost
from penstock.types import Labels, StepTotals, WorkerId, WorkerLoad
from router.routing.costs.cost_model import DECODE_PRIOR, PREFILL_PRIOR, PRIOR_COSTS, CostBook, StepCost
from router.routing.costs.link_costs import PRIORS, Distance, LinkBook, LinkCost, distance
from tests.support.suite.examples import examples

WORKER = WorkerId("w")
TRUTH_PREFILL = StepCost(0.012, 4e-5, 2e-9)  # a GPU's cost, an order of magnitude from the priors
TRUTH_DECODE = StepCost(0.006, 3e-5, 4e-8)


def grown(totals: StepTotals, truth: StepCost, steps: int, tokens: int, context: int, factor: float) -> StepTotals:
    """Returns the totals after several more such steps."""
    for _ in range(steps):
        seconds = truth.fixed_s + tokens * (truth.token_s + context * truth.context_s)
        totals = totals.plus(tokens, tokens * context, seconds * factor)
    return totals


def report(book, worker, load, rng, *, truth_prefill=TRUTH_PREFILL, truth_decode=TRUTH_DECODE, noise=0.1):
    """Reports a worker's load a while later, and returns that load."""
    factor = math.exp(rng.gauss(0, noise))
    load = replace(
        load,
        prefill_steps=grown(load.prefill_steps, truth_prefill, 3, rng.randint(64, 2048), rng.randint(0, 30000), factor),
        decode_steps=grown(load.decode_steps, truth_decode, 9, rng.randint(1, 64), rng.randint(100, 8000), factor),
    )
    book.on_load(worker, load, 16)
    return load


def learned(noise=0.1, outliers=0.0, seed=0, reports=300):
    book, rng, load = CostBook(), random.Random(seed), WorkerLoad()
    for _ in range(reports):
        if rng.random() < outliers:  # the machine stalled for a while
            load = replace(load, prefill_steps=load.prefill_steps.plus(1, 0, 30.0))
        load = report(book, WORKER, load, rng, noise=noise)
    return book.costs(WORKER)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_models_converge_on_what_workers_report(outliers, seed):
    costs = learned(outliers=outliers, seed=seed)
    for tokens, context in ((500, 500), (4000, 4000), (1000, 20000)):
        truth = TRUTH_PREFILL.prefill_s(tokens, context, 2048)
        assert costs.prefill.prefill_s(tokens, context, 2048) == pytest.approx(truth, rel=0.25)
    for batch, context in ((1, 500), (32, 2000), (64, 4000)):
        truth = TRUTH_DECODE.fixed_s + batch * (TRUTH_DECODE.token_s + context * TRUTH_DECODE.context_s)
        cost = costs.decode
        assert cost.fixed_s + batch * (cost.token_s + context * cost.context_s) == pytest.approx(truth, rel=0.25)


def test_models_follow_a_worker_that_slows_down():
    book, rng, load = CostBook(), random.Random(1), WorkerLoad()
    for _ in range(100):
        load = report(book, WORKER, load, rng)
    slow = StepCost(*(3 * cost for cost in (TRUTH_PREFILL.fixed_s, TRUTH_PREFILL.token_s, TRUTH_PREFILL.context_s)))
    for _ in range(60):
        load = report(book, WORKER, load, rng, truth_prefill=slow)
    assert book.costs(WORKER).prefill.prefill_s(2000, 2000, 2048) == pytest.approx(
        slow.prefill_s(2000, 2000, 2048), rel=0.3
    )


def test_a_new_worker_starts_from_its_peers_and_resists_one_false_report():
    book, rng = CostBook(), random.Random(2)
    assert book.costs(WorkerId("first")) == PRIOR_COSTS
    loads = {WorkerId(name): WorkerLoad() for name in "abcde"}
    for _ in range(60):
        for name, load in loads.items():
            lie = StepCost(1e-9, 1e-12, 1e-16) if name == "e" else TRUTH_PREFILL
            loads[name] = report(book, name, load, rng, truth_prefill=lie)
    new = book.costs(WorkerId("new"))
    assert new.prefill.prefill_s(2000, 2000, 2048) == pytest.approx(TRUTH_PREFILL.prefill_s(2000, 2000, 2048), rel=0.3)
    book.forget(WorkerId("new"))


def test_a_worker_that_was_idle_at_the_start_is_priced_like_its_peers():
    """Otherwise its prior makes it ten times as expensive, and it never gets the work that would correct that."""
    book, rng, load = CostBook(), random.Random(3), WorkerLoad()
    idle = WorkerId("idle")
    assert book.costs(idle) == PRIOR_COSTS
    for _ in range(64):
        load = report(book, WORKER, load, rng, noise=0.0)
    assert book.costs(idle).prefill.prefill_s(2000, 2000, 2048) == pytest.approx(
        book.costs(WORKER).prefill.prefill_s(2000, 2000, 2048), rel=0.05
    )
    assert book.costs(idle).queued_token_s == pytest.approx(book.costs(WORKER).queued_token_s, rel=0.2)
    assert book.costs(idle) is book.costs(idle)


def decode_step_s(book, worker):
    cost = book.costs(worker).decode
    return cost.fixed_s + 8 * (cost.token_s + 1000 * cost.context_s)


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_a_worker_that_was_slow_at_first_is_tried_again(slowness):
    """Otherwise it gets no work while its peer has time to spare, and nothing corrects its costs."""
    rng, book, true = random.Random(5), CostBook(), StepCost(*(slowness * cost for cost in TRUTH_DECODE))
    first, other = WorkerId("slow at first"), WorkerId("other")
    slow = StepCost(*(20 * cost for cost in TRUTH_DECODE))
    loads = {
        first: report(book, first, WorkerLoad(), rng, truth_decode=slow),
        other: report(book, other, WorkerLoad(), rng),
    }
    num_served = dict.fromkeys(loads, 0)
    for _ in range(2_000):
        worker = min(loads, key=lambda each: decode_step_s(book, each))
        truth = true if worker == first else TRUTH_DECODE
        loads[worker] = report(book, worker, loads[worker], rng, truth_decode=truth)
        num_served[worker] += 1
    if slowness == 1.0:
        assert num_served[first] >= 100, "as fast as its peer: which of them serves more is chance"
    else:
        assert 1 <= num_served[first] <= 40


def test_workers_that_all_learn_keep_their_own_costs():
    rng, book, slow = random.Random(6), CostBook(), StepCost(*(2 * cost for cost in TRUTH_DECODE))
    truths = {WorkerId("slow"): slow, WorkerId("fast"): TRUTH_DECODE}
    loads = dict.fromkeys(truths, WorkerLoad())
    for _ in range(1_500):
        for worker, truth in truths.items():
            loads[worker] = report(book, worker, loads[worker], rng, truth_decode=truth)
        if book._num_decode > 100:
            assert decode_step_s(book, WorkerId("slow")) > 1.5 * decode_step_s(book, WorkerId("fast"))


def test_a_worker_without_totals_is_learned_from_its_running_means():
    book = CostBook()
    load = WorkerLoad(prefill_tokens_per_s=10_000, step_s=0.05, num_running=8, total_pages=100, free_pages=50)
    for _ in range(40):
        book.on_load(WORKER, load, 16)
    costs = book.costs(WORKER)
    assert costs.queued_token_s == pytest.approx(1e-4, rel=0.05)
    assert costs.prefill.prefill_s(1000, 1000, 2048) == pytest.approx(0.1, rel=0.2)
    assert costs.decode.fixed_s + 8 * costs.decode.token_s + 800 * costs.decode.context_s == pytest.approx(
        0.05, rel=0.1
    )


def test_costs_are_a_single_object_until_something_is_learned():
    book, rng = CostBook(), random.Random(3)
    load = report(book, WORKER, WorkerLoad(), rng)
    before = book.costs(WORKER)
    book.on_load(WORKER, load, 16)
    assert book.costs(WORKER) is before
    report(book, WORKER, load, rng)
    assert book.costs(WORKER) is not before


@pytest.mark.parametrize("seed", range(3))
def test_costs_read_between_reports_are_those_read_for_the_first_time(seed):
    rng, book = random.Random(seed), CostBook()
    workers = [WorkerId(str(number)) for number in range(6)]
    loads = dict.fromkeys(workers, WorkerLoad())
    for _ in range(200):
        worker = rng.choice(workers)
        if rng.random() < 0.05:
            book.forget(worker)
            loads[worker] = WorkerLoad()
        else:
            loads[worker] = report(book, worker, loads[worker], rng)
        unread, some = deepcopy(book), rng.sample(workers, 3)
        unread._known.clear()  # as if nothing had been read since the last report
        assert book.all_costs(some) == unread.all_costs(some)


def test_a_new_epoch_counts_from_zero():
    book, rng = CostBook(), random.Random(4)
    load = WorkerLoad()
    for _ in range(50):
        load = report(book, WORKER, load, rng)
    load = WorkerLoad()
    for _ in range(5):
        load = report(book, WORKER, load, rng)
    assert book.costs(WORKER).prefill.prefill_s(2000, 2000, 2048) == pytest.approx(
        TRUTH_PREFILL.prefill_s(2000, 2000, 2048), rel=0.3
    )


_ANYTHING = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e6)


@given(
    rows=st.lists(st.tuples(st.tuples(_ANYTHING, _ANYTHING, _ANYTHING), _ANYTHING), max_size=60),
    prior=st.sampled_from([PREFILL_PRIOR, DECODE_PRIOR]),
)
@example(rows=[((0.0, 0.0, 2.220446049250313e-16), 3.99168061906944e284)], prior=PREFILL_PRIOR)
@examples(120)
def test_no_measurement_drives_a_model_out_of_bounds(rows, prior):
    model = ThreeTermCost((prior.fixed_s, prior.token_s, prior.context_s))
    for quantities, seconds in rows:
        model.observe(quantities, seconds)
        for coefficient, start in zip(model.coefficients, (prior.fixed_s, prior.token_s, prior.context_s), strict=True):
            assert 0 <= coefficient <= 1e4 * start * 1.0001


@pytest.mark.parametrize("seed", range(3))
def test_a_coefficient_that_stays_at_zero_does_not_bias_the_others(seed):
    """The best fit has a negative fixed time; raising only that to zero would raise every prediction."""
    rng, linear = random.Random(seed), LinearCost((1e-3, 3e-4, 1e-8))
    for _ in range(400):
        tokens = rng.choice([570, 600, 650, 690])
        linear.observe((1.0, tokens, tokens * rng.uniform(0.0, 8000.0)), tokens * 3e-5 - 6e-3)
    for tokens in (570, 690):
        assert linear.predict((1.0, tokens, tokens * 4000.0)) == pytest.approx(tokens * 3e-5 - 6e-3, rel=0.2)


@given(rows=st.lists(st.tuples(st.tuples(_ANYTHING, _ANYTHING, _ANYTHING), _ANYTHING), max_size=60))
@examples(120)
def test_the_unrolled_regression_learns_the_same_to_the_last_bit(rows):
    plain, written_out = LinearCost(tuple(DECODE_PRIOR)), ThreeTermCost(tuple(DECODE_PRIOR))
    for quantities, seconds in rows:
        plain.observe(quantities, seconds)
        written_out.observe(quantities, seconds)
        assert (written_out.coefficients, written_out.num_observed) == (plain.coefficients, plain.num_observed)
    assert written_out.predict((1, 2, 3)) == plain.predict((1, 2, 3))


@given(data=st.data())
@examples(40)
def test_one_false_report_among_many_true_ones_changes_little(data):
    """A single report counts as at most a few mean deviations."""
    model, rng = LinearCost(tuple(PRIORS[Distance.ZONE])), random.Random(data.draw(st.integers(0, 99)))
    truth = LinkCost(0.002, 1e-9)
    for _ in range(80):
        num_bytes = rng.randint(10**4, 10**8)
        model.observe((1, num_bytes), truth.transfer_s(num_bytes) * math.exp(rng.gauss(0, 0.05)))
    before = model.predict((1, 1e7))
    model.observe((1, data.draw(st.integers(0, 10**9))), data.draw(st.floats(0, 1e9)))
    assert model.predict((1, 1e7)) == pytest.approx(before, rel=0.5)


class TestLinks:
    def book(self):
        book = LinkBook()
        for name, labels in {
            "p1": Labels("h1", "r1", "z1"),
            "d1": Labels("h1", "r1", "z1"),
            "d2": Labels("h2", "r1", "z1"),
            "d3": Labels("h3", "r2", "z1"),
            "d4": Labels("h4", "r3", "z2"),
        }.items():
            book.set_labels(WorkerId(name), labels)
        return book

    def test_labels_give_links_their_priors(self):
        book = self.book()
        costs = [book.cost("p1", name).transfer_s(1e8) for name in ("d1", "d2", "d3", "d4")]
        assert costs == sorted(set(costs))
        assert book.cost("p1", "elsewhere") == pytest.approx(PRIORS[Distance.UNKNOWN])

    def test_distances_that_no_two_workers_have_do_not_loosen_the_bound(self):
        book = LinkBook()
        assert book.fastest == PRIORS[Distance.UNKNOWN]
        book.set_labels(WorkerId("p1"), Labels("h1", "r1", "z1"))
        assert book.fastest == PRIORS[Distance.UNKNOWN]
        book.set_labels(WorkerId("d1"), Labels("h1", "r2", "z2"))
        assert book.fastest == PRIORS[Distance.HOST]

    def test_distance_is_the_narrowest_shared_label(self):
        assert distance(Labels(), Labels()) is Distance.UNKNOWN
        assert distance(Labels("h"), Labels("h")) is Distance.HOST
        assert distance(Labels("a", "r"), Labels("b", "r")) is Distance.RACK
        assert distance(Labels("a", "r", "z"), Labels("b", "r", "y")) is Distance.FAR
        assert distance(Labels("a", zone="z"), Labels("b", zone="z")) is Distance.ZONE

    def test_a_link_is_learned_and_informs_links_of_equal_distance(self):
        book, rng = self.book(), random.Random(5)
        for _ in range(60):
            num_bytes = rng.randint(10**5, 10**8)
            book.observe("p1", "d2", num_bytes, 0.01 + num_bytes * 5e-8)
        assert book.cost("p1", "d2").transfer_s(1e8) == pytest.approx(5.01, rel=0.1)
        book.set_labels(WorkerId("d5"), Labels("h5", "r1", "z1"))
        assert book.cost("p1", "d5").transfer_s(1e8) == pytest.approx(5.01, rel=0.3)
        assert book.cost("p1", "d3") == pytest.approx(PRIORS[Distance.ZONE])

    @given(st.lists(st.tuples(st.sampled_from(["d1", "d2", "d3"]), st.floats(0, 1e9), st.floats(0, 100)), max_size=40))
    @examples(40)
    def test_no_link_is_faster_than_the_fastest(self, transfers):
        book = self.book()
        for decode, num_bytes, seconds in transfers:
            book.observe("p1", decode, num_bytes, seconds)
            for name in ("d1", "d2", "d3", "d4", "new"):
                cost = book.cost("p1", name)
                assert cost.latency_s >= book.fastest.latency_s
                assert cost.byte_s >= book.fastest.byte_s
