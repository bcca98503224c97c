"""Speculation: tokens that may follow a text are proposed, and one step computes and verifies several of them.

Others take `Speculator` (decides who proposes how many tokens, and learns as steps end), `Proposal`, the protocols of
its makers (a draft model implements one in the decode worker), `StepCostTable`, and `num_accepted`, which decides how
much of a proposal holds. All of it is pure except for the clock that a `Speculator` is given. The room knows sequences
and their tokens; it knows no pages, no logits and no requests.
"""
