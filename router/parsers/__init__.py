"""Parses a model's output into text, reasoning and tool calls as it arrives. Pure.

`router.api` uses `choose_parsers`, which finds a model's formats from its chat template, and `OutputParser`, which
turns text into `ParserEvent`s. The parsed output does not depend on how its text was split, and text that fits no
format stays text. The room must not know HTTP, requests or workers.
"""
