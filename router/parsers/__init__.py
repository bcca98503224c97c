"""Parses what a model writes into text, reasoning and tool calls, token by token. Pure.

`router.api` takes `choose_parsers`, which finds the formats of a model from its chat template, and `OutputParser`,
which turns text into `ParserEvent`s. What a parser returns does not depend on how the text was cut, and text that fits
no format stays text. This room must not know HTTP, requests or workers.
"""
