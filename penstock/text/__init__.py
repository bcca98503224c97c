"""Turns token ids into text and into the outputs that a request streams. Shared by routers and decode workers.

Others take `CompletionText`, `Spelling`, and `Output` with `to_response` from `completions`. Nothing here loads a
tokenizer, so that the bare client needs none.
"""
