"""Parses what a model writes into text, reasoning and tool calls, token by token. Pure.

`router.api` takes `ParserEvent` and the parsers that `choose_parsers` finds for a model's chat template. What a parser
returns does not depend on how the text was cut, and text that fits no format stays text. This room must not know HTTP,
requests or workers.
"""
