"""Which proposed tokens hold, and how often they did. Pure.

A sampled token depends on the text, the seed and its position alone. So a step that verifies proposed tokens samples
the token of every position as a step of its own would, and a proposal holds as long as it equals what was sampled. The
output is bit for bit that of decoding one token at a time, greedy or seeded: no distribution is corrected.
"""

from __future__ import annotations

from collections.abc import Sequence

_DECAY = 0.9  # of what is known of a sequence, by each verification after it
_PRIOR_WEIGHT = 2.0  # tokens that what is known of other sequences counts for


def num_accepted(proposed: Sequence[int], sampled: Sequence[int]) -> int:
    """Returns how many leading proposed tokens equal the sampled ones."""
    count = 0
    for token_id, own in zip(proposed, sampled, strict=False):
        if token_id != own:
            break
        count += 1
    return count


class AcceptanceRate:
    """The probability that a proposed token holds if those before it do, by what was seen last."""

    def __init__(self, accepted: float = 0.0, tried: float = 0.0, decay: float = _DECAY) -> None:
        self._accepted = accepted
        self._tried = tried
        self._decay = decay

    def observe(self, num_proposed: int, num_held: int) -> None:
        """Notes a proposal of which the first `num_held` tokens were right."""
        self._accepted = self._accepted * self._decay + num_held
        self._tried = self._tried * self._decay + num_held + (num_held < num_proposed)

    def given(self, prior: float) -> float:
        """Returns the rate; `prior` is what to assume where little was seen."""
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._tried + _PRIOR_WEIGHT)
