"""Parts of which the syntax of a tool call is composed: a literal, a name, a JSON object, parameters in tags.

`router.parsers.formats` composes them; `router.parsers.output_parser` feeds them one character at a time. A part must
not know which format uses it.
"""
