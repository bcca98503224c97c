"""Defines the log-probabilities of prompt tokens, and the rows of a step that give them.

A request that asks for them has its prompt computed by its decode worker, every token of it, in chunks of at most
`engine.memory.estimates.SCORED_TOKENS` a step: that bounds the logits of a step, which take a row of the whole
vocabulary for each token.

Imports numpy but no torch. Shapes: `S` scored tokens, `A` the token itself and its alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens whose log-probability a step finds. The logits of the row before each follow those of sampled rows."""

    token_ids_S: np.ndarray  # int64
    positions_S: np.ndarray  # int64, of these tokens in their sequences
    places_S: np.ndarray  # int64, place of each sequence in the caller's list; those of one sequence are together
    num_top_S: np.ndarray  # int64, alternatives to return


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Natural log-probabilities of consecutive prompt tokens of one sequence."""

    first: int  # position of the first of them
    token_ids_SA: np.ndarray  # int64; the token, then the likeliest ones
    logprobs_SA: np.ndarray  # float32
