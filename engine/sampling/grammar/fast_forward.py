"""Finds tokens that need no sampling: if a grammar leaves only one continuation, it is appended at once, several tokens
a step.

Which tokens are forced depends only on the output. They are appended after every output token of a sequence, wherever
it runs, so an output has the same tokens however its request was served. They are the tokens that llguidance names for
the forced text, and an end-of-sequence token where the grammar has ended.
"""

from __future__ import annotations

from engine.step.sequence import Sequence


def forced_tokens(sequence: Sequence) -> list[int]:
    """Returns the tokens that follow the sequence's last output token without sampling. Requires a matcher if it has a
    grammar.

    Nothing is forced before the first output token, whose step is needed for the prompt anyway; for a request that
    wants log-probabilities, since they take a step for each token; or together with bans, which the grammar does not
    know. Raises PenstockError if the output has left the grammar.
    """
    sampling = sequence.sampling
    if sequence.matcher is None or sequence.num_output_tokens == 0 or sampling.logprobs is not None:
        return []
    if sampling.allowed_token_ids or sampling.bad_sequences:
        return []
    return sequence.matcher.forced(sequence.token_ids, sequence.num_prompt_tokens)
