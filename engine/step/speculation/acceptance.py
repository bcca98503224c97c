"""Decides which proposed tokens hold, and tracks how often they do. Pure.

A sampled token depends only on the text, the seed and its position. So a step that verifies proposed tokens samples at
every position the token that a separate step would, and a proposal holds as long as it equals what was sampled. The
output is bit for bit that of decoding one token at a time, greedy or seeded: no distribution is corrected.
"""

from __future__ import annotations

from collections.abc import Sequence

_DECAY = 0.9  # by which a sequence's earlier observations shrink with each verification
_PRIOR_WEIGHT = 2.0  # the observed tokens that the prior counts as


def num_accepted(proposed: Sequence[int], sampled: Sequence[int]) -> int:
    """Returns how many leading proposed tokens equal the sampled ones."""
    count = 0
    for token_id, own in zip(proposed, sampled, strict=False):
        if token_id != own:
            break
        count += 1
    return count


class AcceptanceRate:
    """Estimates the probability that a proposed token holds if those before it do, from recent observations."""

    def __init__(self, accepted: float = 0.0, tried: float = 0.0, decay: float = _DECAY) -> None:
        self._accepted = accepted
        self._tried = tried
        self._decay = decay

    def observe(self, num_proposed: int, num_held: int) -> None:
        """Learns from a proposal whose first `num_held` tokens were right."""
        self._accepted = self._accepted * self._decay + num_held
        self._tried = self._tried * self._decay + num_held + (num_held < num_proposed)

    def given(self, prior: float) -> float:
        """Returns the rate, which is close to `prior` while little was observed."""
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._tried + _PRIOR_WEIGHT)
