"""Outputs that match a grammar: compiled off the step loop, masked beside the step, replayed from the tokens alone.

Others take `GrammarQueue`, which gives a sequence its matcher before it is scheduled; the engine takes `MaskThread`. A
matcher has no state but the output tokens that it has read, so whatever rebuilds a sequence rebuilds it. The room knows
nothing of requests, pages or who receives a token.
"""
