"""Tests figures from other processes that cannot be measurements: NaN, infinite, negative or absurd."""

from __future__ import annotations

import math

import pytest

from cluster.controller.load_reports import LoadReportStore
from cluster.pools.pool import Incarnation, Pools
from decode_worker.migrate.sequence_state import from_wire
from penstock import wire
from penstock.config import ServeConfig
from penstock.rpc.measured import MAX_STAGE_MS, drop_false_figures
from penstock.types import CacheStats, RequestTotals, SamplingParams, StepTotals, WorkerId, WorkerLoad
from penstock.v1 import common_pb2, worker_pb2

FALSE = [math.nan, math.inf, -math.inf, -1.0, 1e300]


@pytest.mark.parametrize("value", FALSE)
def test_an_invalid_figure_is_cleared_and_the_others_stay(value):
    timing = common_pb2.Timing(
        queue_ms=value,
        prefill_ms=2.0,
        preempted_ms=[1.0, value],
        cached_tokens=7,
        prices=[common_pb2.PrefillPrice(place="local", harm_ms=value, first_token_ms=3.0)],
        pull=common_pb2.Pull(pull_ms=value, pulled_tokens=5),
    )
    drop_false_figures(timing, MAX_STAGE_MS)
    assert timing == common_pb2.Timing(
        prefill_ms=2.0,
        cached_tokens=7,
        prices=[common_pb2.PrefillPrice(place="local", first_token_ms=3.0)],
        pull=common_pb2.Pull(pulled_tokens=5),
    )


@pytest.mark.parametrize("value", FALSE)
def test_a_report_with_invalid_figures_reads_as_one_without_them(value):
    sent = WorkerLoad(
        num_running=3,
        prefill_tokens_per_s=value,
        step_s=0.01,
        cache=CacheStats(queries=9),
        prefill_steps=StepTotals(2, 30, value, 0.5),
        decode_steps=StepTotals(4, 8, 100.0, value),
        requests=RequestTotals(5, 1, value, 2.0, 40),
        metrics={"good": 1.0, "bad": value},
        adapter_load_s=value,
    )
    message = wire.load_to_wire(sent)
    before = message.SerializeToString()
    assert wire.load_from_wire(message) == WorkerLoad(
        num_running=3,
        step_s=0.01,
        cache=CacheStats(queries=9),
        prefill_steps=StepTotals(2, 30, 0.0, 0.5),
        decode_steps=StepTotals(4, 8, 100.0, 0.0),
        requests=RequestTotals(5, 1, 0.0, 2.0, 40),
        metrics={"good": 1.0},
    )
    assert message.SerializeToString() == before  # others may read the original


def test_every_double_of_a_report_is_checked():
    """A new field of `Load` that `load_from_wire` does not check could hold any value."""
    for path in _doubles(worker_pb2.Load.DESCRIPTOR):
        load = worker_pb2.Load()
        part = load
        for name in path[:-1]:
            part = getattr(part, name)
        setattr(part, path[-1], math.nan)
        assert wire.load_from_wire(load) == WorkerLoad(), path


def test_the_controller_keeps_no_invalid_figure():
    reports, incarnation = LoadReportStore(Pools(ServeConfig(model="m"), {}, {})), Incarnation(WorkerId("decode-0"), 1)
    reports.note(incarnation, worker_pb2.Load(num_running=2, step_s=math.nan, metrics={"bad": math.inf, "good": 1.0}))
    assert reports.get(incarnation) == worker_pb2.Load(num_running=2, metrics={"good": 1.0})


@pytest.mark.parametrize("value", FALSE)
def test_a_migrated_sequence_brings_no_invalid_times(value):
    timing = common_pb2.Timing(queue_ms=value, decode_ms=value, preempted_ms=[value], migration_pause_ms=value)
    sampling = wire.sampling_to_wire(SamplingParams(max_tokens=4))
    state = worker_pb2.SequenceState(token_ids=[1, 2], num_prompt_tokens=1, sampling=sampling, timing=timing)
    request = from_wire(state, None, now_s=100.0)
    assert request.times.first_token_s == 100.0
    assert (request.times.queue_s, request.times.preempted_s, request.migration_pause_s) == (0.0, [], 0.0)


def _doubles(descriptor, path=()):
    for field in descriptor.fields:
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from _doubles(field.message_type, (*path, field.name))
        elif field.message_type is None and field.cpp_type == field.CPPTYPE_DOUBLE:
            yield (*path, field.name)
