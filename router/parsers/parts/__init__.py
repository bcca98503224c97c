"""The parts that make up the syntax of a tool call, such as a literal, a name, a JSON object or tagged parameters.

`router.parsers.formats` composes them; `router.parsers.output_parser` feeds them one character at a time. A part must
not know which format uses it.
"""
