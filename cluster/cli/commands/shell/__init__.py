"""Commands that help with typing the others.

`completion` prints a script for the shell at hand. It reads the parsers of all commands, so that nothing is listed
twice, and the script calls no server while you type.
"""
