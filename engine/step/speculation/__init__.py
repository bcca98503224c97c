"""Speculation: tokens that may follow a text are proposed, and one step computes and verifies several of them.

Others take `Speculator` (who proposes how much, kept up to date as steps end), `Proposal` and the protocols of who
makes them (a draft model does so in the decode worker), `StepCostTable`, and `num_accepted`, the rule that keeps a
proposal. All of it is pure but for the clock that a `Speculator` is given. The room knows sequences and their tokens;
it knows no pages, no logits and no requests.
"""
