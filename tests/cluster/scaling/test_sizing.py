"""Tests how each pool's size follows from traffic, forecasts and late requests."""

from __future__ import annotations

import pytest

from cluster.scaling.profiles import WorkerProfile
from cluster.scaling.sizing_policy import DecodeSizer, PoolNeed, PrefillSizer, PromptMix, SizeCorrection
from cluster.scaling.traffic import TrafficBin, TrafficHistory
from penstock.config.autoscaler import AutoscalerConfig, SloConfig
from router.routing.costs.cost_model import StepCost

CONFIG = AutoscalerConfig(mode="on", slo=SloConfig(ttft_s=2.0, itl_s=0.05), attainment=0.75, history_s=300.0)
PROFILE = WorkerProfile(prefill_per_s=1000.0, decode=StepCost(0.01, 0.001, 0.0), pages=1000.0)
NEW_PROMPTS = PromptMix(typical=500, uncached=1.0)
BIN_S = 5.0


def history_of(bins: list[TrafficBin]) -> TrafficHistory:
    history = TrafficHistory(300.0, BIN_S)
    for each in bins:
        history.add(each)
    return history


def prefill_need(sizer: PrefillSizer, prompts: PromptMix = NEW_PROMPTS) -> PoolNeed:
    bins = [TrafficBin(2000.0, 0.0, 0.0, 0.0)] * 12
    return sizer.need(history_of(bins), PROFILE, prompts, backlog=0.0, serving=2, start_s=20.0)


def test_the_correction_grows_only_while_more_than_three_times_the_planned_share_is_late() -> None:
    correction = SizeCorrection(CONFIG)  # plans for a quarter late
    correction.learn(0.25, 5.0)
    assert correction.factor == 1.0, "three quarters late: the limit itself"
    correction.learn(0.2, 5.0)
    assert correction.factor == pytest.approx(1.05)
    for _ in range(20):
        correction.learn(0.0, 5.0)
    assert correction.factor == 1.5, "bounded"


@pytest.mark.parametrize("share_in_time", [None, 1.0])
def test_the_correction_decays(share_in_time: float | None) -> None:
    correction = SizeCorrection(CONFIG)
    correction.learn(0.0, 5.0)
    correction.learn(share_in_time, 60.0)
    assert correction.factor == pytest.approx(1.0 + 0.05 * 0.9)
    correction.learn(share_in_time, 6000.0)
    assert correction.factor == 1.0


def test_late_requests_correct_both_pools() -> None:
    prefill, decode = PrefillSizer(CONFIG), DecodeSizer(CONFIG, 64)
    newest = TrafficBin(2000.0, 100.0, 1000.0, 100.0)
    for _ in range(4):
        prefill.learn(newest, BIN_S, share_in_time=0.0)
        decode.learn(newest, BIN_S, share_in_time=0.0)
    assert prefill_need(prefill).figures["correction"] == pytest.approx(1.2)
    need = decode.need(history_of([newest] * 12), PROFILE, 20.0)
    assert need.figures["correction"] == pytest.approx(1.2)
    assert need.figures["for_steps"] == pytest.approx(1.2 * 100.0 * 0.001 / (0.05 - 0.01) / 0.9)


def test_both_pools_learn_the_trend_of_their_traffic() -> None:
    prefill, decode = PrefillSizer(CONFIG), DecodeSizer(CONFIG, 64)
    bins = [TrafficBin(100.0 * number, 10.0 * number, 100.0 * number, 1.0) for number in range(1, 61)]
    for newest in bins:
        prefill.learn(newest, BIN_S, share_in_time=1.0)
        decode.learn(newest, BIN_S, share_in_time=1.0)
    history = history_of(bins)
    need = prefill.need(history, PROFILE, NEW_PROMPTS, backlog=0.0, serving=6, start_s=60.0)
    assert need.figures["forecast_tokens_per_s"] > bins[-1].prefill_per_s
    assert decode.need(history, PROFILE, 60.0).figures["forecast_sequences"] > bins[-1].sequences


def test_a_prompt_may_wait_for_the_time_that_its_uncached_part_leaves() -> None:
    assert prefill_need(PrefillSizer(CONFIG)).figures["slack_s"] == pytest.approx(2.0 - 0.5)
    half_cached = PromptMix(typical=500, uncached=0.5)
    assert prefill_need(PrefillSizer(CONFIG), half_cached).figures["slack_s"] == pytest.approx(2.0 - 0.25)
    longest = PromptMix(typical=5000, uncached=1.0)
    assert prefill_need(PrefillSizer(CONFIG), longest).figures["slack_s"] == pytest.approx(2.0 / 5), "at least a fifth"
