"""A module a command: `add_arguments(parser)` and `run(arguments)`, which returns the exit status.

The file's name is the command's, and its first line, "`penstock NAME`: ...", its line of help. Import Ray, torch, rich
and other heavy packages inside `run`: the command's own `--help` imports its module.
"""
