"""Turns token ids into text: detokenizing, stop strings, token texts. Shared by routers and decode workers.

Others take `CompletionText` and `Spelling`. Nothing here loads a tokenizer, so that the bare client needs none.
"""
