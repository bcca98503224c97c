"""Tests what a decode worker learns about the prefills of others."""

from __future__ import annotations

from decode_worker.prefill.remote_costs import RemoteCosts, RemoteTimes

SLOW = RemoteTimes(total_s=5.0, queue_s=0.0, prefill_s=1.0, predicted_prefill_s=0.1, num_tokens=200)


def test_a_slow_first_hand_off_is_not_learned() -> None:
    """It opens connections. One such hand-off could keep all later prompts away."""
    costs, untaught = RemoteCosts(), RemoteCosts()
    costs.on_first_token("p", SLOW, 0.0)
    costs.on_landed("p", 10**6, 2.0)
    assert costs.hop_s("p") == costs.hop_s("other") == untaught.hop_s("p")
    assert costs.landing_s("p", 10**6) == costs.landing_s("other", 10**6) == untaught.landing_s("p", 10**6)
    for _ in range(5):
        costs.on_first_token("p", SLOW, 1.0)
        costs.on_landed("p", 10**6, 2.0)
    assert costs.hop_s("p") > 10 * untaught.hop_s("p")
    assert costs.landing_s("p", 10**6) > 10 * untaught.landing_s("p", 10**6)


def test_a_fast_first_hand_off_is_learned() -> None:
    costs, untaught = RemoteCosts(), RemoteCosts()
    costs.on_first_token("p", RemoteTimes(0.101, 0.0, 0.1, 0.1, 200), 0.0)
    costs.on_landed("p", 10**6, 0.001)
    assert costs.hop_s("p") < untaught.hop_s("p")
    assert costs.landing_s("p", 10**6) < untaught.landing_s("p", 10**6)


def test_before_the_first_transfer_a_long_prompt_is_not_priced_as_if_its_pages_travelled_alone() -> None:
    assert RemoteCosts().landing_s("p", 12_288 * 131_072) < 0.3
