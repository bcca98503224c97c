"""Drafting: models that propose tokens for the sequences of a decode worker, between two steps.

Others take `load_draft`, which loads what `decode.draft_model` names: a small model of its own (`DraftModel`) or a head
over the target's hidden states (`DraftHead`). Both implement `engine.step.speculation.proposal.DraftProposer`. The room
knows a draft's pages and tokens; whether drafting pays is decided by `engine.step.speculation`.
"""
