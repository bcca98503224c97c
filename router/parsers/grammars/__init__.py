"""Writes llguidance grammars of outputs whose tool calls are valid, one writer for each format.

`router.parsers.parser_choice` uses `write_grammar`. The room must not know how outputs are parsed or grammars are
enforced.
"""
