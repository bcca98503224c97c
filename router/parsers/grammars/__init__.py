"""Writes llguidance grammars of outputs whose tool calls are valid, one writer for each format.

`router.parsers.choice` takes `write_grammar`. This room must not know how outputs are parsed or a grammar is used.
"""
