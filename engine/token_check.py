"""Whether tokens that came over the wire can be computed here at all: asked by both workers before anything is done.

A worker trusts no router and no other worker with this: a position or a token beyond the model's tables would end its
step loop, and with it every request that it holds. Pools may also differ in their context.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InvalidInput


def check_token_ids(token_ids: Sequence[int], num_to_come: int, context_length: int, vocab_size: int) -> None:
    """Raises InvalidInput unless the tokens, and `num_to_come` after them, fit into the context and the vocabulary."""
    if not token_ids:
        raise InvalidInput("token_ids", "are empty; give at least one token")
    if len(token_ids) + num_to_come > context_length:
        raise InvalidInput(
            "token_ids",
            f"are {len(token_ids)}, but this worker holds {context_length} tokens of context; shorten the prompt",
        )
    if max(token_ids) >= vocab_size:
        raise InvalidInput("token_ids", f"hold {max(token_ids)}; the vocabulary ends at {vocab_size - 1}")
