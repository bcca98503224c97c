"""Constrains outputs to grammars, which are compiled off the step loop, masked during the step, and replayed from the
tokens.

Others take `GrammarQueue`, which gives a sequence its matcher before it is scheduled; the engine takes `MaskThread`. A
matcher's state follows from the output tokens that it has read, so whatever rebuilds a sequence rebuilds its matcher.
The room knows nothing of requests, pages or who receives a token.
"""
