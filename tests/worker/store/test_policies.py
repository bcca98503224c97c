"""Tests what is written to and deleted from the shared store, when it is called, and what a worker knows of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.page_hash import hash_pages
from tests.support.suite.examples import examples
from worker.pull.store.backends.object_store import StoredObject
from worker.pull.store.circuit_policy import Circuit
from worker.pull.store.known_runs import KnownRuns
from worker.pull.store.object_format import RunFormat
from worker.pull.store.read_costs import ReadCosts
from worker.pull.store.sweep_policy import SweepLease, plan_sweep
from worker.pull.store.write_policy import choose_runs, worth_at_end, worth_at_start

FORM = RunFormat("layout", 1 << 10, 16)
RUN = FORM.run_pages
HASHES = hash_pages(list(range(16 * RUN * 5)), 16, b"salt")
LASTS = HASHES[RUN - 1 :: RUN]


def test_only_whole_runs_that_are_not_stored_are_written() -> None:
    assert choose_runs(RUN * 4 + 3, RUN, lambda run: run in (0, 2), 10) == [1, 3]
    assert choose_runs(RUN * 4 + 3, RUN, lambda run: False, 2) == [0, 1]
    assert choose_runs(RUN - 1, RUN, lambda run: False, 10) == []


def test_the_mode_decides_what_is_written() -> None:
    assert [worth_at_start(mode, 7) for mode in ("reused", "computed", "never")] == [7, 7, 0]
    assert [worth_at_end(mode, 7, False) for mode in ("reused", "computed", "never")] == [0, 7, 0]
    assert [worth_at_end(mode, 7, True) for mode in ("reused", "computed", "never")] == [7, 7, 0]


@examples(100)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50), st.booleans()), max_size=40),
    max_bytes=st.integers(1, 1000),
)
def test_a_sweep_bounds_the_store_and_deletes_the_longest_unused(
    sizes: list[tuple[int, int, bool]], max_bytes: int
) -> None:
    now_s = 10_000.0
    objects = [
        StoredObject(f"{number}.tmp" if partial else str(number), size, now_s - 100 * age)
        for number, (size, age, partial) in enumerate(sizes)
    ]
    plan = plan_sweep(objects, max_bytes, now_s)
    kept = [each for each in objects if each not in plan.deleted]
    assert plan.num_bytes == sum(each.num_bytes for each in kept)
    assert plan.num_bytes <= max_bytes or all(each.is_partial for each in kept)
    stale = {each for each in objects if each.is_partial and each.used_s < now_s - 3600}
    assert stale <= set(plan.deleted)
    whole = [each for each in plan.deleted if not each.is_partial]
    if sum(each.num_bytes for each in objects if each not in stale) <= max_bytes:
        assert not whole
    assert all(
        deleted.used_s <= remaining.used_s for deleted in whole for remaining in kept if not remaining.is_partial
    )


def test_an_expired_lease_is_taken_over() -> None:
    lease = SweepLease("a", 130.0)
    assert lease.allows("a", 100.0, 30.0)
    assert not lease.allows("b", 129.0, 30.0)
    assert lease.allows("b", 130.0, 30.0)
    assert lease.allows("b", 10.0, 30.0)  # written by a clock that is two minutes ahead


def test_a_failing_store_is_avoided_and_retried() -> None:
    circuit = Circuit()
    assert [circuit.on_failure(0.0) for _ in range(3)] == [False, False, True]
    assert circuit.is_open
    assert not circuit.allows(4.0)
    assert circuit.allows(6.0)
    assert not circuit.allows(6.0)  # one trial at a time
    assert not circuit.on_failure(7.0)  # the log has it once
    assert not circuit.allows(16.0)
    assert circuit.allows(40.0)
    circuit.on_success()
    assert not circuit.is_open
    assert circuit.allows(40.0)


def test_a_worker_knows_what_was_listed_and_what_it_wrote() -> None:
    known = KnownRuns()
    assert known.num_leading(FORM, HASHES, 0, None) == 0
    known.on_listed(FORM.folder, frozenset(LASTS[:2]), 10.0)
    known.add_pending(FORM, LASTS[2])
    assert known.holds(FORM, LASTS[2])
    assert known.num_leading(FORM, HASHES, 0, None) == 2 * RUN  # objects that wait to be written cannot be read
    known.end_pending(FORM, LASTS[2], is_stored=True, now_s=11.0)
    assert known.num_leading(FORM, HASHES, 0, None) == 3 * RUN
    known.on_listed(FORM.folder, frozenset(LASTS[:2]), 10.5)  # the listing began before it was written
    assert known.num_leading(FORM, HASHES, 0, None) == 3 * RUN
    known.on_listed(FORM.folder, frozenset(LASTS[:2]), 20.0)  # it is gone
    assert known.num_leading(FORM, HASHES, 0, None) == 2 * RUN


def test_pages_in_the_cache_are_not_looked_up() -> None:
    known = KnownRuns()
    known.on_listed(FORM.folder, frozenset(LASTS[2:4]), 0.0)
    assert known.num_leading(FORM, HASHES, 0, None) == 0
    assert known.num_leading(FORM, HASHES, 2 * RUN + 3, None) == 4 * RUN
    assert known.num_leading(FORM, HASHES, 0, lambda num_pages: num_pages - 1) == 4 * RUN  # a window of one page
    assert known.num_leading(FORM, HASHES, 0, lambda num_pages: 0) == 0


def test_missing_and_unusable_objects_are_written_again() -> None:
    known = KnownRuns()
    for spoil in (known.refuse, known.discard):
        known.on_listed(FORM.folder, frozenset(LASTS), 0.0)
        spoil(LASTS[0])
        assert not known.holds(FORM, LASTS[0])
        known.end_pending(FORM, LASTS[0], is_stored=True, now_s=1.0)
        assert known.num_leading(FORM, HASHES, 0, None) == 5 * RUN
    known.refuse(LASTS[0])
    known.on_listed(FORM.folder, frozenset(LASTS), 2.0)
    assert not known.holds(FORM, LASTS[0])  # still the unusable object


def test_other_folders_are_forgotten() -> None:
    known = KnownRuns()
    known.on_listed(FORM.folder, frozenset(LASTS), 0.0)
    other = RunFormat("other", 1 << 10, 16)
    assert known.num_leading(other, HASHES, 0, None) == 0
    assert known.num_leading(FORM, HASHES, 0, None) == 0


def test_read_times_are_predicted_from_earlier_reads() -> None:
    costs = ReadCosts()
    for _ in range(50):
        costs.observe(1 << 20, 0.1, 0.0)
    assert 0.08 < costs.predict(4, 1 << 20, 1.0) < 0.12  # four at once
    assert 0.16 < costs.predict(5, 1 << 20, 1.0) < 0.24
    assert costs.predict(4, 1 << 20, 1000.0) < 0.01  # it may be faster by now
