"""One module a command: HELP, `add_arguments(parser)` and `run(arguments)`, which returns the exit status.

The file's name is the command's. Import Ray, torch, rich and other heavy packages inside `run`: every module here is
imported for every command.
"""
